"""A key of verl's that would do nothing is refused with what takes its place."""

import pytest

from sam_rollout.config import ConfigError
from tests.settings_checks import check
from tests.unit.integrations.verl.test_checks import composed
from tests.unit.test_configs import plain_shell  # noqa: F401 - a fixture for every test

FILTER = "algorithm.filter_groups"


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("data.gen_batch_size=24", "set dynamic_sampling.gen_batch_size"),
        (f"{FILTER}.max_num_gen_batches=1", "set dynamic_sampling.max_rounds"),
        (f"{FILTER}.enable=false", "set dynamic_sampling=none"),
        (f"{FILTER}.max_inflight_gen_batches=2", "is for dynamic_sampling=refill"),
        ("custom_reward_function.path=/x.py", "set reward.custom_reward_function.path"),
        ("custom_reward_function.name=f", "set reward.custom_reward_function.name"),
        ("reward_model.reward_manager=naive", "set reward.reward_manager.name"),
        ("reward_model.num_workers=2", "set reward.num_workers"),
        ("reward_model.enable=true", "set reward.reward_model.enable"),
        ("reward_model.model.path=m", "set reward.reward_model.model_path"),
        ("reward_model.rollout.name=vllm", "set reward.reward_model.rollout.name"),
        ("sandbox_fusion.url=http://x", "set reward.sandbox_fusion.url"),
        ("trainer.v1.sampler.custom_sampler.path=/x.py", "must be null"),
        ("actor_rollout_ref.rollout.do_sample=false", "must be true"),
        ("trainer.v1.trainer_mode=separate_async", "must be one of sam_sync, sam_colocate_async"),
        ("trainer.v1.sampler.sync_refill_failed_groups=true", "does nothing here"),
        (
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.B",
            "must be sam_rollout.integrations.verl.agent_loop.SamAgentLoopManager",
        ),
    ],
)
def test_a_key_without_effect_is_refused(override, instead):
    with pytest.raises(ConfigError) as caught:
        check(composed(override))
    assert caught.value.field == override.partition("=")[0]
    assert instead in caught.value.allowed and "\n" not in str(caught.value)


def test_an_asynchronous_trainer_does_not_wait_for_rounds():
    mode = "trainer.v1.trainer_mode=sam_colocate_async"
    with pytest.raises(ConfigError, match=r"dynamic_sampling.kind .*must be refill or none"):
        check(composed(mode))
    check(composed(mode, "dynamic_sampling=refill"))
    with pytest.raises(ConfigError, match=r"rollout_telemetry.proof.every .*must be 0"):
        check(composed(mode, "dynamic_sampling=refill", "rollout_telemetry.proof.every=5"))


def test_an_asynchronous_trainer_has_no_logits_processors_that_would_begin_anew():
    mode = ("trainer.v1.trainer_mode=sam_colocate_async", "dynamic_sampling=refill")
    own = "+actor_rollout_ref.rollout.engine_kwargs.vllm.logits_processors=[mine.Processor]"
    check(composed(own))
    with pytest.raises(ConfigError, match=r"vllm.logits_processors .*must be left out"):
        check(composed(own, *mode))
