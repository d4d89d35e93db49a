"""What we work around in verl, with tests that tell when a workaround can go."""

from __future__ import annotations

import inspect


def test_verl_still_names_the_cpu_backend_twice():
    """``use_single_gloo_backend`` can go when verl no longer joins two backends for one device."""
    import verl.utils.distributed as distributed

    function = distributed.initialize_global_process_group_ray
    source = inspect.getsource(inspect.unwrap(function))
    if getattr(function, "defaults_to_gloo", False):
        source = inspect.getsource(function.__closure__[0].cell_contents)
    assert "cpu:gloo" in source and "get_device_name()" in source


def test_every_part_of_verl_finds_our_registrations(monkeypatch):
    from verl.plugin.platform import PlatformRegistry
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    import sam_rollout.integrations.verl.plugin  # noqa: F401 - registers
    from sam_rollout.integrations.verl.names import ROLLOUT_NAME
    from sam_rollout.integrations.verl.platform_cpu import PlatformCPU
    from sam_rollout.integrations.verl.server import SamReplica

    assert PlatformRegistry.get("cpu") is PlatformCPU
    assert RolloutReplicaRegistry.get(ROLLOUT_NAME) is SamReplica
    assert get_rollout_class(ROLLOUT_NAME).__name__ == "SamServerAdapter"
