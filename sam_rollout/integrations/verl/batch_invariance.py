"""Checks whether a run can use batch-invariant kernels, before it loads a model."""

from __future__ import annotations

import os

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import RunConfig
from sam_rollout.integrations.verl.check_results import hold
from sam_rollout.integrations.verl.environment import experiment_variables
from sam_rollout.integrations.verl.upstream_keys import ROLLOUT
from sam_rollout.integrations.vllm.batch_invariance import BACKENDS, BATCH_INVARIANT_ENV

_DTYPES = ("bfloat16", "float16", "float32")  # vLLM's batch-invariant matrix products support these
_BACKEND_KEYS = ("attention_backend", "attention_config.backend")


def check_batch_invariance(config: DictConfig, run: RunConfig) -> None:
    """Check `batch_invariant` against the environment, the device, attention backend and dtype."""
    field, wanted = f"{run.sampler.PATH}.batch_invariant", run.sampler.batch_invariant
    given = {**experiment_variables(config), **os.environ}.get(BATCH_INVARIANT_ENV)
    agrees = given is None or (given != "0") == wanted
    allowed = f"must agree with {BATCH_INVARIANT_ENV}={given}: unset that, the setting is recorded"
    hold([(field, wanted, agrees, allowed)])
    if not wanted:
        return
    device, rollout = config.trainer.device, config.actor_rollout_ref.rollout
    kernels = f"must be false on trainer.device={device}: vLLM has such kernels for accelerators"
    rules = [
        (field, wanted, device in ("cuda", "npu"), kernels),
        (f"{ROLLOUT}.dtype", rollout.dtype, rollout.dtype in _DTYPES, _allowed(_DTYPES)),
    ]
    if device == "cuda":  # vllm-ascend chooses its own backend
        for key in _BACKEND_KEYS:
            name = f"{ROLLOUT}.engine_kwargs.vllm.{key}"
            backend = OmegaConf.select(config, name)
            known = backend is None or str(backend).upper() in (*BACKENDS, "AUTO")
            rules.append((name, backend, known, _allowed(BACKENDS)))
    hold(rules)


def _allowed(values: tuple[str, ...]) -> str:
    return f"must be one of {', '.join(values)} with rollout_sampler.batch_invariant=true"
