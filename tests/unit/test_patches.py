"""Checks the patches in patches/ and the script that applies them.

tests/ascend/test_patched_tree.py applies the patches to upstream's files.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "apply_patches.sh"
FOLDERS = sorted(path for path in (ROOT / "patches").iterdir() if path.is_dir())
LIMIT_S = 60


def series(folder: Path) -> list[str]:
    lines = (folder / "series").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def files_of(patch: Path) -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend" / "__init__.py").touch()
    set_version(tmp_path, "9.9.9")
    return tmp_path


def set_version(tree: Path, version: str) -> None:
    (tree / "vllm_ascend" / "_version.py").write_text(f"__version__ = version = '{version}'\n")


def run(*arguments: str | Path, **options: object) -> tuple[int, str]:
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **options)
    return done.returncode, done.stdout + done.stderr


def refused(*arguments: str | Path, **options: object) -> str:
    status, text = run(*arguments, **options)
    assert status == 1
    return text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--aply"], "unknown argument '--aply'"),
        (["--check", "--undo"], "--check and --undo exclude each other"),
        (["--target"], "--target needs a value"),
        (["--target", "no/such/folder"], "there is no folder 'no/such/folder'"),
        (["--python", "no-such-python"], "there is no interpreter 'no-such-python'"),
    ],
)
def test_wrong_arguments_end_in_one_line(arguments: list[str], message: str) -> None:
    text = refused(*arguments)
    assert text.startswith(f"error: {message}") and text.count("\n") == 1


def test_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    text = refused("--target", tmp_path)
    assert f"no package vllm_ascend in {tmp_path}" in text and "nothing to patch here" in text


def test_other_version_is_refused_by_name(tree: Path) -> None:
    for action in ([], ["--check"]):
        text = refused(*action, "--target", tree)
        supported = " ".join(folder.name.removeprefix("vllm-ascend-") for folder in FOLDERS)
        assert f"vllm-ascend 9.9.9 was found in {tree}" in text
        assert f"there are patches for vllm-ascend {supported}" in text


def test_files_of_somebody_else_are_refused_by_name(tree: Path) -> None:
    folder = FOLDERS[0]
    set_version(tree, folder.name.removeprefix("vllm-ascend-"))
    files = {file for patch in folder.glob("*.patch") for file in files_of(patch)}
    for file in files:
        (tree / file).parent.mkdir(exist_ok=True)
        (tree / file).write_text("# another file\n")
    text = refused("--target", tree)
    for file in files:
        needed_for = [name for name in series(folder) if file in files_of(folder / name)]
        assert f"{tree}/{file} is not that of" in text and " ".join(needed_for) in text
        assert (tree / file).read_text() == "# another file\n"
    refused("--status", "--target", tree)


def test_missing_tools_are_named(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    tools = tmp_path_factory.mktemp("tools")
    for name in ("bash", "dirname", "python3"):
        (tools / name).symlink_to(shutil.which(name))
    text = refused("--target", tree, env={"PATH": str(tools)})
    assert "neither 'patch' nor 'git' was found" in text
