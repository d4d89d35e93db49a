"""The entry point ``vllm.general_plugins``, which runs once in every process that vLLM starts."""

from __future__ import annotations

import pkgutil
from importlib.util import find_spec

# A package that extends vLLM -> the function that registers our code with it. The package is found
# without an import, because its import would choose a device. The function is given by name,
# because integrations/vllm_ascend imports this folder.
PLUGINS_FOR = {"vllm_ascend": "sam_rollout.integrations.vllm_ascend.plugin:register"}


def register() -> None:
    """Apply the wrappers and workarounds that the installed vLLM needs; safe to call repeatedly."""
    from sam_rollout.integrations.vllm.cpu.cpu_workarounds import apply_cpu_workarounds
    from sam_rollout.integrations.vllm.model_drafts.drafter_weights import share_embeddings
    from sam_rollout.integrations.vllm.scheduling.request_rules import keep_rules_with_drafts
    from sam_rollout.integrations.vllm.scheduling.scheduler_choice import choose_schedulers
    from sam_rollout.integrations.vllm.second_runner.runner_choice import allow_second_runner
    from sam_rollout.integrations.vllm.serving.dead_engine import answer_or_die, keep_causes

    keep_causes()
    answer_or_die()
    apply_cpu_workarounds()
    choose_schedulers()
    keep_rules_with_drafts()
    allow_second_runner()
    if not any(map(find_spec, PLUGINS_FOR)):  # such a package has drafter classes of its own
        share_embeddings()
    for package, plugin in PLUGINS_FOR.items():
        if find_spec(package):
            pkgutil.resolve_name(plugin)()
