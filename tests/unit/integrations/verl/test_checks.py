"""What is checked before a run, and how a wrong value is named."""

from copy import deepcopy

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError
from tests.settings_checks import check
from tests.unit.test_configs import composed as composed_anew
from tests.unit.test_configs import plain_shell  # noqa: F401 - a fixture for every test

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"


def chosen(*groups: str) -> DictConfig:
    return composed_anew("experiment=tiny_cpu", *groups)


def _is_choice(key: str) -> bool:
    return "." not in key and key != "run_dir"


def composed(*overrides: str) -> DictConfig:
    """The tiny experiment's; group choices ("sam=off") are composed by Hydra once."""
    groups = tuple(text for text in overrides if _is_choice(text.partition("=")[0]))
    config = deepcopy(chosen(*groups))
    for override in OverridesParser.create().parse_overrides(
        [text for text in overrides if text not in groups]
    ):
        OmegaConf.update(
            config, override.key_or_group, override.value(), force_add=override.is_add()
        )
    return config


# Overrides, and how the error goes on behind the last one. Values within a group:
# tests/unit/test_config.py.
BAD = [
    ("sam.max_draft_tokens=0", "must be 1..32"),
    ("sam.max_draft_tokens=many", "must be an integer"),
    ("+sam.gate.treshold=3", "unknown key; did you mean 'threshold'?"),
    (
        "sam.sources.run.corpus=/nowhere/a.jsonl",
        "must be a .jsonl file of lists of token ids, or traces of a run (.parquet): [Errno 2]",
    ),
    ("+rollout_telemetry.record_trace=true", "unknown key; did you mean 'record_traces'?"),
    ("rollout_telemetry.progress=log", "must be one of 'auto', 'on', 'off'"),
    (f"{ROLLOUT}.max_model_len=1152", "must be at least 1167"),
    (f"{ROLLOUT}.max_model_len=null", "must be an integer of at"),
    ("trainer.use_v1=false", "must be True"),
    ("trainer.v1.trainer_mode=sync", "must be 'sam_sync'"),
    (f"{ROLLOUT}.disable_log_stats=true", "must be False"),
    ("skip.rollout_tq.enable=true", "must be False"),
    (f"+{ENGINE}.speculative_config={{method:ngram}}", "must not be set with sam.enabled=true"),
    (
        "rollout_sampler.kind=gumbel",
        "must be one of 'stock', 'vectorised', 'coupled', 'coupled_gumbel'",
    ),
    ("dynamic_sampling.kind=batches", "must be one of 'rounds', 'refill', 'none'"),
    ("dynamic_sampling.gen_batch_size=0", "must be at least"),
    (
        "dynamic_sampling=none dynamic_sampling.gen_batch_size=24",
        "must equal data.train_batch_size",
    ),
    ("trainer.nnodes=0", "must be an integer of at least 1"),
    ("trainer.total_training_steps=0", "must be an integer of at least 1"),
    (f"{ROLLOUT}.val_kwargs.n=0", "must be an integer of at least 1"),
    ("reward.num_workers=0", "must be an integer of at least 1"),
    (f"{ROLLOUT}.temperature=-1", "must be at least 0"),
    (f"{ROLLOUT}.temperature=nan", "must be at least 0"),
    (f"{ROLLOUT}.val_kwargs.top_p=0", "must be more than 0 and at most 1"),
    ("actor_rollout_ref.actor.optim.lr=fast", "must be a number"),
    ("trainer.logger=[]", "must name at least one"),
    ("trainer.logger=null", "must name at least one"),
    ("run_dir=/dev/null", "/dev/null is no folder that can be written to"),
    ("trainer.resume_mode=never", "must be one of auto, disable, resume_path"),
    (
        "trainer.resume_mode=resume_path trainer.resume_from_path=/nowhere",
        "must be the folder of a checkpoint",
    ),
    ("compare.baseline_run=/nowhere", "must be the folder of a"),
]
# Overrides, and how an error about another field begins.
BAD_ELSEWHERE = [
    ("sam.gate.schedule={4:9}", "sam.gate.schedule.4 = 9: must be at most sam.max_draft_tokens"),
    (
        "+sam.sources.owm.enabled=true",
        "sam.sources.owm = {'enabled': True}: unknown key; did you mean 'own'?",
    ),
    (
        f"sam.max_draft_tokens=4 {ROLLOUT}.max_num_batched_tokens=4",
        "sam.max_draft_tokens = 4: must be less than max_num_batched_tokens = 4",
    ),
    (f"{ROLLOUT}.name=vllm sam=off", f"{ROLLOUT}.name = 'vllm': must be 'sam_vllm'"),
    (
        f"+{ENGINE}.additional_config={{sam_rollout:{{sam:1}}}}",
        f"{ENGINE}.additional_config.sam_rollout = {{'sam': 1}}: must not be set: it is filled "
        "from sam, rollout_sampler",
    ),
]


def named_by(overrides: str) -> str:
    last = OverridesParser.create().parse_override(overrides.split()[-1])
    return f"{last.key_or_group} = {last.value()!r}: "


@pytest.mark.parametrize(
    ("overrides", "said"),
    [*((overrides, named_by(overrides) + rest) for overrides, rest in BAD), *BAD_ELSEWHERE],
)
def test_a_wrong_value_is_named_with_what_is_allowed(overrides, said):
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides.split()))
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["sam=off", f"+{ENGINE}.speculative_config={{method:ngram,num_speculative_tokens:3}}"],
        ["sam=off", f"{ROLLOUT}.max_model_len=1152"],
        ["sam.gate.kind=threshold", "sam.gate.threshold=0"],
        ["dynamic_sampling=none", "dynamic_sampling.gen_batch_size=${data.train_batch_size}"],
        [f"+{ENGINE}.additional_config={{other:1}}"],
        [f"{ROLLOUT}.router_config_path=mine.yaml"],
    ],
    ids=[
        "other drafter when off",
        "no room needed when off",
        "never drafts",
        "no filter",
        "others",
        "a router of others",
    ],
)
def test_what_is_allowed_passes_in_silence(overrides, capsys):
    check(composed(*overrides))
    assert capsys.readouterr().out == ""


def test_a_corpus_of_a_larger_vocabulary_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "a.jsonl").write_text("[1, 2]\n[3, 1000000]\n")
    with pytest.raises(ConfigError, match="ids from 3 to 1000000; the model has"):
        check(composed(f"sam.sources.run.corpus={tmp_path}/a.jsonl"))


def test_drafts_that_will_be_cut_short_are_noted(capsys):
    check(composed(f"{ROLLOUT}.max_num_batched_tokens=128"))
    (note,) = capsys.readouterr().out.splitlines()
    assert note.startswith("Note: 64 requests may draft at once")


def test_a_threshold_that_the_gate_does_not_go_by_is_noted(capsys):
    check(composed("sam.gate.threshold=4"))
    (note,) = capsys.readouterr().out.splitlines()
    assert note.startswith("Note: sam.gate.threshold = 4: the gate 'auto' does not go by it")


def test_greedy_validation_of_several_responses_is_noted(capsys):
    val = f"{ROLLOUT}.val_kwargs"
    check(composed(f"{val}.do_sample=false"))
    assert capsys.readouterr().out == ""
    check(composed(f"{val}.do_sample=false", f"{val}.n=3"))
    assert "the 3 responses to a prompt (val_kwargs.n) will be the same" in capsys.readouterr().out
