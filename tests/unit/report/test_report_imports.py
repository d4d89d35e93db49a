"""Telemetry and report run where neither the engine nor the trainer is installed."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

MODULES = {
    "telemetry": ("aggregate", "docs", "records", "schema"),
    "report": ("compare", "learning", "page", "plots", "recorded", "runs", "sources", "tables"),
}


@pytest.mark.parametrize("package", MODULES)
def test_imports_no_engine(package):
    names = [f"sam_rollout.{package}.{module}" for module in MODULES[package]]
    foreign = {"torch", "vllm", "verl", "vllm_ascend", "ray"}
    if package == "telemetry":
        # Sources declare their metrics; the kernels they draft with are loaded when they are made.
        foreign |= {"numba", "sam_rollout.drafting", "sam_rollout.integrations"}
    code = f"import sys, {', '.join(names)}; print(sorted({foreign!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
