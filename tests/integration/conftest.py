"""Starts vLLM engines on the tiny model, and ends them after their test module."""

import faulthandler
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = str(REPOSITORY / "recipes" / "dapo_qwen3" / "tiny_qwen3")

# Every process, this one included, needs these variables before it imports vLLM.
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    # vLLM's n-gram drafter sets numba's number of threads, and thereby torch's.
    NUMBA_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",  # as in a run on a CPU: vLLM compiles no C++ code
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    PYTHONPATH=os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
)


@pytest.fixture(scope="session")
def few_collections() -> Iterator[None]:
    """Prevent vLLM's three garbage collections per engine, each of which takes half a second."""
    from vllm.distributed import parallel_state
    from vllm.utils import gc_utils
    from vllm.v1.worker import gpu_model_runner

    idle = SimpleNamespace(**vars(gc) | {"collect": lambda *_: 0})
    with pytest.MonkeyPatch.context() as patch:
        for module in (parallel_state, gc_utils, gpu_model_runner):
            patch.setattr(module, "gc", idle)
        yield


@pytest.fixture(scope="module")
def make_engine(pytestconfig: pytest.Config, few_collections: None) -> Iterator[Callable[..., Any]]:
    """Return ``make_engine(sam_config, **vllm_arguments)``, which starts a ``vllm.LLM``."""
    from vllm import LLM, envs

    from sam_rollout.integrations.vllm.engine_settings import engine_arguments
    from sam_rollout.integrations.vllm.offline import (
        EXTENSION,
        MULTIPROCESSING_ENV,
        end_core,
        unmix,
    )

    # tvm_ffi, which comes with vLLM, would take over the handler of SIGSEGV and hide crashes.
    if (stderr := pytestconfig.stash.get(fault_handler_stderr_fd_key, None)) is not None:
        faulthandler.disable()  # otherwise enable() does nothing
        faulthandler.enable(stderr)

    engines: list[LLM] = []

    def make(config: Any, **overrides: Any) -> LLM:
        arguments = {
            "model": MODEL,
            "dtype": "float32",
            "max_model_len": 1280,
            "max_num_seqs": 32,
            # Without a number of blocks, each engine would allocate VLLM_CPU_KVCACHE_SPACE. These
            # blocks take a quarter of this space.
            "num_gpu_blocks_override": 330,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": EXTENSION,
            "distributed_executor_backend": "uni",
            **({} if "additional_config" in overrides else engine_arguments(config)),
            **overrides,
        }
        envs.disable_envs_cache()  # earlier engines in this process made vLLM cache the variables
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(MULTIPROCESSING_ENV, "0")
            engine = LLM(**arguments)
        engine.collective_rpc("sam_bind")
        engines.append(engine)
        return engine

    yield make
    # Engines end in reverse order, because forked ranks hold pipes of earlier engines.
    for engine in reversed(engines):
        end_core(engine)
        unmix(engine.llm_engine.vllm_config.parallel_config.worker_cls, EXTENSION)
    engines.clear()
    envs.disable_envs_cache()
    gc.collect()


@pytest.fixture(scope="session")
def model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    from recipes.dapo_qwen3.synthetic_math import draw_problems, prompts_of

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return prompts_of(draw_problems(seed=7, count=24), tokenizer)
