"""Every reason why a comparison is not fair is found by its name, and a fair pair has none."""

import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from sam_rollout.report import fairness
from sam_rollout.report.compare import compare_folders
from sam_rollout.report.page import render_page
from sam_rollout.report.tables import print_comparison
from sam_rollout.telemetry.records import RunFolder


def found(comparison) -> dict[str, str]:
    """Name -> severity of all findings."""
    return {finding.name: finding.severity for finding in comparison.findings}


def texts(comparison, name: str) -> list[str]:
    return [finding.text for finding in comparison.findings if finding.name == name]


@pytest.fixture
def base(synthetic):
    return synthetic("off")


def test_a_fair_pair_is_fair(base, synthetic):
    comparison = compare_folders(base, synthetic("on", sam=True, noise_seed=1))
    assert comparison.fair is True and comparison.unfair == []
    assert found(comparison) == {"samples": "note", "one_repeat": "note"}
    assert texts(comparison, "samples") == ["96 of 96 responses are the same on both sides"]


def config(**parts) -> dict:
    return {"fields": {"more_config": parts}}


@pytest.mark.parametrize(
    ("other", "name", "severity", "text"),
    [
        (
            config(data={"train_batch_size": 64, "max_response_length": 1024, "seed": 1}),
            "batch_size", "unfair", "data.train_batch_size: 32 in BASE, 64 in SAM",
        ),
        (
            config(data={"train_batch_size": 32, "max_response_length": 512, "seed": 1}),
            "lengths", "unfair", "data.max_response_length: 1024 in BASE, 512 in SAM",
        ),
        (
            config(actor_rollout_ref={"rollout": {"n": 8}}),
            "responses_per_prompt", "unfair", "rollout.n: absent in BASE, 8 in SAM",
        ),
        (
            config(rollout_sampler={"kind": "stock"}),
            "sampler", "unfair", "rollout_sampler.kind: coupled in BASE, stock in SAM",
        ),
        (
            config(trainer={"test_freq": 1}),
            "validation", "warning", "trainer.test_freq: absent in BASE, 1 in SAM",
        ),
        (
            config(model={"path": "/elsewhere/qwen3"}),
            "config", "unfair", "model.path: absent in BASE, /elsewhere/qwen3 in SAM",
        ),
        (
            {"fields": {"seeds": {"rollout": 2}}},
            "seeds", "unfair", "seeds rollout: 1 in BASE, 2 in SAM",
        ),
        (
            {"fields": {"versions": {"vllm": "0.27.0"}}},
            "versions", "unfair", "versions vllm: 0.28.0 in BASE, 0.27.0 in SAM",
        ),
        (
            {"fields": {"git": {"commit": "b" * 40, "dirty": False}}},
            "versions", "warning", "versions commit: aaaaaaaaaaaa in BASE, bbbbbbbbbbbb in SAM",
        ),
        (
            {"fields": {"git": {"commit": "a" * 40, "dirty": True}}},
            "versions", "warning", "aaaaaaaaaaaa in BASE, aaaaaaaaaaaa with changes in SAM",
        ),
        ({"fields": {"host": {"cpus": 4}}}, "host", "unfair", "host cpus: 2 in BASE, 4 in SAM"),
        (
            {"update_s": 6.0},
            "other_load", "unfair", "times as long a token in SAM",
        ),
        ({"update_s": 5.4}, "other_load", "warning", "times as long a token in SAM"),
        ({"warm_up": 4.0}, "warm_up", "warning", "--skip-first 1"),
        ({"steps": 4}, "step_counts", "warning", "BASE 6 (1-6), SAM 4 (1-4)"),
    ],
)  # fmt: skip
def test_one_difference_is_found(base, synthetic, other, name, severity, text):
    comparison = compare_folders(base, synthetic("on", sam=True, noise_seed=1, **other))
    assert found(comparison)[name] == severity
    assert any(text in told for told in texts(comparison, name))
    assert comparison.fair is (severity != "unfair")


def test_a_commit_says_nothing_where_it_is_not_known_or_the_code_was_changed(base, synthetic):
    for git in ({}, {"commit": None, "dirty": None}):  # an older folder, an installed package
        other = synthetic(f"on-{len(git)}", sam=True, fields={"git": git})
        assert "versions" not in found(compare_folders(base, other))
    changed = {"fields": {"git": {"commit": "a" * 40, "dirty": True}}}
    comparison = compare_folders(
        synthetic("off-c", **changed), synthetic("on-c", sam=True, **changed)
    )
    assert found(comparison)["versions"] == "note" and comparison.fair is True


HOST = {"cpu": "Xeon", "cpus": 2, "nodes": 1, "accelerators": {"GPU": 8.0, "H100": 1.0}}


@pytest.mark.parametrize(
    ("other", "texts_found"),
    [
        (HOST | {"cpu": "EPYC"}, ["host cpu: Xeon in BASE, EPYC in SAM"]),
        (HOST | {"nodes": 2}, ["host nodes: 1 in BASE, 2 in SAM"]),
        (
            HOST | {"accelerators": {"GPU": 8.0, "A100": 1.0}},
            [
                "host accelerators.A100: absent in BASE, 1.0 in SAM",
                "host accelerators.H100: 1.0 in BASE, absent in SAM",
            ],
        ),
        (HOST | {"accelerators": {}}, [
            "host accelerators.GPU: 8.0 in BASE, absent in SAM",
            "host accelerators.H100: 1.0 in BASE, absent in SAM",
        ]),
    ],
)  # fmt: skip
def test_other_hardware_is_unfair(synthetic, other, texts_found):
    base = synthetic("off", fields={"host": HOST})
    comparison = compare_folders(base, synthetic("on", sam=True, fields={"host": other}))
    assert texts(comparison, "host") == texts_found and comparison.fair is False


def test_what_an_older_folder_does_not_tell_of_the_host_is_unknown(base, synthetic):
    other = synthetic("on", sam=True, fields={"host": HOST})
    comparison = compare_folders(base, other)
    assert found(comparison)["host"] == "unknown" and comparison.fair is True
    folder = RunFolder(base)
    (start,) = folder.read_starts()
    folder.write_start(replace(start, started_at="2030-07-02T00:00:00+00:00", host=HOST))
    assert found(compare_folders(base, other))["resumed"] == "note"
    folder.write_start(
        replace(start, started_at="2030-07-03T00:00:00+00:00", host=HOST | {"cpus": 4})
    )
    assert found(compare_folders(base, other))["resumed"] == "unfair"


def test_other_prompts_and_texts(base, synthetic):
    comparison = compare_folders(base, synthetic("on", sam=True, seed=2))
    assert found(comparison)["prompts"] == "unfair"
    (finding,) = [f for f in comparison.findings if f.name == "prompts"]
    assert finding.figures == {"shared": 0.0, "steps": [1, 2, 3, 4, 5, 6]}
    assert found(comparison)["samples"] == "warning"


def test_shorter_responses(base, synthetic):
    comparison = compare_folders(base, synthetic("on", sam=True, mean_tokens=30.0))
    severities = found(comparison)
    assert severities["response_lengths"] == severities["mean_length"] == "unfair"
    (finding,) = [f for f in comparison.findings if f.name == "mean_length"]
    assert finding.figures["sam"] < 0.6 * finding.figures["base"]
    assert "gains at equal tokens do not" in finding.text


def test_the_wrong_side_drafting(base, synthetic):
    comparison = compare_folders(synthetic("on", sam=True), base)
    assert len(texts(comparison, "drafts")) == 2 and comparison.fair is False


def test_repeats_that_differ_among_themselves(base, synthetic):
    other = synthetic("off-2", noise_seed=2, fields={"versions": {"vllm": "0.29.0"}})
    comparison = compare_folders([base, other], synthetic("on", sam=True))
    (text,) = texts(comparison, "repeats")
    assert text.startswith("repeats of BASE differ: versions vllm: 0.28.0 in BASE 1, 0.29.0 in")


def test_repeats_may_have_seeds_of_their_own_if_both_sides_have_the_same(synthetic):
    def pair(name, sam):
        return [
            synthetic(f"{name}-{n}", seed=n, sam=sam, fields={"seeds": {"rollout": n}})
            for n in (1, 2)
        ]

    comparison = compare_folders(pair("off", False), pair("on", True))
    assert "seeds" not in found(comparison) and comparison.fair is True
    comparison = compare_folders(pair("off", False)[:1], pair("on", True)[1:])
    assert found(comparison)["seeds"] == "unfair"


def test_resuming_with_another_version(base, synthetic):
    sam = synthetic("on", sam=True)
    folder = RunFolder(sam)
    (start,) = folder.read_starts()
    later = replace(start, started_at="2030-07-02T00:00:00+00:00")
    folder.write_start(later)
    assert found(compare_folders(base, sam))["resumed"] == "note"
    folder.write_start(replace(later, versions={"vllm": "0.29.0"}))
    comparison = compare_folders(base, sam)
    assert texts(comparison, "resumed") == ["SAM was resumed with other versions"]


def test_repeats_that_draft_otherwise_are_no_repeats(base, synthetic):
    sam = [
        synthetic(f"on-{k}", sam=True, fields={"more_config": {"sam": {"enabled": True, "k": k}}})
        for k in (3, 8)
    ]
    (finding,) = [f for f in compare_folders(base, sam).findings if f.name == "repeats"]
    assert finding.text == "repeats of SAM differ: sam.k: 3 in SAM 1, 8 in SAM 2"
    assert finding.figures == {"key": "sam.k", "sam 1": 3, "sam 2": 8}


def test_a_second_repeat_with_other_prompts_is_seen(base, synthetic):
    sam = [synthetic("on-1", sam=True), synthetic("on-2", sam=True, seed=2)]
    assert found(compare_folders([base, base], sam))["prompts"] == "unfair"


def test_resuming_up_to_more_steps_is_no_other_configuration(base, synthetic):
    sam = synthetic("on", sam=True)
    folder = RunFolder(sam)
    (start,) = folder.read_starts()
    later = replace(
        start,
        started_at="2030-07-02T00:00:00+00:00",
        config={**start.config, "trainer": {"total_training_steps": 6, "resume_mode": "auto"}},
    )
    folder.write_start(later)
    assert found(compare_folders(base, sam))["resumed"] == "note"
    folder.write_start(replace(later, config={**later.config, "sam": {"enabled": False}}))
    assert texts(compare_folders(base, sam), "resumed") == ["SAM was resumed with other config"]


def test_what_routing_of_siblings_writes_is_no_difference():
    sam, off = (
        fairness.comparable(
            {"run_dir": "/r/x", "actor_rollout_ref": {"rollout": {"router_config_path": path}}}
        )
        for path in ("/r/x/sam/routing.yaml", None)
    )
    assert off == sam


def test_a_control_is_told_and_no_other_configuration(base, synthetic):
    telemetry = {"rollout_telemetry": {"control_share": 0.1}}
    sam = synthetic("on", sam=True, fields={"more_config": telemetry})
    log = RunFolder(sam).train_steps_path
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    for entry in entries:
        entry["metrics"]["sam/control/share"] = 0.1
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    comparison = compare_folders(base, sam)
    assert found(comparison)["control"] == "warning" and comparison.fair is True


@pytest.mark.parametrize(
    ("name", "paths", "severity"),
    [
        ("path", ("/a/models/qwen3", "/b/models/qwen3"), "warning"),
        ("path", ("/ckpt/1/global_step_10/actor", "/ckpt/2/global_step_20/actor"), "unfair"),
        ("train_files", ("/a/dapo/train.parquet", "/a/gsm8k/train.parquet"), "unfair"),
        ("cache", ("/a/x/cache", "/b/y/cache"), "warning"),
    ],
)
def test_paths_that_end_alike(synthetic, name, paths, severity):
    base, sam = (
        synthetic(side, sam=side == "on", fields={"more_config": {"model": {name: path}}})
        for side, path in zip(("off", "on"), paths, strict=True)
    )
    comparison = compare_folders(base, sam)
    assert found(comparison)["paths"] == severity
    assert comparison.fair is (severity != "unfair")


def test_the_actors_update_is_compared_over_steps_that_all_runs_know(base, synthetic):
    sam = synthetic("on", sam=True)
    log = RunFolder(sam).train_steps_path
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    for entry in entries[:3]:
        entry["metrics"]["timing_s/update_actor"] = math.nan  # half the time, all the tokens
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert "other_load" not in found(compare_folders(base, sam))


def test_lengths_do_not_pass_for_responses(synthetic):
    """Of three pairs one recorded its texts."""
    base, sam = (
        [
            synthetic(f"{side}-{n}", seed=n, sam=side == "on", traces=n == 1,
                      fields={"seeds": {"rollout": n}})
            for n in (1, 2, 3)
        ]
        for side in ("off", "on")
    )  # fmt: skip
    comparison = compare_folders(base, sam)
    (finding,) = [f for f in comparison.findings if f.name == "samples"]
    assert finding.text == (
        "96 of 96 responses and 192 of 192 response lengths are the same on both sides"
    )
    assert finding.figures["token ids"] == {"identical": 96, "total": 96}
    assert finding.figures["lengths"] == {"identical": 192, "total": 192}


def test_an_unknown_sampler_is_not_said_to_keep_the_distribution(synthetic):
    base, sam = (
        synthetic(
            side, sam=side == "on", seed=seed, fields={"more_config": {"rollout_sampler": {}}}
        )
        for seed, side in ((1, "off"), (2, "on"))
    )
    (text,) = texts(compare_folders(base, sam), "samples")
    assert "which sampler was on" in text and "unknown" in text


def test_a_speculation_of_others_in_the_baseline_is_unfair(base, synthetic):
    other = {"engine": {"speculative_config": {"method": "ngram"}}}
    sam = synthetic("ngram", fields={"more_config": other})
    told = texts(compare_folders(base, sam), "config")
    assert "engine.speculative_config.method: absent in BASE, ngram in SAM" in told


def test_too_few_steps(base, synthetic):
    comparison = compare_folders(base, synthetic("on", sam=True), skip_first=4)
    assert found(comparison)["few_steps"] == "unfair"


def test_a_missing_step_and_a_run_that_ended_early(base, synthetic):
    sam = synthetic(
        "on", sam=True, fields={"more_config": {"trainer": {"total_training_steps": 9}}}
    )
    log = RunFolder(sam).train_steps_path
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if json.loads(line)["step"] != 3))
    comparison = compare_folders(base, sam)
    assert comparison.steps == [1, 2, 4, 5, 6]
    assert texts(comparison, "missing_steps") == ["SAM: no record of step 3"]
    assert texts(comparison, "unfinished") == [
        "SAM ended at step 6 of 9: it crashed, or still runs"
    ]


def test_findings_come_gravest_first(base, synthetic):
    comparison = compare_folders(base, synthetic("on", sam=True, update_s=9.0, warm_up=4.0, seed=3))
    order = [fairness.SEVERITIES.index(finding.severity) for finding in comparison.findings]
    assert order == sorted(order) and order[0] == 0


def planned(steps: int) -> dict:
    return config(trainer={"total_training_steps": 6}) | {"steps": steps}


def test_a_run_that_ended_early_is_told_with_the_verdict(synthetic):
    base, sam = synthetic("off", **planned(6)), synthetic("on", sam=True, **planned(3))
    comparison = compare_folders(base, sam)
    assert comparison.fair is True
    assert comparison.caveat == "SAM ended at step 3 of 6"
    console = Console(width=120, record=True, file=io.StringIO())
    print_comparison(comparison, console)
    (line,) = [line for line in console.export_text().splitlines() if line.startswith("Fair:")]
    assert line.endswith("; but SAM ended at step 3 of 6")
    page = render_page(comparison)
    assert re.search(r">Fair comparison</span> <b>but SAM ended at step 3 of 6\.</b>", page)
    assert compare_folders(base, base).caveat is None


def test_a_resumed_run_has_ended_at_the_step_it_was_last_asked_for(base, synthetic):
    sam = synthetic("on", sam=True, **config(trainer={"total_training_steps": 9}))
    folder = RunFolder(sam)
    (start,) = folder.read_starts()
    asked = {**start.config, "trainer": {"total_training_steps": 6}}
    folder.write_start(replace(start, started_at="2030-07-02T00:00:00+00:00", config=asked))
    assert compare_folders(base, sam).caveat is None


def test_runs_that_are_left_out_are_told_with_the_verdict(synthetic):
    sam = [synthetic(f"on-{n}", sam=True, steps=n) for n in (6, 2, 1)]
    assert compare_folders(synthetic("off"), sam).caveat == "2 runs are left out"
    one = compare_folders(synthetic("off-2"), synthetic("short", sam=True, steps=4))
    assert one.caveat == "the runs have unequal numbers of steps"
