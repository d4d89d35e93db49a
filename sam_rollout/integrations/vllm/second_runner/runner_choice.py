"""Lets an engine with our drafter use vLLM's second model runner, if the environment asks for it.

With the second runner, vLLM refuses the method `custom_class`, and `init_speculator` cannot make a
plug-in's drafter. If ``VLLM_USE_V2_MODEL_RUNNER=1``, this module removes the refusal and wraps
`init_speculator`.
"""

import os
import sys
from typing import Any

from packaging.version import Version

from sam_rollout.integrations.vllm.engine_settings import MODEL_RUNNER_ENV, drafts_here
from sam_rollout.integrations.vllm.wrapping import wrap_once

# tests/contracts/rows covers these releases of vLLM.
SECOND_RUNNER_RELEASES = ((0, 31),)
_RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
_REFUSED = "speculative method 'custom_class'"


def is_second_runner(runner: Any) -> bool:
    """Whether a runner is vLLM's second model runner."""
    return hasattr(runner, "req_states")


def allow_second_runner() -> None:
    """Let the second runner make our drafter, if the environment asks for it; safe to repeat."""
    if os.environ.get(MODEL_RUNNER_ENV) != "1":
        return
    import vllm

    if Version(vllm.__version__).release[:2] not in SECOND_RUNNER_RELEASES:
        return
    from vllm.config.vllm import VllmConfig
    from vllm.v1.worker.gpu import spec_decode

    wrap_once(VllmConfig, "_get_v2_model_runner_unsupported_features", _without_ours)
    wrap_once(spec_decode, "init_speculator", _making_ours)
    if _RUNNER_MODULE in sys.modules:
        sys.modules[_RUNNER_MODULE].__dict__["init_speculator"] = spec_decode.init_speculator


def _without_ours(refused: Any) -> Any:
    def without_ours(self: Any) -> list[str]:
        return [name for name in refused(self) if name != _REFUSED or not drafts_here(self)]

    return without_ours


def _making_ours(make: Any) -> Any:
    def make_ours(vllm_config: Any, device: Any, *others: Any) -> Any:
        if not drafts_here(vllm_config):
            return make(vllm_config, device, *others)
        from sam_rollout.integrations.vllm.second_runner.speculator import SamSpeculator

        return SamSpeculator(vllm_config, device)

    return make_ours
