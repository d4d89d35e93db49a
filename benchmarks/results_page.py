"""Writes docs/results.md from the recorded results, so that no number is copied by hand.

    python -m benchmarks.results_page [--check]

``--check`` exits with 1 if the page on disk is not what the records say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks import rollout, routing
from benchmarks.measuring import REPOSITORY, RESULTS, read_record
from recipes.dapo_qwen3 import published_setups
from sam_rollout.report.compare import TimeRow
from sam_rollout.report.recorded import FAIR, SIDES_PICTURE, UNFAIR, load_recorded
from sam_rollout.report.recorded import tables as tables_of

PAGE = REPOSITORY / "docs" / "results.md"

INTRODUCTION = """# Results

Every table is written from a record under `benchmarks/results` by `python -m
benchmarks.results_page`; the command above a table makes its record again. All of it ran on two
shared CPU cores with the tiny Qwen3: what is shown is that the road works and where time goes.
Nothing here predicts a cluster; no GPU and no NPU was used. What our experiments repeat from
publications is at the end: [published setups](#published-setups).
"""

PUBLISHED = """## Published setups

`python -m recipes.dapo_qwen3.published_setups`

Which value was published where, and which key of ours holds it: [value by
value](published_setups.md). None of these setups has been run here, there was no NPU at hand; a
test composes the experiments and compares."""


def _load(name: str) -> dict[str, Any]:
    return read_record(RESULTS / f"{name}.json")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _pivot(
    rows: Iterable[dict[str, Any]], tops: Sequence[str], cell: Callable[[dict], str],
    title: Callable[..., str],
) -> str:  # fmt: skip
    """A row for each drafter, a column for each of `tops`; empty where nothing is known."""
    cells = {(row["side"], *(row[top] for top in tops)): cell(row) for row in rows}
    columns = list(dict.fromkeys(key[1:] for key in cells))
    return _table(
        ["drafter", *(title(*column) for column in columns)],
        [
            [name, *(cells.get((name, *column), "") for column in columns)]
            for name in dict.fromkeys(key[0] for key in cells)
        ],
    )


def _machine(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record["machine"].items())


def _section(title: str, command: str, record: dict[str, Any], *parts: str) -> str:
    head = f"## {title}\n\n`{command}`\n\n{_machine(record)}"
    return "\n\n".join([head, *parts])


def _spread(cell: dict[str, float] | None, low: str, high: str, median: str = "median") -> str:
    if cell is None:
        return ""
    middle, first, last = (_figure(cell[name]) for name in (median, low, high))
    return f"{middle} [{first}, {last}]"


def _figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def rollout_section() -> str:
    """One rollout, four ways."""
    record = _load("rollout_tiny_cpu")
    columns = (*rollout.sides(), *(f"{base}/{side}" for base, side in rollout.RATIOS))
    rows = [
        [f"{title}, {unit}"]
        + [_spread(record["summary"][metric].get(column), "q1", "q3") for column in columns]
        for metric, title, unit in rollout.FIGURES
    ]
    setting = record["setting"]
    text = (
        f"{setting['prompts']} prompts with {setting['siblings']} responses each, T = 1, at most "
        f"{setting['max_tokens']} tokens, {setting['repeats']} rounds in which the four engines "
        "take turns; median and quartiles over rounds. `stock` is the engine without us, `off` the "
        "same with the coupled sampler, `matched` our path with a gate that never opens (it gives "
        f"up asynchronous scheduling), `on` drafts while at most {setting['tail_threshold']} "
        "requests run. All but `stock` sample the same texts."
    )
    return _section(
        "One rollout, four ways",
        "python -m benchmarks.rollout",
        record,
        text,
        _table(["figure", *columns], rows),
    )


def dapo_section() -> str:
    """Whole DAPO runs, off and on, and a pair that is not fair."""
    recorded = load_recorded(RESULTS)
    record, comparison = recorded.content, recorded.comparisons[FAIR]
    setting, tables = record["setting"], tables_of(recorded.comparisons)
    rollout_row = recorded.comparisons[UNFAIR].time("rollout")
    text = (
        f"{setting['repeats']} run(s) of each side, alternating, {setting['steps']} training steps "
        "each, the first left out. Means over steps and runs; a gain is BASE / SAM - 1, time saved "
        "1 - SAM / BASE; in brackets 95 % intervals of the noise "
        f"{comparison.noise}. Equal tokens: time per generated token. `sam-rollout compare "
        "--check` makes these tables again from the runs in `benchmarks/results/runs`. As a page: "
        "[compare_tiny_cpu.html](../benchmarks/results/compare_tiny_cpu.html)."
    )
    unfair = (
        "A pair that is not fair, on purpose: the other side has another seed and shorter "
        f"responses ({setting['unfair_steps']} steps). {_raw_and_equal(rollout_row)}What the "
        "comparison says of it is below the table:"
    )
    return _section(
        "Whole DAPO runs",
        "python -m benchmarks.dapo_ab",
        record,
        text,
        tables["times and gains"],
        tables["samples"],
        tables["figures beside the times"],
        "What the comparison finds to object:",
        tables["findings"],
        f"![both sides](../benchmarks/results/{SIDES_PICTURE})",
        unfair,
        tables["times and gains of the unfair pair"],
        tables["findings of the unfair pair"],
    )


def _raw_and_equal(row: TimeRow | None) -> str:
    """What equal tokens leave of a row's gain; nothing where it has not both."""
    if row is None or row.raw is None or row.equal_tokens is None:
        return ""
    raw, equal = (gain.speed_up_minus_one.value for gain in (row.raw, row.equal_tokens))
    return f"The gain of its {row.title} is {raw:+.1%} raw, {equal:+.1%} at equal tokens. "


def learning_section() -> str:
    """Accuracy over a run with SAM on."""
    record = _load("learning_tiny_cpu")
    rows = [
        [
            row["title"],
            f"{row['first']:.1%}",
            f"{row['last']:.1%}",
            f"{row['difference']:+.1%} [{row['welch_low']:+.1%}, {row['welch_high']:+.1%}]",
            f"{row['p_value']:.1g}",
        ]
        for row in record["result"]
    ]
    text = (
        f"{len(record['steps'])} DAPO steps with SAM on, validated after every step on "
        f"{record['held_out_problems']} held-out problems. First and last five values, "
        "difference with its 95 % interval (Welch over steps: sampling noise of one run on one set "
        "of problems, not the spread between runs)."
    )
    picture = "![accuracy over the run](../benchmarks/results/learning_tiny_cpu.png)"
    return _section(
        "Learning",
        "python -m benchmarks.learning",
        record,
        text,
        _table(["accuracy", "first five", "last five", "difference", "p"], rows),
        picture,
    )


def drafter_section() -> str:
    """How good drafts are, and what they cost."""
    record = _load("drafter")
    parts = [
        "Greedy replay, mean acceptance length with the bonus token. CoT texts are generated, "
        "calibrated to the published curve in the picture (`benchmarks/calibrate_traces.py`); code "
        "and prose are Python's standard library and manual; traces are rollouts of the tiny model "
        "(`benchmarks/record_traces.py`). In groups, second epochs and traces, siblings are "
        "generated together.",
        _pivot(
            record["acceptance"],
            ("data", "k"),
            lambda row: f"{row['mean_acceptance_length']:.3f}",
            lambda data, k: f"{data}, k = {k}",
        ),
        "One call as vLLM makes it, k = 3, two new tokens a row and call, the sides taking turns "
        "in blocks of ten calls; us, median and quartiles, then the first call of a block, which "
        "finds the caches full of the others' data.",
        _drafter_calls(record["calls"]),
        "The targets of `sam-rollout bench drafter --check`:",
        _table(
            ["target", "measured", "reached"],
            [
                [
                    row["target"],
                    row["measured"],
                    {True: "yes", False: "no", None: "-"}[row["reached"]],
                ]
                for row in record["check"]
            ],
        ),
        "![acceptance against context length and against k](../benchmarks/results/drafter.png)",
        "The right panel in figures, some of the CoT texts, by draft tokens a step:",
        _pivot(
            record["sweep"],
            ("k",),
            lambda row: f"{row['mean_acceptance_length']:.2f}",
            str,
        ),
    ]
    if held_out := record.get("held_out_seed"):
        parts.append(_drafter_held_out(held_out, record))
    return _section("The drafter alone", "python -m benchmarks.bench_drafter", record, *parts)


def _drafter_held_out(held_out: dict[str, Any], record: dict[str, Any]) -> str:
    """The gains of the main record beside those on texts that nothing was chosen on."""
    pairs = (
        ("CoT", "own", "first occurrence"),
        ("CoT", "own", "arctic"),
        ("CoT groups", "own + siblings", "own"),
    )
    lengths = [
        {(row["data"], row["side"], row["k"]): row["mean_acceptance_length"] for row in rows}
        for rows in (held_out["acceptance"], record["acceptance"])
    ]
    rows = [
        [f"{data}, k = {k}: {side} against {other}"]
        + [
            f"{of[data, side, k] / of[data, other, k] - 1:+.1%} "
            f"({of[data, side, k]:.3f}, {of[data, other, k]:.3f})"
            for of in lengths
        ]
        for data, side, other in pairs
        for k in (3, 8)
        if all((data, name, k) in of for of in lengths for name in (side, other))
    ]
    return (
        "Texts of another seed, `python -m benchmarks.bench_drafter --held-out-seed "
        f"{held_out['seed']}` ({held_out['machine']['date']}). The constants of the rule that "
        "drafts from own text were chosen on the generated texts above, those of this seed were "
        "read once, for this table:\n\n"
        + _table(["", f"seed {held_out['seed']}, held out", "seed of the tables above"], rows)
    )


def _drafter_calls(rows: list[dict[str, Any]]) -> str:
    """A row a size, a column a side."""
    sides = list(dict.fromkeys(row["side"] for row in rows))
    sizes = dict.fromkeys((row["rows"], row["context"]) for row in rows)
    cell = {
        (row["side"], row["rows"], row["context"]): (
            f"{row['median_us']:.0f} [{row['q1_us']:.0f}, {row['q3_us']:.0f}], {row['cold_us']:.0f}"
        )
        for row in rows
    }
    return _table(
        ["requests", "tokens each", *sides],
        [[*map(str, size), *(cell.get((side, *size), "") for side in sides)] for size in sizes],
    )


def fuzz_section() -> str:
    """Random requests against brute force."""
    record = _load("fuzz_drafter")
    setting, totals = record["setting"], record["totals"]
    last = setting["seed"] + totals["drafters"] - 1
    text = (
        f"{setting['seconds']:,.0f} s, {totals['drafters']:,} drafters one after the "
        f"other (seeds {setting['seed']} to {last}): {totals['requests']:,} requests, "
        f"{totals['ids_used_again']:,} of them with an id used before and {totals['aborted']:,} "
        f"aborted before their text ended; {totals['steps']:,} steps, {totals['tokens_read']:,} "
        f"tokens read, {totals['draft_tokens']:,} drafted. {totals['drafts_by_rule']:,} drafts "
        f"were held against brute force; {totals['drafts_as_copies']:,} more go on as some known "
        f"text does, which is all that is asked where other sources are on. Failures: "
        f"{record['failures']}."
    )
    command = f"python -m benchmarks.fuzz_drafter --seconds {setting['seconds']:g}"
    command += f" --seed {setting['seed']}"
    return _section("The drafter against brute force", command, record, text)


def gate_section() -> str:
    """Closed, thresholds and the measuring gate."""
    record = _load("gate")
    texts = record["texts"]
    sides = list(next(iter(texts.values()))["tokens_per_s"])
    rows = [
        [
            text,
            str(len(result["rounds"])),
            *(_spread(result["tokens_per_s"][side], "q1", "q3") for side in sides),
        ]
        for text, result in texts.items()
    ]
    against = [
        [
            text,
            result["best_fixed"],
            _spread(result["auto/best_fixed"], "low", "high"),
            _spread(result["auto/closed"], "low", "high"),
            f"{result['decision_us']['closed']:.1f}, {result['decision_us']['auto']:.1f}",
            f"{_share(result['counters'], 'trial_loss_s', 'decoding_s'):.2%}",
            f"{_share(result['counters'], 'regret_s', 'compared_s'):.2%}",
        ]
        for text, result in texts.items()
    ]
    setting = record["setting"]
    explained = (
        f"{setting['prompts']} prompts with {setting['siblings']} responses each, at most "
        f"{setting['max_tokens']} tokens, coupled sampler; one engine, whose gates take turns. "
        f"Thresholds draft {setting['fixed_k']} tokens, `auto` 0 to {setting['k']}. `easy` is "
        f"sampled at T = {setting['temperatures']['easy']:g}, the others at T = 1; in `hopeless` "
        "every request gets the longest draft allowed, and all of it is wrong. Tokens per second "
        "of processor time (one thread; the machine was shared with other work), median and "
        "quartiles over rounds:"
    )
    paired = (
        "`auto` against the best of the others and against the closed gate, round by round: "
        "median and its 95 % interval; above 1 is faster. Time of a decision, median, closed gate "
        "and `auto`; then what `auto` says of itself (of its last engine): time that trials lost, "
        "and regret."
    )
    head = ["text", "best fixed", "auto / best fixed", "auto / closed", "us a decision",
            "lost in trials", "regret"]  # fmt: skip
    return _section(
        "Gates",
        "python -m benchmarks.gate",
        record,
        explained,
        _table(["text", "rounds", *sides], rows),
        paired,
        _table(head, against),
    )


def _share(counters: dict[str, float], part: str, whole: str) -> float:
    return counters[f"gate/{part}"] / counters[f"gate/{whole}"]


SHOWN_SIZES = ((8, 3), (32, 3), (128, 4))  # of the sampler benchmark; the record has them all


def sampler_section() -> str:
    """Verification per call."""
    record = _load("sampler")
    rows = [
        [
            str(case["batch"]),
            str(case["k"]),
            timing["name"],
            _spread(timing, "q1_ms", "q3_ms", "median_ms"),
            *("" if timing[name] is None else f"{timing[name]:.0f}" for name in counted),
        ]
        for counted in [("kernels", "synchronisations", "mb_touched")]
        for case in record["cases"]
        if (case["batch"], case["k"]) in SHOWN_SIZES
        for timing in case["timings"]
    ]
    setting = record["setting"]
    text = (
        f"{setting['threads']} thread(s), vocabulary {setting['vocabulary']:,}, fp32, one-hot "
        "drafts, random numbers included, median and quartiles. `ascend_0.11` and `ascend_0.23` "
        "are the algorithms of vLLM-Ascend's PyTorch functions, `vllm_cpu` is vLLM's C++ code, "
        "whose kernels cannot be counted."
    )
    head = ["batch", "k", "sampler", "ms a call", "kernels", "synchronisations", "MB touched"]
    sizes = [f"--batch {batch}" for batch in setting["batches"]]
    sizes += [f"--k {k}" for k in setting["ks"]]
    command = f"sam-rollout bench sampler {' '.join(sizes)} --json"
    return _section("Verifying drafts", command, record, text, _table(head, rows))


def trajectories_section() -> str:
    """Speculation on against off, token for token."""
    record = _load("trajectories_tiny_cpu")
    setting, results = record["setting"], record["results"]
    rows = [
        [
            dtype,
            name,
            f"{run['identical']} of {run['responses']}",
            str(run["ties"]),
            ", ".join(map(str, run["first_difference"][:5])),
            f"{run['accepted']:,}",
        ]
        for dtype, runs in results.items()
        for name, run in runs.items()
        if name != "tokens"
    ]
    text = (
        f"{setting['prompts']} prompts with {setting['siblings']} responses each at T = 1, at "
        f"most {setting['max_tokens']} tokens, with `rollout_sampler=coupled`: each run against "
        f"the one without speculation ({results['float32']['tokens']:,} tokens in float32). Ties: "
        "responses that part where rounding may decide, because the random number would have "
        "drawn either token if moved by 1e-5."
    )
    head = [
        "dtype",
        "drafts",
        "identical",
        "ties among the others",
        "first differences",
        "accepted",
    ]
    command = "python -m benchmarks.trajectories"
    return _section("Trajectories", command, record, text, _table(head, rows))


def operators_section() -> str:
    """Log-probabilities decoded and verified."""
    record = _load("operators_tiny_cpu")
    rows = [
        [
            one["setting"]["dtype"],
            str(row["draft_tokens"]) if row["draft_tokens"] else "0 (decoded again)",
            f"{row['overall']['positions']:,}",
            f"{row['overall']['maximum']:.3g}",
            f"{row['overall']['mean']:.3g}",
            str(row["overall"]["top_differs"]),
        ]
        for one in record["checks"]
        for row in one["rows"]
    ]
    setting = record["checks"][0]["setting"]
    text = (
        f"{setting['prompts']} texts of up to {setting['max_tokens']} tokens: log-probabilities of "
        "the same tokens decoded one by one and verified k + 1 at a time. `sam-rollout "
        "check-operators` measures this on any device."
    )
    head = [
        "dtype",
        "k",
        "tokens",
        "largest difference",
        "mean difference",
        "other likeliest token",
    ]
    command = "python -m benchmarks.operators"
    return _section("Operators", command, record, text, _table(head, rows))


def evaluation_section() -> str:
    """pass@1 with speculation off and on."""
    record = _load("evaluate_tiny_cpu")
    rows = [
        [
            name,
            f"{side['pass_at_1']['value']:.3f} "
            f"[{side['pass_at_1']['low']:.3f}, {side['pass_at_1']['high']:.3f}]",
            f"{side['mean_response_length']:.0f}",
            f"{side['accepted_tokens']:,} of {side['drafted_tokens']:,}",
        ]
        for name, side in record["sides"].items()
    ]
    compared = record["comparison"]
    text = (
        f"{record['sides']['off']['problems']} problems of the synthetic test set, "
        f"{record['setting']['dtype']}, T = {record['setting']['temperature']:g}, "
        f"`rollout_sampler={record['setting']['rollout_sampler']}`: {compared['identical']} of "
        f"{compared['responses']} responses are identical."
    )
    head = ["speculation", "pass@1 [95 %]", "response tokens", "accepted of drafted"]
    command = "python -m recipes.dapo_qwen3.evaluate --output ..."
    return _section("pass@1", command, record, text, _table(head, rows))


def cluster_section() -> str:
    """Two nodes, one of them lost."""
    record = _load("cluster_tiny_cpu")
    loss, resumed = record["loss"], record["resumed"]
    rows = [
        [
            str(row["step"]),
            "resumed" if row["step"] in resumed["steps"] else "first",
            *(f"{row['tokens_by_replica'].get(replica, 0):,}" for replica in ("0", "1")),
            f"{row['score']:+.2f}",
            f"{row['probs_diff_mean']:.4f}",
            *(f"{row[name]:.1f}" for name in ("rollout_s", "update_weights_s", "step_s")),
        ]
        for row in record["steps"]
    ]
    lost = ""
    if resumed["checkpoint"] not in {row["step"] for row in record["steps"]}:
        lost = " That step was saved, but lost its metrics: verl writes them after the checkpoint."
    text = (
        "`scripts/launch_multinode.sh` on two machines made of Linux namespaces of this one: two "
        "Ray nodes, one training rank and one engine on each. One was switched off after "
        f"{loss['seconds_until_lost']:.0f} s; {loss['seconds_from_loss_to_end']:.0f} s later the "
        f"launch had ended with status {loss['exit_status']}. The same command with "
        "`trainer.resume_mode=auto` went on from the checkpoint of step "
        f"{resumed['checkpoint']} and ended with status {resumed['exit_status']}.{lost} Both "
        "machines share the cores named above: times say nothing about two real ones."
    )
    told = "\n".join(loss["told"])
    head = ["step", "launch", "tokens, engine 0", "tokens, engine 1", "score",
            "probability difference", "rollout, s", "weight sync, s", "step, s"]  # fmt: skip
    return _section(
        "Two nodes, one of them lost",
        "python -m benchmarks.cluster_run",
        record,
        text,
        f"```text\n{told}\n```",
        _table(head, rows),
    )


def telemetry_section() -> str:
    """What recording costs."""
    record = _load("telemetry_overhead")
    setting, run = record["setting"], record["run"]
    alone = [
        [
            rows,
            *(
                f"{cell[name]:.1f}"
                for name in ("worker_drafting_us", "worker_closed_us", "front_end_us")
            ),
        ]
        for rows, cell in record["alone"].items()
    ]
    text = (
        "Time inside the code that records an engine step, by clocks around it; median of "
        f"{setting['alone_steps']:,} steps in which every request has {setting['draft_tokens']} "
        "draft tokens, or none while the gate is closed. The front end records in a process of its "
        f"own, beside the next step. Timing adds {record['hooks_us']:.1f} us to each call of a "
        "sampler."
    )
    return _section(
        "What recording costs",
        "python -m benchmarks.telemetry_overhead --run RUN_FOLDER",
        record,
        text,
        _table(
            ["requests", "worker, drafting, us", "worker, gate closed, us", "front end, us"], alone
        ),
        *_telemetry_in_run(run, setting["goal"]),
        *_telemetry_in_trainer(run.get("trainer"), setting["goal"]),
    )


def _telemetry_in_run(run: dict[str, Any], goal: float) -> list[str]:
    """Recording of engine steps in a training run."""
    versions = (
        f"{name} {run['versions'][name]}" for name in ("verl", "vllm") if name in run["versions"]
    )
    about = ", ".join(filter(None, (run.get("name"), run["label"], *versions)))
    text = (
        f"In a training run of the tiny model ({about}), where the code runs after others have had "
        "the processor's caches. By its mean recording, in both processes together, stays "
        f"under {goal:.1%} of any step longer than {1e-3 * run['telemetry_us'] / goal:.1f} ms:"
    )
    row = {
        "engine steps": f"{run['steps']:,}",
        "step, us (median)": f"{run['median_step_us']:,.0f}",
        "recording, us (median)": f"{run['median_telemetry_us']:.1f}",
        "(mean)": f"{run['telemetry_us']:.1f}",
        "share of all steps' time": f"{run['share']:.2%}",
    }
    return [text, _table(row, [row.values()])]


def _telemetry_in_trainer(trainer: dict[str, float] | None, goal: float) -> list[str]:
    """Collecting and drawing, once a training step."""
    if trainer is None:
        return [
            "What its trainer spent on collecting the records of a training step and on drawing "
            "the rollout was not recorded."
        ]
    kept = "under" if trainer["share"] < goal else "above"
    text = (
        "Once a training step its trainer collects the records, writes them, makes metrics of them "
        f"and draws the rollout, altogether {kept} {goal:.1%} of the steps' time:"
    )
    row = {
        "training steps": str(trainer["steps"]),
        "step, s (median)": f"{trainer['median_step_s']:.1f}",
        "collecting, ms (median)": f"{trainer['median_collect_ms']:.0f}",
        "drawing, ms (median)": f"{trainer['median_curve_ms']:.0f}",
        "share of all steps' time": f"{trainer['share']:.2%}",
        "largest of a step": f"{trainer['largest_share']:.2%}",
    }
    return [text, _table(row, [row.values()])]


def routing_section() -> str:
    """Siblings on one replica or many."""
    records = _load("routing_tiny_cpu").values()
    setting = next(iter(records))["setting"]
    text = (
        f"{setting['prompts']} prompts with {setting['siblings']} responses each, rounds of other "
        "prompts; median, lowest and highest. `own` drafts from a request's own text, `siblings` "
        "from that of the others to its prompt, too. `spread` sends a request where the fewest "
        "run, `grouped` to its siblings, `halves` half a group to a replica. The replicas take "
        f"turns on one core; the gate opens at {setting['threshold']} running requests. All sides "
        f"sample the same texts: at least {min(map(routing.least_identical, records)):.1%} of a "
        "side's responses in a round. CPU time and engine steps are what other work on the machine "
        "does not lengthen."
    )
    fleets = [part for record in records for part in _routing_fleet(record)]
    return "\n\n".join(
        ["## Routing of siblings", "`python -m benchmarks.routing --replicas ...`", text, *fleets]
    )


def _routing_fleet(record: dict[str, Any]) -> list[str]:
    """One number of replicas."""
    rows = [
        [f"{title}, {unit}".rstrip(", ")]
        + [_spread(record["summary"][figure][side], "low", "high") for side in routing.SIDES]
        for figure, title, unit in routing.FIGURES
    ]
    ratios = [record["summary"]["rollout_s"][f"{routing.BASE} / {side}"] for side in routing.SIDES]
    rows.append(
        [f"rollout, {routing.BASE} / side"] + [_spread(cell, "low", "high") for cell in ratios]
    )
    return [
        f"{record['setting']['replicas']} replicas, {len(record['rounds'])} rounds; "
        + _machine(record),
        _table(["figure", *routing.SIDES], rows),
    ]


def validation_section() -> str:
    """The simulator against rollouts that were run."""
    record = _load("simulate_validation")
    setting = record["setting"]
    rows = [
        [
            f"k = {row['k']}, threshold {row['threshold']}" if row["k"] else "baseline",
            str(row["max_num_seqs"]),
            str(row["step"]),
            f"{row['measured_s']:.2f} s",
            f"{row['predicted_s']:.2f} s",
            f"{row['predicted_s'] / row['measured_s']:.3f}",
            f"{row['exact_s']:.2f} s",
            f"{row['measured_tail_s']:.2f} s",
            f"{row['predicted_tail_s']:.2f} s",
        ]
        for row in record["predicted"]
    ]
    return _section(
        "The simulator against rollouts",
        "python -m benchmarks.simulate_validation",
        record,
        f"Rollouts of the tiny model, {setting['prompts']} prompts with {setting['siblings']} "
        "responses each, in CPU seconds of the engine's one thread. *Predicted* from step costs "
        "measured before and after, the responses' lengths, and chances of acceptance fitted on "
        "other rollouts; *from its own texts* with the acceptance that the rollout's own texts "
        f"give. The long tail begins at {setting['tail_threshold']} running requests. "
        "`sam-rollout simulate --check` predicts it again.",
        _table(
            ("drafts", "requests at once", "rollout", "measured", "predicted", "ratio",
             "from its own texts", "long tail measured", "predicted"),
            rows,
        ),
    )  # fmt: skip


# Record below benchmarks/results -> the section that shows it.
SECTIONS = {
    "rollout_tiny_cpu": rollout_section,
    "compare_tiny_cpu": dapo_section,
    "learning_tiny_cpu": learning_section,
    "cluster_tiny_cpu": cluster_section,
    "trajectories_tiny_cpu": trajectories_section,
    "evaluate_tiny_cpu": evaluation_section,
    "operators_tiny_cpu": operators_section,
    "sampler": sampler_section,
    "drafter": drafter_section,
    "fuzz_drafter": fuzz_section,
    "telemetry_overhead": telemetry_section,
    "routing_tiny_cpu": routing_section,
    "gate": gate_section,
    "simulate_validation": validation_section,
}


def render() -> str:
    """The whole page."""
    recorded = [write() for name, write in SECTIONS.items() if (RESULTS / f"{name}.json").exists()]
    missing = [name for name in SECTIONS if not (RESULTS / f"{name}.json").exists()]
    if missing:
        recorded.append(f"## Not measured yet\n\n{', '.join(missing)}")
    published = f"{PUBLISHED}\n\n{published_setups.summary()}"
    return "\n\n".join([INTRODUCTION.rstrip(), *recorded, published]) + "\n"


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.check:
        PAGE.write_text(render(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != render():
        sys.exit(
            "docs/results.md does not follow from benchmarks/results: run "
            "python -m benchmarks.results_page"
        )


if __name__ == "__main__":
    main()
