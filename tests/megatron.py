"""Finds Megatron for tests of verl's Megatron engine on a CPU."""

import subprocess
from pathlib import Path

from tests.upstream import SourcesUnavailable, skip_outside_ci

ROOT = Path(__file__).parents[1]
FETCH_S = 120
# The folder that replaces CUDA and its kernels must come first.
FOLDERS = (ROOT / "tests" / "megatron_on_cpu", ROOT / ".cache" / "megatron")
# Entries of `override_transformer_config`. Fusions are off, because they need CUDA's kernels.
ON_CPU = {"use_cpu_initialization": True} | dict.fromkeys(
    (
        "apply_rope_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
    ),
    False,
)


def find() -> list[Path]:
    """Return the folders for PYTHONPATH; download Megatron if necessary.

    If the download is impossible, the test is skipped, or fails in CI.
    """
    script = ROOT / "scripts" / "lib" / "megatron_for_tests.sh"
    try:
        done = subprocess.run([script], capture_output=True, text=True, timeout=FETCH_S)
        reason = done.stderr[-500:] if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        reason = str(error)
    if reason:
        skip_outside_ci(SourcesUnavailable(f"cannot fetch Megatron-Core: {reason}"))
    return [*FOLDERS, ROOT]
