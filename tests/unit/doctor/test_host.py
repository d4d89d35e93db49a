import resource
from types import SimpleNamespace

import pytest

from sam_rollout.doctor import Question, host
from sam_rollout.sizing import GIB

SHAPE = {"layers": 1, "hidden": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128}
SHAPE |= {"intermediate": 1, "vocab": 2**20}


def disk(monkeypatch, free_gib, total_gib=100):
    usage = SimpleNamespace(free=int(free_gib * GIB), total=int(total_gib * GIB))
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: usage)


def ask(device="cpu", **trainer):
    rollout = {"checkpoint_engine": {"update_weights_bucket_megabytes": 2048}}
    return Question(
        device,
        {
            "trainer": {"n_gpus_per_node": 8, **trainer},
            "actor_rollout_ref": {"rollout": rollout},
            "ray_kwargs": {"ray_init": {"object_store_memory": 4 * GIB}},
            "model_shape": SHAPE,
        },
    )


@pytest.mark.parametrize(
    ("device", "free_gib", "status"),
    [
        ("cpu", 21, "ok"),  # 8 ranks of 2 GiB, 4 for Ray
        ("cpu", 19, "fail"),
        ("ascend_910c", 19, "warn"),
        ("ascend_910c", 3, "fail"),
        ("cuda", 5, "ok"),
    ],
)
def test_shared_memory_against_weights_and_object_store(monkeypatch, device, free_gib, status):
    disk(monkeypatch, free_gib)
    (line,) = host.check_shared_memory(ask(device))
    assert line.status == status


def test_a_containers_default_is_too_little(monkeypatch, question):
    disk(monkeypatch, 0.06, 0.0625)
    (line,) = host.check_shared_memory(question)
    assert line.status == "warn" and "--shm-size" in line.fix


@pytest.mark.parametrize(
    ("limits", "nodes", "status"),
    [
        ((1024, 1048576), 1, "warn"),
        ((1024, 1048576), 2, "warn"),  # scripts/node.sh raises it
        ((1024, resource.RLIM_INFINITY), 2, "warn"),
        ((1024, 4096), 1, "warn"),
        ((1024, 4096), 2, "fail"),
        ((65536, 65536), 2, "ok"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1, "ok"),
    ],
)
def test_open_files(monkeypatch, limits, nodes, status):
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: limits)
    (line,) = host.check_open_files(ask(nnodes=nodes))
    assert line.status == status
    assert ("limits.conf" in line.fix) == (0 <= limits[1] < host.OPEN_FILES)


@pytest.mark.parametrize(
    ("free_gib", "trainer", "status"),
    [
        (1, {"save_freq": -1}, "ok"),
        (27, {"save_freq": 1}, "fail"),  # 2 * 2^30 parameters of 14 bytes
        (30, {"save_freq": 1}, "warn"),
        (60, {"save_freq": 1, "max_actor_ckpt_to_keep": 1}, "ok"),
        (55, {"save_freq": 1, "max_actor_ckpt_to_keep": 1}, "warn"),
        (60, {"save_freq": 2, "total_training_steps": 3}, "ok"),
        (60, {"save_freq": 1, "total_training_steps": 3}, "warn"),
    ],
)
def test_disk_against_checkpoints(monkeypatch, free_gib, trainer, status):
    disk(monkeypatch, free_gib)
    (line,) = host.check_disk(ask(**trainer))
    assert line.status == status, line


def test_a_model_of_unknown_shape_is_said_to_be(monkeypatch):
    disk(monkeypatch, 1)
    (line,) = host.check_disk(
        Question("cpu", {"trainer": {"save_freq": 1}, "model_shape": {"x": 1}})
    )
    assert line.status == "skip" and "model_shape.x" in line.found


def test_without_an_experiment_nothing_is_assumed(question):
    (line,) = host.check_disk(question)
    assert line.status == "skip"
