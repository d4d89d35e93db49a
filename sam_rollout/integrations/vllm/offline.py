"""Runs vLLM's offline engines with our drafter and sampler, one after the other."""

from __future__ import annotations

import gc
import os
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sam_rollout.config import RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.engine_settings import ENGINES_OWN_SAMPLER, MODEL_RUNNER_ENV

if TYPE_CHECKING:
    from vllm import LLM

MULTIPROCESSING_ENV = "VLLM_ENABLE_V1_MULTIPROCESSING"
EXTENSION = "sam_rollout.integrations.vllm.worker.SamWorkerExtension"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output is for results
    "VLLM_NO_USAGE_STATS": "1",
    MODEL_RUNNER_ENV: "0",
}


def prepare_environment() -> None:
    """Set those variables of `ENVIRONMENT` that are not set yet.

    Call this before torch or vLLM is imported.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def offline_engine(
    model: str,
    sam: SamConfig,
    sampler: RolloutSamplerConfig = ENGINES_OWN_SAMPLER,
    *,
    worker_extension: str = EXTENSION,
    record: bool = False,
    **overrides: Any,
) -> Iterator[LLM]:
    """Run a ``vllm.LLM`` with our drafter and sampler for the length of a ``with`` statement.

    Args:
        worker_extension: Full name of ``SamWorkerExtension`` or a subclass.
        record: Whether to keep records. If so, the caller has to fetch them with ``sam_drain``.
        overrides: Engine arguments. If they include ``speculative_config``, the caller chooses the
            drafter, and it is not checked whether our drafter runs.
    """
    prepare_environment()
    from vllm import LLM
    from vllm.platforms import current_platform

    from sam_rollout.integrations.vllm.drafting.startup_check import check_drafters, check_samplers
    from sam_rollout.integrations.vllm.engine_settings import engine_arguments, settings_of
    from sam_rollout.integrations.vllm.scheduling.request_rules import keep_rules_with_drafts

    keep_rules_with_drafts()  # without entry points, vLLM does not call it
    arguments = {
        "model": model,
        "generation_config": "vllm",  # the checkpoint's settings may change the caller's sampling
        "enable_prefix_caching": False,
        "worker_extension_cls": worker_extension,
        **engine_arguments(sam, sampler),
        **overrides,
    }
    multiprocessing = os.environ.get(MULTIPROCESSING_ENV)
    if current_platform.is_cpu():
        arguments.setdefault("enforce_eager", True)  # compiling takes minutes and gains little
        if arguments.get("tensor_parallel_size", 1) == 1:
            os.environ.setdefault(MULTIPROCESSING_ENV, "0")
            arguments.setdefault("distributed_executor_backend", "uni")
    engine = None
    try:
        engine = LLM(**arguments)
        reports = engine.collective_rpc("sam_bind", kwargs={"record": record})
        if "speculative_config" not in overrides:
            check_drafters(reports, settings_of(engine.llm_engine.vllm_config).sam)
        check_samplers(reports, sampler)
        yield engine
    finally:
        if engine is not None:
            end_core(engine)
            unmix(engine.llm_engine.vllm_config.parallel_config.worker_cls, worker_extension)
        if multiprocessing is None:
            os.environ.pop(MULTIPROCESSING_ENV, None)
        del engine
        gc.collect()


def end_core(engine: LLM) -> None:
    """Shut an engine down, and drop the results of its last steps."""
    core = engine.llm_engine.engine_core
    core.shutdown()
    # The garbage collector may hang on these queues, because their futures hold sockets.
    inner = getattr(core, "engine_core", None)  # None if the core runs in its own process
    executor = getattr(inner, "model_executor", None)
    for queue in getattr(inner, "batch_queue", None), getattr(executor, "futures_queue", None):
        if queue:
            queue.clear()


def unmix(worker: str, extension: str) -> None:
    """Remove an ended engine's extension from vLLM's worker class.

    The class can have only one extension at a time.
    """
    worker_class = pkgutil.resolve_name(worker)
    worker_class.__bases__ = tuple(
        base
        for base in worker_class.__bases__
        if f"{base.__module__}.{base.__qualname__}" != extension
    )
