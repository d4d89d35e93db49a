"""Runs vllm-ascend on a CPU, with a stand-in for torch_npu."""

import copy
import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sam_rollout.config import ARTICLE as SAM

ROOT = Path(__file__).parents[2]
STAND_IN = str(Path(__file__).parent / "stand_in")
LIMIT_S = 900
MODEL = str(ROOT / "recipes" / "dapo_qwen3" / "tiny_qwen3")

# Only the virtual environment that `scripts/test.sh ascend` makes contains vllm_ascend.
collect_ignore_glob = [] if find_spec("vllm_ascend") else ["test_*.py"]

if not collect_ignore_glob:
    sys.path.insert(0, STAND_IN)
    # Processes that vLLM starts have to find the stand-in, too.
    paths = [STAND_IN, os.environ.get("PYTHONPATH")]
    os.environ.update(
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
        OMP_NUM_THREADS="1",
        TORCHDYNAMO_DISABLE="1",  # TorchDynamo would ask torch for an accelerator's streams
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        # vLLM keeps facts about model classes in this folder, because collecting them is slow.
        VLLM_CACHE_ROOT=str(ROOT / ".cache" / "vllm-ascend"),
    )
    import torch_npu  # noqa: F401
    from vllm.plugins import load_general_plugins

    load_general_plugins()


@pytest.fixture(scope="session")
def vllm_config():
    """Return a drafting engine's configuration, which vllm-ascend's platform has completed."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm_ascend.ascend_config import init_ascend_config
    from vllm_ascend.utils import adapt_patch

    from sam_rollout.integrations.vllm.engine_settings import engine_arguments

    config = EngineArgs(
        model=MODEL,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        async_scheduling=False,
        distributed_executor_backend="uni",
        **engine_arguments(SAM),
    ).create_engine_config()
    adapt_patch()
    with set_current_vllm_config(config), socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1, 1)
        init_ascend_config(config)
        yield config


@pytest.fixture
def make_runner(vllm_config):
    """Return a function that makes a runner; its arguments replace fields of the configuration."""
    import torch

    # Modules of vllm-ascend import each other in a circle, so this import has to be the first.
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    def make(**fields):
        config = copy.copy(vllm_config)
        # A runner changes the scheduler's configuration, so each runner gets a copy.
        config.scheduler_config = copy.copy(vllm_config.scheduler_config)
        for name, value in fields.items():
            setattr(config, name, value)
        return NPUModelRunner(config, torch.device("cpu"))

    return make


@pytest.fixture
def runner(make_runner):
    return make_runner()


@pytest.fixture(scope="session")
def answers():
    command = [sys.executable, "-m", "tests.ascend.answering"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    engines = json.loads(done.stdout.splitlines()[-1])
    return {"engines": engines, "warnings": done.stderr + done.stdout}
