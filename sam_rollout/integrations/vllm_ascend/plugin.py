"""Puts our drafter and samplers into vllm-ascend's model runner without changing its source.

vLLM loads plugins before it knows its device, so the runner is wrapped when its module is imported.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from sam_rollout.integrations.vllm.engine_settings import METHOD, has_settings, settings_of
from sam_rollout.integrations.vllm.wrapping import wrap_once
from sam_rollout.integrations.vllm_ascend.versions import is_supported, require_supported

RUNNER_MODULE = "vllm_ascend.worker.model_runner_v1"
# A source tree with our patches sets this flag in the runner's module.
PATCHED_FLAG = "SAM_ROLLOUT_PATCHED"


def register() -> None:
    """Wrap the runner; safe to call repeatedly.

    If the runner's module is not loaded yet, the runner is wrapped when the module is imported.
    """
    if RUNNER_MODULE in sys.modules:
        wrap(sys.modules[RUNNER_MODULE])
    elif not any(isinstance(finder, _RunnerFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RunnerFinder())


class _RunnerFinder(importlib.abc.MetaPathFinder):
    """Finds the runner's module in the usual way, and wraps the runner once the module has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != RUNNER_MODULE:
            return None
        sys.meta_path.remove(self)  # only the other finders search now
        try:
            spec = importlib.util.find_spec(name)
        finally:
            # This finder stays, because a module may be looked up without being imported.
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            wrap(module)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def wrap(module: ModuleType) -> None:
    """Wrap the module's runner; our patches for the supported release make this unnecessary."""
    runner = module.NPUModelRunner
    if not is_supported():
        wrap_once(runner, "__init__", _unless_asked_for_ours)
        return
    from sam_rollout.integrations.vllm_ascend.model_drafts import share_weights

    share_weights()  # needed even with patched source: our patches do not change drafters
    if not getattr(module, PATCHED_FLAG, False):
        wrap_once(runner, "_get_drafter", _make_drafter)
        wrap_once(runner, "propose_draft_token_ids", _propose_drafts)
        wrap_once(runner, "__init__", _then_install_samplers)


def _make_drafter(original: Any) -> Any:
    def get_drafter(self: Any) -> Any:
        from sam_rollout.integrations.vllm_ascend import hooks

        if self.speculative_config.method != METHOD:
            return original(self)
        return hooks.make_drafter(self.vllm_config, self)

    return get_drafter


def _propose_drafts(original: Any) -> Any:
    def propose_draft_token_ids(
        self: Any, valid_sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from sam_rollout.integrations.vllm_ascend import hooks

        if self.speculative_config is None or self.speculative_config.method != METHOD:
            return original(self, valid_sampled_token_ids, *args, **kwargs)
        return hooks.propose_drafts(self, valid_sampled_token_ids)

    return propose_draft_token_ids


def _then_install_samplers(original: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from sam_rollout.integrations.vllm_ascend import hooks

        original(self, *args, **kwargs)
        hooks.install_samplers(self)

    return init


def _unless_asked_for_ours(original: Any) -> Any:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if has_settings(vllm_config) and (asked := settings_of(vllm_config).ours):
            require_supported(asked)
        original(self, vllm_config, *args, **kwargs)

    return init
