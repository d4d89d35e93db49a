from copy import deepcopy

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError
from sam_rollout.integrations.verl import checks
from tests.settings_checks import check
from tests.unit.test_configs import CONFIGS
from tests.unit.test_configs import composed as composed_anew

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"


def composed(*overrides: str) -> DictConfig:
    groups = [text for text in overrides if (CONFIGS / text.partition("=")[0]).is_dir()]
    config = deepcopy(composed_anew("experiment=tiny_cpu", *groups))
    values = [text for text in overrides if text not in groups]
    for one in OverridesParser.create().parse_overrides(values):
        OmegaConf.update(config, one.key_or_group, one.value(), force_add=one.is_add())
    return config


BAD = [
    "+rollout_telemetry.record_trace=true",
    "rollout_telemetry.progress=log",
    f"{ROLLOUT}.max_model_len=1166",
    f"{ROLLOUT}.max_model_len=null",
    "trainer.use_v1=false",
    "trainer.v1.trainer_mode=sync",
    f"sam=off {ROLLOUT}.name=vllm",
    f"{ROLLOUT}.disable_log_stats=true",
    "skip.rollout_tq.enable=true",
    f"+{ENGINE}.speculative_config={{method:ngram}}",
    "rollout_sampler.kind=gumbel",
    "rollout_sampler=vectorised rollout_telemetry.proof.every=2",
    f"rollout_telemetry.proof.every=2 {ROLLOUT}.logprobs_mode=raw_logprobs",
    "dynamic_sampling.kind=batches",
    "dynamic_sampling.gen_batch_size=0",
    "dynamic_sampling=none dynamic_sampling.gen_batch_size=24",
    "trainer.nnodes=0",
    "trainer.total_training_steps=0",
    f"{ROLLOUT}.val_kwargs.n=0",
    "reward.num_workers=0",
    f"{ROLLOUT}.temperature=-1",
    f"{ROLLOUT}.temperature=nan",
    f"{ROLLOUT}.val_kwargs.top_p=0",
    "actor_rollout_ref.actor.optim.lr=fast",
    "trainer.logger=[]",
    "trainer.logger=null",
    "run_dir=/dev/null",
    "trainer.resume_mode=never",
    "trainer.resume_mode=resume_path trainer.resume_from_path=/nowhere",
    "compare.baseline_run=/nowhere",
]
BAD_ELSEWHERE = [
    (
        f"sam.max_draft_tokens=4 {ROLLOUT}.max_num_batched_tokens=4",
        "sam.max_draft_tokens = 4: must be less than max_num_batched_tokens = 4",
    ),
    (
        f"+{ENGINE}.additional_config={{sam_rollout:{{sam:1}}}}",
        f"{ENGINE}.additional_config.sam_rollout = {{'sam': 1}}: ",
    ),
]


def named_by(overrides: str) -> str:
    last = OverridesParser.create().parse_override(overrides.split()[-1])
    return f"{last.key_or_group} = {last.value()!r}: "


@pytest.mark.parametrize(
    ("overrides", "said"),
    [*((overrides, named_by(overrides)) for overrides in BAD), *BAD_ELSEWHERE],
)
def test_a_wrong_value_is_named(overrides, said):
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides.split()))
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["sam=off", f"+{ENGINE}.speculative_config={{method:ngram,num_speculative_tokens:3}}"],
        ["sam=off", f"{ROLLOUT}.max_model_len=1152"],
        [f"{ROLLOUT}.max_model_len=1167"],
        ["sam.gate.kind=threshold", "sam.gate.threshold=0"],
        [
            "dynamic_sampling=none",
            "dynamic_sampling.gen_batch_size=${data.train_batch_size}",
            "algorithm.filter_groups.enable=false",
        ],
        ["dynamic_sampling=refill", "algorithm.filter_groups.max_inflight_gen_batches=2"],
        [f"+{ENGINE}.additional_config={{other:1}}"],
        [f"{ROLLOUT}.router_config_path=mine.yaml"],
        [f"{ROLLOUT}.val_kwargs.do_sample=false"],
    ],
)
def test_what_is_allowed_passes_in_silence(overrides, capsys):
    check(composed(*overrides))
    assert capsys.readouterr().out == ""


def test_a_corpus_is_read_before_anything_starts_and_may_be_elsewhere_in_a_plan(tmp_path, capsys):
    config, corpus = composed(f"sam.sources.run.corpus={tmp_path}/a.jsonl"), tmp_path / "a.jsonl"
    sources = checks.FILES[:1]
    with pytest.raises(ConfigError, match=r"^sam\.sources\.run\.corpus = .*no such file"):
        checks.check(config, sources)
    checks.check(config, sources, planned=True)
    assert "Note: not on this machine: sam.sources.run.corpus" in capsys.readouterr().out
    corpus.write_text("[1, 2]\n[3, 1000000]\n")
    with pytest.raises(ConfigError, match="ids from 3 to 1000000; the model has"):
        checks.check(config, sources, planned=True)


VALIDATION = f"{ROLLOUT}.val_kwargs"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([f"{ROLLOUT}.max_num_batched_tokens=128"], "64 requests may draft at once"),
        (["sam.gate.threshold=4"], "sam.gate.threshold = 4"),
        ([f"{VALIDATION}.do_sample=false", f"{VALIDATION}.n=3"], "val_kwargs.do_sample = false"),
    ],
)
def test_what_runs_but_may_surprise_is_noted(overrides, named, capsys):
    check(composed(*overrides))
    (note,) = capsys.readouterr().out.splitlines()
    assert note.startswith("Note: ") and named in note
