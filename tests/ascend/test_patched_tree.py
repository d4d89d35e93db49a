"""Tests the script that patches the published vllm-ascend, and an engine with the patches."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ascend.conftest import ROOT
from tests.upstream import SDISTS

SCRIPT = ROOT / "scripts" / "apply_patches.sh"
VERSION = "0.23.0"
FOLDER = ROOT / "patches" / f"vllm-ascend-{VERSION}"
RECORD = f".sam_rollout-vllm-ascend-{VERSION}"
# Folders of the source package that contain the code, the version and the plugins.
WANTED = ("vllm_ascend/", "vllm_ascend.egg-info/")
MADE_BY_BUILDING = "_build_info.py"
# Plugins that vLLM may load: vllm-ascend's, but not sam_rollout's.
PLUGINS = (
    "ascend",
    "ascend_kv_connector",
    "ascend_model",
    "ascend_model_loader",
    "ascend_service_profiling",
)
SCRIPT_LIMIT_S = 60
RUN_LIMIT_S = 600


def unpack(folder: Path) -> None:
    """Unpack the published source package; take `_build_info.py` from the installed package."""
    with tarfile.open(SDISTS / f"vllm_ascend-{VERSION}.tar.gz") as archive:
        for member in archive:
            member.name = member.name.partition("/")[2]
            if member.name.startswith(WANTED):
                archive.extract(member, folder, filter="data")
    installed = Path(find_spec("vllm_ascend").origin).parent
    shutil.copy(installed / MADE_BY_BUILDING, folder / "vllm_ascend")


def run_script(tree: Path, *arguments: str, **options: object) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", str(SCRIPT), "--target", str(tree), *arguments],
        capture_output=True,
        text=True,
        timeout=SCRIPT_LIMIT_S,
        **{"env": {**os.environ, "PYTHON": sys.executable}, **options},
    )
    return done.returncode, done.stdout + done.stderr


def read(tree: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in tree.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(p.relative_to(tree)): (p.stat().st_mode, p.read_bytes()) for p in files}


def run_python(tree: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python with a tree's vllm-ascend; vLLM does not load sam_rollout's plugins."""
    paths = [str(tree), os.environ.get("PYTHONPATH")]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "VLLM_PLUGINS": ",".join(PLUGINS),
        },
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )


LISTED = [line.split()[1] for line in (FOLDER / "pristine.sha256").read_text().splitlines()]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    unpack(folder)
    return folder


@pytest.fixture
def tree(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "tree")


def apply(tree, *arguments, **options):
    status, text = run_script(tree, *arguments, **options)
    assert status == 0, text
    return text


def refuse(tree, *arguments, **options):
    """Run the script, which must fail and leave the tree as it was; return its output."""
    before = read(tree)
    status, text = run_script(tree, *arguments, **options)
    assert status == 1
    assert read(tree) == before
    return text


def test_only_what_the_patches_name_is_changed(tree):
    before = read(tree)
    assert "would apply: 3 patches to vllm-ascend 0.23.0" in apply(tree, "--check")
    assert read(tree) == before
    assert "applied: 3 patches" in apply(tree)
    after = read(tree)
    changed = {name for name, content in before.items() if after[name] != content}
    assert changed == set(LISTED)
    new = {name for name in after.keys() - before.keys()}
    assert {name.partition("/")[0] for name in new} == {RECORD}
    for name in LISTED:
        assert after[name][0] == before[name][0], "the mode of the file"
        compile(after[name][1], name, "exec")


def test_undo_restores_every_byte_and_applying_twice_changes_nothing(tree):
    before = read(tree)
    assert run_script(tree, "--status")[0] == 1
    apply(tree)
    once = read(tree)
    assert "already applied" in apply(tree)
    assert read(tree) == once
    assert "==> applied" in apply(tree, "--status")
    assert "undone" in apply(tree, "--undo")
    assert read(tree) == before
    assert "nothing to undo" in apply(tree, "--undo")
    assert run_script(tree, "--status")[0] == 1


def test_file_that_was_changed_after_patching_is_kept(tree):
    apply(tree)
    with (tree / LISTED[1]).open("a") as file:
        file.write("# a change at the site\n")
    for action in ([], ["--undo"]):
        text = refuse(tree, *action)
        assert f"{LISTED[1]} is not that of vllm-ascend 0.23.0 as it was patched" in text
        assert LISTED[0] not in text


def test_package_that_was_installed_again_is_patched_again(pristine, tree):
    apply(tree)
    patched = read(tree)
    for name in LISTED:
        shutil.copy(pristine / name, tree / name)
    assert "applied: 3 patches" in apply(tree)
    assert read(tree) == patched


def test_other_patches_are_not_put_on_top(tree):
    apply(tree)
    with (tree / RECORD / "series").open("a") as file:
        file.write("# of another release of sam_rollout\n")
    text = refuse(tree)
    assert "other patches than these are applied" in text and "--undo" in text
    assert "undone" in apply(tree, "--undo")


def test_git_takes_the_place_of_patch(tree, tmp_path):
    before = read(tree)
    apply(tree)
    by_patch = read(tree)
    apply(tree, "--undo")
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        for tool in folder.iterdir() if folder.is_dir() else ():
            if tool.name != "patch" and not (tools / tool.name).is_symlink():
                (tools / tool.name).symlink_to(tool)
    without_patch = {"PATH": str(tools), "PYTHON": sys.executable}
    apply(tree, env=without_patch)
    assert read(tree) == by_patch
    apply(tree, "--undo", env=without_patch)
    assert read(tree) == before


def test_failure_between_two_files_puts_both_back(tree, tmp_path):
    mv = tmp_path / "mv"
    mv.write_text(
        f"#!/bin/bash\necho >> {tmp_path}/calls\n"
        f'[ $(wc -l < {tmp_path}/calls) != 2 ] && exec {shutil.which("mv")} "$@"\n'
    )
    mv.chmod(mv.stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    text = refuse(tree, env={**os.environ, "PATH": path, "PYTHON": sys.executable})
    assert "the files are as they were before" in text


def test_package_managers_copy_behind_a_hard_link_is_kept(tree, tmp_path):
    kept = tmp_path / "cached.py"
    os.link(tree / LISTED[0], kept)
    before = kept.read_bytes()
    apply(tree)
    assert kept.read_bytes() == before != (tree / LISTED[0]).read_bytes()


@pytest.mark.timeout(RUN_LIMIT_S)
def test_an_engine_drafts_without_our_plugin(tree):
    apply(tree)
    done = run_python(tree, "-m", "tests.ascend.answering", "off", "sync")
    assert done.returncode == 0, done.stderr[-3000:]
    off, on = json.loads(done.stdout.splitlines()[-1]).values()
    assert on["patched"] and off["patched"]
    assert on["sampler"] == off["sampler"] == "coupled"
    assert on["counters"]["draft/failures"] == 0
    assert on["plain"] == off["plain"]
    assert on["cut"]["texts"] == off["cut"]["texts"]
    assert 0 < on["accepted"] < on["drafted"]
