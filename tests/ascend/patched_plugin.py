"""pytest plugin for tests on a patched tree: says so, if they ran on anything else."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest


def pytest_sessionfinish():
    """Look at what the tests imported; ``pytest.exit`` gives the run a status of failure."""
    runner = sys.modules["vllm_ascend.worker.model_runner_v1"]
    if not getattr(runner, "SAM_ROLLOUT_PATCHED", False):
        pytest.exit("vllm-ascend is not patched", returncode=3)

    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    assert "sam_rollout" in {point.name for point in entry_points(group=DEFAULT_PLUGINS_GROUP)}
    if "sam_rollout" in load_plugins_by_group(DEFAULT_PLUGINS_GROUP):
        pytest.exit("sam_rollout's plugin is loaded", returncode=3)
