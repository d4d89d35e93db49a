"""Run uv with pip's settings; fetch uv with pip first if the machine lacks it.

    python run_uv.py [--cache FOLDER] pip install ...

pip fetches uv into FOLDER (by default a temporary one), so no environment is changed. uv does not
read pip's environment variables, so this program translates them:

* PIP_INDEX_URL becomes UV_DEFAULT_INDEX, and PIP_FIND_LINKS becomes UV_FIND_LINKS.
* The wheels of PIP_FIND_LINKS include the CPU build of torch. Without PIP_FIND_LINKS, uv takes this
  build from PyTorch's own index if CPU_TORCH is set. The pinned version of torch ends in +cpu.
  Ordinary indexes lack this version, so uv cannot install a CUDA build by mistake.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PYTHON_VERSION = "3.11"
CPU_TORCH = "CPU_TORCH"


def find_uv(folder: Path) -> str:
    """Return the path of uv; fetch uv into a folder if neither PATH nor the folder has it."""
    found = shutil.which("uv") or shutil.which("uv", path=str(folder / "bin"))
    if found:
        return found
    print(f"==> fetching uv into {folder}", file=sys.stderr)
    # An environment made by uv has no pip.
    for python in (sys.executable, f"python{PYTHON_VERSION}", "python3"):
        pip = [python, "-m", "pip"]
        if not shutil.which(python) or subprocess.run([*pip, "-V"], capture_output=True).returncode:
            continue
        fetch = ["install", "--quiet", "--disable-pip-version-check", "--target", str(folder), "uv"]
        if subprocess.run([*pip, *fetch]).returncode:
            sys.exit(f"error: '{' '.join(pip)}' could not fetch uv")
        return str(folder / "bin" / "uv")
    sys.exit("error: neither uv nor a Python with pip was found on PATH")


def settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for uv, made from those of this process."""
    variables = {name: value for name, value in given.items() if name != CPU_TORCH}
    if index := given.get("PIP_INDEX_URL"):
        variables.setdefault("UV_DEFAULT_INDEX", index)
    if links := given.get("PIP_FIND_LINKS"):
        # pip separates links by spaces, and uv separates them by commas
        variables.setdefault("UV_FIND_LINKS", ",".join(links.split()))
    elif given.get(CPU_TORCH):
        variables.setdefault("UV_TORCH_BACKEND", "cpu")
    # If Python may not write compiled files, uv writes them, so that no process has to compile its
    # imports.
    if given.get("PYTHONDONTWRITEBYTECODE"):
        variables["UV_COMPILE_BYTECODE"] = "1"
    return variables


def main(words: list[str]) -> int:
    """Run uv with these arguments; return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        if words[:1] == ["--cache"]:
            folder, words = words[1], words[2:]
        return subprocess.run([find_uv(Path(folder)), *words], env=settings(os.environ)).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
