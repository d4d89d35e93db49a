"""What a run leaves out of ``ray.init`` when the Ray cluster runs already."""

from omegaconf import OmegaConf

from sam_rollout.integrations.verl.launch import leave_to_running_cluster

OWN = {"num_cpus": 16, "num_gpus": 1, "object_store_memory": 500_000_000}
OTHERS = {"include_dashboard": False, "runtime_env": {}}


def left(monkeypatch, address=None, variable=None) -> dict:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    ray_init = {**OWN, **OTHERS, **({"address": address} if address else {})}
    config = OmegaConf.create({"ray_kwargs": {"ray_init": ray_init}})
    OmegaConf.set_struct(config, True)
    leave_to_running_cluster(config)
    return OmegaConf.to_container(config.ray_kwargs.ray_init)


def test_a_running_cluster_is_not_told_what_it_has(monkeypatch):
    there = "10.0.0.1:6766"
    assert left(monkeypatch) == OWN | OTHERS
    assert left(monkeypatch, address="local", variable=there) == OWN | OTHERS | {"address": "local"}
    assert left(monkeypatch, address=there) == OTHERS | {"address": there}
    assert left(monkeypatch, variable=there) == OTHERS
