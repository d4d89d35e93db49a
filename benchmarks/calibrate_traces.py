"""Fits the trace generator to sampled responses of real models, and records how well it fits.

    python -m benchmarks.calibrate_traces [--fit]

Without --fit the frozen parameters are measured on texts other than those they were fitted on.
Expected is acceptance from first occurrences against the context, what k = 8 adds, what siblings
add, and what earlier samples of the same prompts add to these. The expected values are set: round
figures for responses of reasoning models that were sampled at T = 0.6 and have no loops, some of
them longer than any in the sets of `benchmarks/real_traces.py`. What those sets give is recorded by
`benchmarks/bench_drafter.py`.
"""

from __future__ import annotations

import dataclasses

from benchmarks.measuring import parser, write_record
from sam_rollout.bench import sides
from sam_rollout.bench.drafts import Data, accept, run_of
from sam_rollout.bench.generator import MODEL, Problem, TraceModel
from sam_rollout.bench.machine import machine
from sam_rollout.bench.replay import CONTEXT_BIN, Replay
from sam_rollout.bench.traces import Trace

# Mean acceptance length from first occurrences, k = 3: from token, to token, expected.
CURVE = (
    (0, 1_000, 1.38), (1_000, 3_000, 1.56), (4_000, 6_000, 1.64), (9_000, 11_000, 1.66),
    (14_000, 24_000, 1.72), (26_000, 38_000, 1.76),
)  # fmt: skip
LONGER_DRAFTS = 0.10  # what k = 8 gains over k = 3 with own text
SIBLINGS = ((4, 0.18), (16, 0.34))  # what so many add to own text
EARLIER_EPOCH = 0.15  # what it adds to own text and siblings
FIT_SEED, RECORD_SEED = 1, 2
FITTED_LENGTHS = (38_000, *(2_500,) * 3)
RECORDED_LENGTHS = (*(38_000,) * 6, *(11_000,) * 6, *(2_500,) * 24)  # early stretches are short
GROUP_TOKENS = 2_500
# Fitted parameters, and the factor of the first step of the search.
STEPS = {"new_length": 1.5, "passage_length": 1.4, "passages": 3.0, "chapter": 2.0,
         "chapter_share": 1.4}  # fmt: skip
SMALLEST_STEP = 1.1


def acceptance(name: str, texts: list[list[Trace]], k: int) -> Replay:
    """Replay runs of texts by a side."""
    (side,) = [side for side in sides.all_sides() if side.name == name]
    return accept(side, Data("", (), [run_of(one) for one in texts]), k)


def figures(model: TraceModel, seed: int, lengths: tuple[int, ...], groups: int) -> list[dict]:
    """Rows of what is expected and what texts of this model give. JSON values."""
    problems = [Problem(index, model, seed) for index in range(max(len(lengths), groups))]

    def length(name: str, siblings: int, k: int = 3, epochs: int = 1) -> float:
        texts = [
            [one.response(i, GROUP_TOKENS, e) for e in range(epochs) for i in range(siblings)]
            for one in problems[:groups]
        ]
        return acceptance(name, texts, k).mean_acceptance_length

    singles = [[one.response(0, n)] for one, n in zip(problems, lengths, strict=False)]
    first = acceptance(sides.FIRST, singles, 3)
    rows = []
    for start, stop, expected in CURVE:
        bins = range(start // CONTEXT_BIN, stop // CONTEXT_BIN)
        tokens, steps = (sum(at[i] for i in bins) for at in (first.tokens_at, first.steps_at))
        rows.append((f"context {start} to {stop}", expected, tokens / steps))
    most = SIBLINGS[-1][0]
    own = length(sides.OWN, most)
    rows.append(("k = 8 against k = 3", LONGER_DRAFTS, length(sides.OWN, most, k=8) / own - 1))
    for siblings, expected in SIBLINGS:
        added = length(sides.OWN_SIBLINGS, siblings) - own
        rows.append((f"{siblings} siblings", expected, added))
    both = length(sides.ALL_SOURCES, most, epochs=2)
    rows.append(("an earlier epoch", EARLIER_EPOCH, both - own - added))
    return [
        {"what": what, "expected": expected, "measured": round(measured, 3)}
        for what, expected, measured in rows
    ]


def fit(model: TraceModel = MODEL) -> TraceModel:
    """Move one parameter after the other as long as that helps, in ever smaller steps."""
    steps = dict(STEPS)
    best = _error(model)
    while min(steps.values()) > SMALLEST_STEP:
        before = best
        for name, step in steps.items():
            for factor in (step, 1 / step):
                value = type(getattr(model, name))(getattr(model, name) * factor)
                moved = dataclasses.replace(model, **{name: value})
                if (error := _error(moved)) < best:
                    model, best = moved, error
                    print(f"{error:.4f}", {name: getattr(model, name) for name in STEPS},
                          flush=True)  # fmt: skip
                    break
        if best == before:
            steps = {name: step**0.5 for name, step in steps.items()}
    return model


def _error(model: TraceModel) -> float:
    rows = figures(model, FIT_SEED, FITTED_LENGTHS, groups=1)
    return sum((row["measured"] - row["expected"]) ** 2 for row in rows)


def main() -> None:
    """Fit and print, or measure and record."""
    options = parser(__doc__, "drafter_calibration")
    options.add_argument("--fit", action="store_true", help="fit and print; record nothing")
    arguments = options.parse_args()
    if arguments.fit:
        print(fit())
        return
    rows = figures(MODEL, RECORD_SEED, RECORDED_LENGTHS, groups=6)
    for row in rows:
        print(row)
    record = {
        "machine": machine("numpy"),
        "fit_seed": FIT_SEED,
        "seed": RECORD_SEED,
        "model": dataclasses.asdict(MODEL),
        "rows": rows,
    }
    write_record(record, arguments.output)


if __name__ == "__main__":
    main()
