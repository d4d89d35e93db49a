"""Settings of verl's that would do nothing in a run of ours, refused with what takes their place.

verl 0.9.1 keeps keys of older trainers that its V1 trainer never reads, and some of its keys are
filled from our groups. A user who sets one would train something else than the command says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError, RunConfig
from sam_rollout.integrations.verl.names import AGENT_LOOP_MANAGER

FILTER = "algorithm.filter_groups"
_SAMPLER = "trainer.v1.sampler"
_MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
# verl's groups of older releases (trainer/config/legacy_reward_impl.yaml) -> where V1 reads it.
_OLDER_GROUPS = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model": "reward.reward_model",
    "sandbox_fusion": "reward.sandbox_fusion",
}
_OLDER_KEYS = {
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.model.path": "reward.reward_model.model_path",
}


def check_upstream_keys(config: DictConfig, run: RunConfig) -> Iterator[Any]:
    """Refuse what would do nothing.

    Raises:
        ConfigError: Names the key, and the one that takes its place.
    """
    for field, value in _older_reward(config):
        place = next((new for old, new in _OLDER_KEYS.items() if field.startswith(old)), None)
        group, _, rest = field.partition(".")
        place = place or f"{_OLDER_GROUPS[group]}.{rest}"
        raise ConfigError(field, value, f"is not read any more: set {place}")
    kind = run.sampling.kind
    inflight = config.algorithm.filter_groups.max_inflight_gen_batches
    for field, wrong, instead in (
        ("data.gen_batch_size", config.data.gen_batch_size is not None,
         "does nothing here: set dynamic_sampling.gen_batch_size, the prompts of a round"),
        (f"{FILTER}.max_num_gen_batches", config.algorithm.filter_groups.max_num_gen_batches > 0,
         "does nothing here: set dynamic_sampling.max_rounds"),
        (f"{FILTER}.enable", not config.algorithm.filter_groups.enable and kind != "none",
         f"does nothing here: dynamic_sampling=none trains on every group (it is {kind!r} now)"),
        (f"{FILTER}.max_inflight_gen_batches", inflight != 1 and kind != "refill",
         f"is for dynamic_sampling=refill, and it is {kind!r}"),
        (f"{_SAMPLER}.custom_sampler.path",
         config.trainer.v1.sampler.custom_sampler.path is not None,
         "must be null: the group dynamic_sampling chooses what samples groups"),
        (f"{_SAMPLER}.sampler_kwargs", bool(config.trainer.v1.sampler.sampler_kwargs),
         "must be empty: it is filled from dynamic_sampling"),
        (f"{_SAMPLER}.sync_refill_failed_groups",
         bool(config.trainer.v1.sampler.sync_refill_failed_groups) and kind != "refill",
         "does nothing here: a group that failed is left out, and dynamic_sampling fills up"),
        ("actor_rollout_ref.rollout.do_sample", not config.actor_rollout_ref.rollout.do_sample,
         "does nothing in verl's V1 trainer, and greedy responses to a prompt are all the same: "
         "must be true"),
        (_MANAGER, config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
         != AGENT_LOOP_MANAGER, f"must be {AGENT_LOOP_MANAGER}: it gives responses their identity; "
         "an agent loop of your own goes into agent.agent_loop_config_path"),
    ):  # fmt: skip
        if wrong:
            value = OmegaConf.select(config, field)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            raise ConfigError(field, value, instead)
    yield from ()


def _older_reward(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """Find what is set below the groups of older releases: path and value."""

    def leaves(path: str, node: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(node, dict):
            if node is not None:
                yield path, node
            return
        for key, value in node.items():
            yield from leaves(f"{path}.{key}", value)

    for group in _OLDER_GROUPS:
        if config.get(group):
            yield from leaves(group, OmegaConf.to_container(config[group], resolve=True))
