"""Tests whole DAPO runs of the tiny model: with Ray, FSDP2, vLLM's server, dynamic sampling."""

import re
from datetime import datetime

import pandas as pd

from sam_rollout.report.panels import SECTIONS
from sam_rollout.telemetry.curve import CURVE_NAME
from tests import megatron

RESPONSES_PER_PROMPT = 8
# Rollout and actor use different bf16 kernels, whose results differ by less than this. A wrong
# sampler makes a difference of 0.1 or more.
MAX_PROBS_DIFF_MEAN = 0.01


def _assert_trained(steps: dict[int, dict[str, float]], count: int) -> None:
    assert sorted(steps) == list(range(1, count + 1))
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        assert metrics["sam/engine/generation_tokens"] > 0
        assert metrics["training/rollout_probs_diff_mean"] < MAX_PROBS_DIFF_MEAN
        assert 0 <= metrics["sam/rounds/accuracy_unfiltered"] <= 1


def _assert_recorded(run, metrics: dict[str, float], step: int) -> None:
    engine = run.folder.read("engine_steps").to_pandas()
    engine = engine[(engine.step == step) & (engine.split == "train")]
    assert engine.generation_tokens.sum() == metrics["sam/engine/generation_tokens"]
    assert engine.accepted_tokens.sum() == metrics["sam/draft/accepted_tokens"]
    requests = run.folder.read("requests").to_pandas()
    requests = requests[(requests.step == step) & (requests.split == "train")]
    siblings = requests.groupby("group").sibling.apply(sorted)
    assert all(list(numbers) == list(range(RESPONSES_PER_PROMPT)) for numbers in siblings)
    assert requests.response_tokens.sum() == metrics["sam/engine/generation_tokens"]
    assert len(siblings) == metrics["sam/rounds/generated_groups"]


def test_on_megatron_a_head_learns_along_and_training_goes_on_when_the_drafter_dies(train):
    actor = "actor_rollout_ref.actor"
    settings = [
        f"+{actor}.megatron.override_transformer_config.{name}={str(value).lower()}"
        for name, value in megatron.ON_CPU.items()
    ]
    run = train(
        "training=megatron",
        f"{actor}.strategy=megatron",  # device=cpu sets fsdp2
        f"~{actor}.fsdp_config",
        f"{actor}.megatron.vanilla_mbridge=true",
        *settings,
        "sam=trained",
        "sam.sources.model.train.budget=0.3",
        "sam.gate.kind=threshold",
        "sam.gate.threshold=60",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "rollout_telemetry.progress=on",
        "rollout_telemetry.curve_every=1",
        "rollout_telemetry.proof.every=1",
        "trainer.logger=[console,tensorboard,wandb,file]",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
        "tests.e2e.breaking_extension.BreakingExtension",
        paths=megatron.find(),
    )
    steps = run.steps
    _assert_trained(steps, 2)
    _assert_recorded(run, steps[1], 1)
    assert "drafter sam_rollout.integrations.vllm.drafting.proposer.SamProposer" in run.log
    assert steps[1]["sam/head_training/updates"] > 0
    for metrics in steps.values():
        assert metrics["sam/draft/accepted_model"] > 0  # in step 2 before the drafter dies
        assert metrics["sam/head_training/failures"] == 0
        if metrics["sam/head_training/updates"]:  # a busy machine may have no time for updates
            assert metrics["sam/head_training/length"] > 2.5
    assert (run.folder.path / "checkpoints" / "draft_head" / "model.safetensors").is_file()
    assert [steps[step]["sam/draft/failures"] for step in (1, 2)] == [0, 1]
    assert run.log.count("Drafting failed and is switched off") == 1
    assert steps[1]["sam/draft/drafted_tokens"] > 0
    assert 1 < steps[1]["sam/draft/acceptance_length"] < 9
    assert 0 < steps[1]["sam/gate/open_share"] < 1
    engine = run.folder.read("engine_steps").to_pandas()
    opened = engine[engine.split == "train"].groupby("step").gate_open.sum()
    assert opened[1] > 20 >= opened[2]
    assert steps[1]["sam/proof/identical_share"] == 1 and steps[1]["sam/proof/time_s"] > 0
    assert "Proof, training step 1: 8 of 8 responses" in run.log
    assert steps[2]["sam/sentinel/texts_differ"] == 0
    _assert_recorded(run, steps[2], 2)
    assert re.search(r"rollout: \d+ finished, \d+ running", run.log)
    assert steps[2]["sam_val/engine/generation_tokens"] > 0
    splits = run.folder.read("requests").to_pandas().groupby("split").size()
    assert splits["val"] == 8
    assert len(list(run.folder.path.glob("tensorboard/events*"))) == 1
    (wandb_file,) = run.folder.path.glob("wandb/offline-run-*/*.wandb")
    tracked = wandb_file.read_bytes()  # protocol buffers contain texts uncompressed
    for text in ("sam:joined", "sampler:coupled", "device:cpu", "sam/tail/time_s", CURVE_NAME):
        assert text.encode() in tracked, text
    assert len(list(wandb_file.parent.rglob("*.png"))) == 2, "a curve for each step"
    panels = [panel for section in SECTIONS for panel in section.panels]
    absent = {name for panel in panels for name in panel.metrics if name not in steps[1]}
    later = re.compile(r"compare/|sam/gain/|sam/draft/accepted_|sam/head_training/")
    assert all(map(later.match, absent))
    assert "sam/tail/time_s" in (run.folder.path / "metrics.jsonl").read_text()


def test_a_baseline_with_verls_own_refill_ends_when_its_engine_dies_in_a_weight_sync(train):
    """verl's own weight sender would wait for the dead engine for ever."""
    run = train(
        "sam=off",
        "dynamic_sampling=refill",
        "trainer.total_training_steps=99",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
        "tests.e2e.breaking_extension.RefusingExtension",
        fails=True,
    )
    steps = run.steps
    _assert_trained({1: steps[1]}, 1)
    _assert_recorded(run, steps[1], 1)
    assert "no drafter (sam.enabled=false)" in run.log
    assert steps[1]["sam/draft/drafted_tokens"] == 0
    assert steps[1]["sam/draft/acceptance_length"] == 1
    assert steps[1]["sam/gate/open_share"] == 0
    assert steps[1]["sam/tail/tokens"] > 0
    assert run.log.splitlines()[-1].startswith("The run failed: ")
    assert "ValueError: these weights are not wanted" in run.log.splitlines()[-1]


def _parts(run) -> pd.DataFrame:
    requests = run.folder.read("requests").to_pandas()
    began = [datetime.fromisoformat(one.started_at).timestamp() for one in run.folder.read_starts()]
    requests["start"] = sum((requests.end_s >= one for one in began), start=0)
    return requests[requests.split == "train"].sort_values("end_s")


def test_interrupted_responses_go_on_and_a_killed_run_is_resumed(train):
    trainer = (
        "sam=joined",
        "trainer.v1.trainer_mode=sam_colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches=1",
        "dynamic_sampling=none",
        "dynamic_sampling.gen_batch_size=4",
        "actor_rollout_ref.rollout.max_num_seqs=32",  # as many as a step has responses
        "trainer.val_before_train=true",  # so the reward's slow first call is over before step 1
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
    )

    def has_records_of_step_2(folder) -> bool:
        return len(list(folder.root.glob("requests/0-*.parquet"))) == 3  # validation and two steps

    killed = train(*trainer, killed_when=has_records_of_step_2)
    probed = r"eagle3 drafts; in a probe of \d+ first draft tokens \d+ were right"
    assert re.search(probed, killed.log)
    before = _parts(killed)
    assert list(killed.steps) == [0, 1] and set(before.step) == {1, 2}
    assert _count_continued(before) > 0
    trained = killed.folder.read("engine_steps").to_pandas().sort_values("time_s")
    trained = trained[trained.split == "train"]
    idle_s = trained.time_s - trained.duration_s - trained.time_s.shift()
    assert idle_s.max() >= killed.steps[1]["timing_s/update_actor"]
    run = train(*trainer)
    assert "Restored 4 training prompt groups from TransferQueue" in run.log
    steps = run.steps
    assert steps.pop(0)["sam_val/engine/generation_tokens"] > 0
    _assert_trained(steps, 2)
    assert steps[1]["sam/rounds/staleness"] == 0 <= steps[2]["sam/rounds/staleness"] <= 1
    parts = _parts(run)
    assert set(before.group) <= set(parts.group) and parts.group.nunique() <= 12
    assert set(parts[parts.step == 2].start) == {2} and set(parts[parts.step == 1].start) == {1}
    engine = run.folder.read("engine_steps").to_pandas()
    for step, metrics in steps.items():
        own = engine[(engine.step == step) & (engine.split == "train")]
        assert own.generation_tokens.sum() == metrics["sam/engine/generation_tokens"]
        assert parts[parts.step == step].response_tokens.sum() == own.generation_tokens.sum()
        assert metrics["sam/draft/failures"] == metrics["sam/draft/texts_failures"] == 0
    assert _count_continued(parts) == 0, "the resumed run samples anew"


def test_engines_with_devices_of_their_own_go_on_while_the_policy_trains(train):
    rollout = "actor_rollout_ref.rollout"
    run = train(
        "sam=on",
        "trainer.v1.trainer_mode=sam_separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "trainer.v1.separate_async.num_warmup_batches=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"{rollout}.nnodes=1",
        f"{rollout}.max_num_seqs=16",  # a sixth of the responses, so that updates interrupt some
        f"+{rollout}.engine_kwargs.vllm.num_gpu_blocks_override=100",  # two engines share memory
        f"{rollout}.checkpoint_engine.backend=file",
        f"{rollout}.checkpoint_engine.custom_backend_module=tests.e2e.file_checkpoint_engine",
        "ray_kwargs.ray_init.num_gpus=2",
        "dynamic_sampling=none",
        "dynamic_sampling.gen_batch_size=4",
        "trainer.total_training_steps=2",
    )
    steps = run.steps
    _assert_trained(steps, 2)
    parts, engine = _parts(run), run.folder.read("engine_steps").to_pandas()
    for step, metrics in steps.items():
        own = engine[(engine.step == step) & (engine.split == "train")]
        assert own.generation_tokens.sum() == metrics["sam/engine/generation_tokens"]
        assert parts[parts.step == step].response_tokens.sum() == own.generation_tokens.sum()
        assert metrics["sam/draft/accepted_tokens"] == own.accepted_tokens.sum() > 0
        assert metrics["sam/draft/failures"] == metrics["sam/draft/texts_failures"] == 0
    assert steps[1]["sam/rounds/staleness"] == 0 <= steps[2]["sam/rounds/staleness"] <= 1
    assert set(parts.weights) == {0, 1} and set(parts[parts.weights == 1].step) == {2}
    assert 1 in set(engine.replica), "the engine of replica 1 has its own device"


def _count_continued(parts: pd.DataFrame) -> int:
    """Check that parts of a response follow each other; count the responses with several parts."""
    interrupted = parts[parts.finish_reason == "aborted"]
    assert len(interrupted) and (interrupted.weights == interrupted.step - 1).all()
    continued = 0
    for _, response in parts.groupby(["group", "sibling", "start"]):
        so_far = response.response_tokens.cumsum().shift(fill_value=0)
        assert list(response.resumed_tokens) == list(so_far)
        assert (response.prompt_tokens - so_far == response.prompt_tokens.iloc[0]).all()
        assert response.weights.is_monotonic_increasing
        assert set(response.finish_reason[:-1]) <= {"aborted"}
        continued += len(response) > 1
    return continued
