import pytest

from sam_rollout.config import ConfigError
from tests.settings_checks import check
from tests.unit.integrations.verl.test_checks import ROLLOUT, composed

FILTER = "algorithm.filter_groups"


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("data.gen_batch_size=24", "set dynamic_sampling.gen_batch_size"),
        (f"{FILTER}.max_num_gen_batches=1", "set dynamic_sampling.max_rounds"),
        (f"{FILTER}.enable=false", "set dynamic_sampling=none"),
        (f"{FILTER}.max_inflight_gen_batches=2", "is for dynamic_sampling=refill"),
        ("custom_reward_function.path=/x.py", "set it below reward"),
        ("reward_model.model.path=m", "set it below reward"),
        ("sandbox_fusion.url=http://x", "set it below reward"),
        ("trainer.v1.sampler.custom_sampler.path=/x.py", "must be null"),
        ("actor_rollout_ref.rollout.do_sample=false", "must be true"),
        (
            "trainer.v1.trainer_mode=separate_async",
            "must be one of sam_sync, sam_colocate_async, sam_sep",
        ),
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


OWN_PROCESSOR = f"+{ROLLOUT}.engine_kwargs.vllm.logits_processors=[mine.Processor]"
COLOCATED = ("trainer.v1.trainer_mode=sam_colocate_async", "dynamic_sampling=refill")
SEPARATE = (
    "trainer.v1.trainer_mode=sam_separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.checkpoint_engine.backend=nccl",
    "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}",
    "dynamic_sampling=refill",
)


@pytest.mark.parametrize("mode", [COLOCATED, SEPARATE], ids=["colocated", "separate"])
@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("dynamic_sampling=rounds", r"dynamic_sampling.kind .*must be refill or none"),
        ("rollout_telemetry.proof.every=5", r"rollout_telemetry.proof.every .*must be 0"),
        (OWN_PROCESSOR, r"vllm.logits_processors .*must be left out"),
    ],
    ids=["rounds", "proof", "processors"],
)
def test_an_asynchronous_trainer_refuses_what_waits_or_begins_anew(mode, override, refused):
    check(composed(*mode))
    check(composed(override))
    with pytest.raises(ConfigError, match=refused):
        check(composed(*mode, override))


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        (f"{ROLLOUT}.nnodes=0", r"rollout.nnodes .*at least 1"),
        (f"{ROLLOUT}.checkpoint_engine.backend=naive", r"backend .*between devices"),
        ("trainer.v1.separate_async.parameter_sync_step=2", r"data.train_batch_size .*must be"),
        ("trainer.v1.separate_async.hybrid_rollout.enable_switch=true", "must be false"),
        ("actor_rollout_ref.hybrid_engine=false", r"hybrid_engine .*must be true"),
        ("sam=joined", r"sources.model.enabled .*must be false"),
    ],
)
def test_engines_with_devices_of_their_own_need_weights_from_elsewhere(override, refused):
    with pytest.raises(ConfigError, match=refused) as caught:
        check(composed(*SEPARATE, override))
    assert "\n" not in str(caught.value)
