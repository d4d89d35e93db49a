import json
import re
from pathlib import Path

import pytest

from sam_rollout.report.compare import compare_folders
from sam_rollout.report.verdict_sentences import sentences
from sam_rollout.telemetry.records import RunFolder


def found(comparison) -> dict[str, str]:
    return {finding.name: finding.severity for finding in comparison.findings}


def texts(comparison, name: str) -> list[str]:
    return [finding.text for finding in comparison.findings if finding.name == name]


@pytest.fixture
def base(synthetic):
    return synthetic("off")


def test_a_fair_pair_is_fair(compared):
    comparison = compared(noise_seed=1)
    assert comparison.fair is True and comparison.unfair == []
    assert found(comparison) == {"samples": "note"}
    assert texts(comparison, "samples") == ["All 96 responses are identical."]


def config(**parts) -> dict:
    return {"fields": {"more_config": parts}}


def data(**changed) -> dict:
    return config(data={"train_batch_size": 32, "max_response_length": 1024, "seed": 1} | changed)


def git(commit: str | None, dirty: bool | None) -> dict:
    return {"fields": {"git": {"commit": commit, "dirty": dirty}}}


def model(**paths) -> dict:
    return config(model=paths)


@pytest.mark.parametrize(
    ("base", "sam", "name", "severity", "text"),
    [
        ({}, data(train_batch_size=64),
         "config", "unfair", "data.train_batch_size: 32 in BASE, 64 in SAM"),
        ({}, data(max_response_length=512),
         "config", "unfair", "data.max_response_length: 1024 in BASE, 512 in SAM"),
        ({}, config(actor_rollout_ref={"rollout": {"n": 8}}),
         "config", "unfair", "rollout.n: absent in BASE, 8 in SAM"),
        ({}, config(rollout_sampler={"kind": "stock"}),
         "config", "unfair", "rollout_sampler.kind: coupled in BASE, stock in SAM"),
        (config(coupling="inversion"), config(coupling="gumbel"),
         "config", "unfair", "coupling: inversion in BASE, gumbel in SAM"),
        ({}, config(rollout_sampler={"kind": "coupled", "batch_invariant": True}),
         "config", "unfair", "rollout_sampler.batch_invariant: False in BASE, True in SAM"),
        ({}, config(rollout_telemetry={"proof": {"every": 5}}),
         "saving", "warning", "rollout_telemetry.proof.every: 0 in BASE, 5 in SAM"),
        ({}, config(trainer={"test_freq": 1}),
         "validation", "warning", "trainer.test_freq: absent in BASE, 1 in SAM"),
        ({}, model(path="/elsewhere/qwen3"),
         "config", "unfair", "model.path: absent in BASE, /elsewhere/qwen3 in SAM"),
        ({}, {"sam": False} | config(engine={"speculative_config": {"method": "ngram"}}),
         "config", "unfair", "engine.speculative_config.method: absent in BASE, ngram in SAM"),
        (model(path="/a/models/qwen3"), model(path="/b/models/qwen3"),
         "paths", "warning", "model.path: /a/models/qwen3 in BASE, /b/models/qwen3 in SAM"),
        (model(path="/1/global_step_10/actor"), model(path="/2/global_step_20/actor"),
         "paths", "unfair", "model.path: /1/global_step_10/actor in BASE"),
        (model(train_files="/a/dapo/train.parquet"), model(train_files="/a/gsm8k/train.parquet"),
         "paths", "unfair", "model.train_files: /a/dapo/train.parquet in BASE"),
        (model(cache="/a/x/cache"), model(cache="/b/y/cache"),
         "paths", "warning", "model.cache: /a/x/cache in BASE, /b/y/cache in SAM"),
        ({}, {"fields": {"seeds": {"rollout": 2}}},
         "seeds", "unfair", "seeds rollout: 1 in BASE, 2 in SAM"),
        ({}, {"fields": {"versions": {"vllm": "0.27.0"}}},
         "versions", "unfair", "versions vllm: 0.28.0 in BASE, 0.27.0 in SAM"),
        ({}, git("b" * 40, False),
         "versions", "warning", "versions commit: aaaaaaaaaaaa in BASE, bbbbbbbbbbbb in SAM"),
        ({}, git("a" * 40, True),
         "versions", "warning", "aaaaaaaaaaaa in BASE, aaaaaaaaaaaa with changes in SAM"),
        ({}, {"fields": {"host": {"cpus": 4}}}, "host", "unfair", "host cpus: 2 in BASE, 4 in SAM"),
        ({}, {"update_s": 6.0}, "other_load", "unfair", "times as long a token in SAM"),
        ({}, {"update_s": 5.4}, "other_load", "warning", "times as long a token in SAM"),
        ({}, {"steps": 4}, "step_counts", "warning", "BASE 6 (1-6), SAM 4 (1-4)"),
        ({"steps": 2}, {"steps": 2}, "few_steps", "unfair", "2 common training step(s)"),
    ],
)  # fmt: skip
def test_one_difference_is_found(compared, base, sam, name, severity, text):
    comparison = compared(base, noise_seed=1, **sam)
    assert found(comparison)[name] == severity
    assert any(text in told for told in texts(comparison, name))
    assert comparison.fair is (severity != "unfair")


def test_other_prompts_and_texts(compared):
    comparison = compared(seed=2)
    assert found(comparison)["prompts"] == "unfair"
    (told,) = texts(comparison, "prompts")
    assert told.startswith("they differ in 6 of 6 steps, first in step 1; 0% of")
    assert found(comparison)["samples"] == "warning"


def test_shorter_responses(compared):
    comparison = compared(mean_tokens=30.0)
    severities = found(comparison)
    assert severities["response_lengths"] == severities["mean_length"] == "unfair"
    (told,) = texts(comparison, "mean_length")
    assert float(re.search(r"\(-([\d.]+)%\)", told)[1]) > 40
    assert "gains at equal tokens do not" in told


def test_the_wrong_side_drafting(compared):
    comparison = compared({"sam": True}, sam=False)
    assert len(texts(comparison, "drafts")) == 2 and comparison.fair is False


def test_repeats_are_compared_by_what_the_user_typed(base, synthetic):
    def typed(name: str, asked: str, settled: int) -> Path:
        groups = {"sam": {"k": settled}, "asked": {"sam": {"k": asked}}}
        return synthetic(name, sam=True, **config(**groups))

    first = typed("first", "fits", 3)
    assert texts(compare_folders(base, [first, typed("second", "fits", 8)]), "repeats") == []
    (told,) = texts(compare_folders(base, [first, typed("third", "eight", 3)]), "repeats")
    assert told == "repeats of SAM differ: sam.k: fits in SAM 1, eight in SAM 2"


def test_repeats_may_have_seeds_of_their_own_if_both_sides_have_the_same(pairs):
    base, sam = pairs((1, 2))
    comparison = compare_folders(base, sam)
    assert "seeds" not in found(comparison) and comparison.fair is True
    assert found(compare_folders(base[:1], sam[1:]))["seeds"] == "unfair"


def test_a_run_that_is_resumed_otherwise_is_unfair(base, synthetic, resume):
    sam = synthetic("on", sam=True)
    start = RunFolder(sam).read_starts()[0].config | {
        "trainer": {"total_training_steps": 6, "resume_mode": "auto"}
    }
    resume(sam, config=start)
    assert found(compare_folders(base, sam))["resumed"] == "note"
    other = {"config": start | {"sam": {"enabled": False}}, "seeds": {"rollout": 9}}
    resume(sam, versions={"vllm": "0.29.0"}, **other)
    (told,) = [f for f in compare_folders(base, sam).findings if f.severity == "unfair"]
    assert told.name == "resumed"
    assert all(name in told.text for name in ("sam.enabled", "versions vllm", "seeds"))


def test_a_run_that_lost_a_step_and_ended_early(base, synthetic):
    sam = synthetic("on", sam=True, **config(trainer={"total_training_steps": 9}))
    log = RunFolder(sam).train_steps_path
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if json.loads(line)["step"] != 3))
    comparison = compare_folders(base, sam)
    assert comparison.steps == [1, 2, 4, 5, 6]
    assert "BASE 6 (1-6), SAM 5 (1-6)" in texts(comparison, "step_counts")[0]
    assert texts(comparison, "unfinished")[0].startswith("SAM ended at step 6 of 9: ")


def test_a_run_that_ended_early_is_told_with_the_verdict(compared):
    planned = config(trainer={"total_training_steps": 6})
    comparison = compared(planned | {"steps": 6}, **planned, steps=3)
    assert comparison.fair is True
    assert comparison.caveat == "SAM ended at step 3 of 6"
    assert sentences(comparison)[0].startswith("Fair, but SAM ended at step 3 of 6: with drafts")


def test_a_resumed_run_has_ended_at_the_step_it_was_last_asked_for(base, synthetic, resume):
    sam = synthetic("on", sam=True, **config(trainer={"total_training_steps": 9}))
    asked = {"trainer": {"total_training_steps": 6}}
    resume(sam, config=RunFolder(sam).read_starts()[0].config | asked)
    assert compare_folders(base, sam).caveat is None


def test_repeats_of_unequal_numbers_of_steps_are_told_with_the_verdict(base, synthetic):
    sam = [synthetic(f"on-{n}", sam=True, steps=n) for n in (6, 4)]
    comparison = compare_folders(base, sam)
    assert comparison.caveat == "the runs have unequal numbers of steps"
    assert comparison.steps == [1, 2, 3, 4]
