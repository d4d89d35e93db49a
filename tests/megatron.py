"""verl's Megatron engine on a CPU: where Megatron lies, and settings that a CPU needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The stand-in for CUDA and its kernels has to come first.
FOLDERS = (ROOT / "tests" / "megatron_on_cpu", ROOT / ".cache" / "megatron")
# Of `override_transformer_config`: fusions are kernels of CUDA's.
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
    """What has to be on PYTHONPATH; fetches Megatron where it is not here."""
    subprocess.run([ROOT / "scripts" / "lib" / "megatron_for_tests.sh"], check=True)
    return [*FOLDERS, ROOT]
