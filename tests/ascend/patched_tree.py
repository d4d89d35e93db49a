"""A source tree of vllm-ascend as upstream publishes it, to be patched and run in place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

from tests.ascend.conftest import ROOT
from tests.upstream import SDISTS

SCRIPT = ROOT / "scripts" / "apply_patches.sh"
VERSION = "0.23.0"
FOLDER = ROOT / "patches" / f"vllm-ascend-{VERSION}"
RECORD = f".sam_rollout-vllm-ascend-{VERSION}"
# Of the source package: the code, and the metadata that says its version and its plugins.
WANTED = ("vllm_ascend/", "vllm_ascend.egg-info/")
MADE_BY_BUILDING = "_build_info.py"
# vLLM goes by the names of plugins, of platforms and others alike: vllm-ascend's are allowed,
# sam_rollout's is not.
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
    """Unpack the package as published; what building adds comes from the installed one."""
    with tarfile.open(SDISTS / f"vllm_ascend-{VERSION}.tar.gz") as archive:
        for member in archive:
            member.name = member.name.partition("/")[2]
            if member.name.startswith(WANTED):
                archive.extract(member, folder, filter="data")
    installed = Path(find_spec("vllm_ascend").origin).parent
    shutil.copy(installed / MADE_BY_BUILDING, folder / "vllm_ascend")


def run_script(tree: Path, *arguments: str, **options: object) -> tuple[int, str]:
    """Run scripts/apply_patches.sh on a tree; its exit status and everything it says."""
    done = subprocess.run(
        ["bash", str(SCRIPT), "--target", str(tree), *arguments],
        capture_output=True,
        text=True,
        timeout=SCRIPT_LIMIT_S,
        **{"env": {**os.environ, "PYTHON": sys.executable}, **options},
    )
    return done.returncode, done.stdout + done.stderr


def read(tree: Path) -> dict[str, tuple[int, bytes]]:
    """Relative name -> mode and content of every file but compiled ones."""
    files = (path for path in tree.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(p.relative_to(tree)): (p.stat().st_mode, p.read_bytes()) for p in files}


def run_python(tree: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run an interpreter of the checkout with this vllm-ascend, and the plugins of it alone."""
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
