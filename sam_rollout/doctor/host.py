"""What the operating system grants: shared memory, open files, disk."""

import math
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from sam_rollout.config import ConfigError
from sam_rollout.doctor.line import Line, judge, ok, skip, warn
from sam_rollout.doctor.question import Question
from sam_rollout.integrations.verl.policy_model import policy_shape
from sam_rollout.sizing import GIB

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_GIB = 1.0  # without an experiment: more than the 64 MiB a container gets by default
BIGGER_SHM = "mount -o remount,size=... /dev/shm; for a container docker run --shm-size=..."
OPEN_FILES = 32768  # as in verl's instructions for several nodes: Ray holds a socket for each peer
# Of a parameter in a checkpoint: bf16 weight, fp32 master weight and Adam's two moments.
CHECKPOINT_BYTES_PER_PARAMETER = 2 + 4 + 4 + 4


def check_shared_memory(question: Question) -> Iterator[Line]:
    """Compare /dev/shm with what weights and Ray's object store take of it."""
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB are free"
    if not question.config:
        small = usage.total < LEAST_SHARED_GIB * GIB
        yield judge(str(SHARED_MEMORY), found, BIGGER_SHM, warns=small)
        return
    bucket_mib = question.setting(
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes", 0
    )
    ranks = int(question.setting("trainer.n_gpus_per_node", 1))
    buckets = bucket_mib * 2**20 * ranks
    store = int(question.setting("ray_kwargs.ray_init.object_store_memory", 0))
    # Where processes share a device's memory, weights do not pass through the host's: always on
    # GPUs, with a new enough driver on NPUs.
    certain = store + (buckets if question.device == "cpu" else 0)
    possible = store + (buckets if question.device != "cuda" else 0)
    parts = f"{(possible - store) / GIB:.2f} for weights, {store / GIB:.2f} for Ray's object store"
    found = f"{found}; wanted are {parts}"
    fails, fix = usage.free < certain, BIGGER_SHM
    if not fails:
        fix = f"needed only if the NPU driver cannot share a device's memory: {BIGGER_SHM}"
    yield judge(str(SHARED_MEMORY), found, fix, fails=fails, warns=usage.free < possible)


def check_open_files(question: Question) -> Iterator[Line]:
    """Compare the limit of open files with what a cluster needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        yield ok("open files", soft)
        return
    raising = f"ulimit -n {OPEN_FILES} before ray start"
    if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES:
        yield warn("open files", soft, f"{raising}; scripts/node.sh does that by itself")
        return
    raising += f", after raising the hard limit ({hard}) in /etc/security/limits.conf"
    yield judge("open files", soft, raising, fails=question.many_nodes, warns=True)


def check_disk(question: Question) -> Iterator[Line]:
    """Compare the disk of the checkpoint folder with what a checkpoint takes."""
    if not question.config:
        yield skip("checkpoints", "not looked at without --experiment")
        return
    folder = Path(question.setting("trainer.default_local_dir", "checkpoints")).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    found = f"{free / GIB:.1f} GiB are free in {folder}"
    if int(question.setting("trainer.save_freq", -1)) <= 0:
        yield ok("checkpoints", f"{found}; the experiment saves none")
        return
    try:
        shape, _ = policy_shape(OmegaConf.create(dict(question.config)))
    except ConfigError as error:
        yield skip("checkpoints", f"{found}; size unknown, {error}")
        return
    size = shape.parameters * CHECKPOINT_BYTES_PER_PARAMETER
    wanted = _checkpoints_at_once(question)
    found = f"{found}; a checkpoint takes about {size / GIB:.2f} GiB, there will be {wanted}"
    fix = "free the disk, trainer.default_local_dir=..., or trainer.max_actor_ckpt_to_keep=1"
    yield judge("checkpoints", found, fix, fails=free < size, warns=free < size * wanted)


def _checkpoints_at_once(question: Question) -> int:
    """How many checkpoints of an experiment that saves some lie on the disk at most."""
    steps = int(question.setting("trainer.total_training_steps", 0))
    # Without a number of steps the length of the data decides; some tens are usual.
    written = math.ceil(steps / int(question.setting("trainer.save_freq"))) if steps else 10
    kept = int(question.setting("trainer.max_actor_ckpt_to_keep", 0))
    # A new one is written before the oldest is removed.
    return min(written, kept + 1) if kept else written
