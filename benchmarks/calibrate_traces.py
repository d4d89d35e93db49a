"""Fits the trace generator to the published acceptance curve, and records how well it fits.

    python -m benchmarks.calibrate_traces [--fit]

Without --fit the frozen parameters are measured on texts other than those they were fitted on.
The yardstick is a plain first-occurrence automaton, like the one behind the published curve.
"""

from __future__ import annotations

import dataclasses

from benchmarks.measuring import parser, write_record
from sam_rollout.bench.first_occurrence import FirstOccurrenceAutomaton
from sam_rollout.bench.generator import MODEL, PUBLISHED, Problem, TraceModel
from sam_rollout.bench.machine import machine
from sam_rollout.bench.replay import accepted_tokens

K = 3
FIT_SEED, RECORD_SEED = 1, 2
LENGTHS = (38_000,) * 12 + (11_000,) * 12 + (2_500,) * 72  # the early stretches are short
ROUNDS = 8


def acceptance_curve(model: TraceModel, seed: int) -> list[float]:
    """Mean acceptance length on each stretch of `PUBLISHED`."""
    tokens = [0] * len(PUBLISHED)
    steps = [0] * len(PUBLISHED)
    for index, length in enumerate(LENGTHS):
        trace = Problem(index, model, seed).response(0, length)
        text = trace.tokens.tolist()
        known = len(trace.prompt)
        automaton = FirstOccurrenceAutomaton()
        automaton.extend(text[:known])
        while known < len(text) - K:
            right = accepted_tokens(automaton.draft(K), text, known)
            for i, (start, stop, _) in enumerate(PUBLISHED):
                if start <= known < stop:
                    tokens[i] += right + 1
                    steps[i] += 1
            automaton.extend(text[known : known + right + 1])
            known += right + 1
    return [token / step for token, step in zip(tokens, steps, strict=True)]


def fit() -> TraceModel:
    """Move each stretch's reused scale until its acceptance is the published one."""
    model = MODEL
    for _ in range(ROUNDS):
        curve = acceptance_curve(model, FIT_SEED)
        print([round(value, 1) for value in model.reused_scales], [round(v, 3) for v in curve],
              flush=True)  # fmt: skip
        scales = tuple(
            scale * ((published - 1) / (measured - 1)) ** 2
            for scale, measured, (_, _, published) in zip(
                model.reused_scales, curve, PUBLISHED, strict=True
            )
        )
        model = dataclasses.replace(model, reused_scales=scales)
    return model


def main() -> None:
    """Fit and print, or measure and record."""
    options = parser(__doc__, "drafter_calibration")
    options.add_argument("--fit", action="store_true", help="fit and print; record nothing")
    arguments = options.parse_args()
    if arguments.fit:
        print(tuple(round(scale, 1) for scale in fit().reused_scales))
        return
    curve = acceptance_curve(MODEL, RECORD_SEED)
    rows = [
        {"from": start, "to": stop, "published": published, "measured": round(measured, 3)}
        for (start, stop, published), measured in zip(PUBLISHED, curve, strict=True)
    ]
    for row in rows:
        print(row)
    record = {
        "machine": machine("numpy"),
        "k": K,
        "fit_seed": FIT_SEED,
        "seed": RECORD_SEED,
        "model": dataclasses.asdict(MODEL),
        "rows": rows,
    }
    write_record(record, arguments.output)


if __name__ == "__main__":
    main()
