"""Trains draft heads during whole DAPO runs, and measures their acceptance in every training step.

    python -m benchmarks.head_online [--steps 20] [--work-dir outputs/head_online]

Each side is one run. One run has no drafts, and one drafts from texts alone (`sam=on`). One run
also drafts with the shipped head, which is not trained (`sam=joined`). Two runs train this head
(`sam=trained`) within different time budgets, and one run trains a new head. Two more runs, one
with texts alone and one with a new head, draft in every step. Finished runs in the work folder are
not repeated.

All runs have to sample the same responses and make the same updates. The program compares token
ids, rewards and gradient norms with those of the run without drafts. Each trained head is also
tested alone on new responses, before it learns from them.
"""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks import measuring
from benchmarks.learning import run_once, same_texts
from benchmarks.training_run import LENGTH, TINY
from sam_rollout.bench.machine_record import machine
from sam_rollout.report.charts import COLOURS, STYLE
from sam_rollout.sources.model import HeadTrainingConfig

TRAINING = "sam.sources.model.train"
# Shares of a step's time that training the head may take. The default is too small for twenty
# short steps.
BUDGETS = {"trained": 0.1, "from nothing": 0.3, "by default": HeadTrainingConfig().budget}
FROM_NOTHING = (
    "sam=trained", "sam.sources.model.path=''", f"{TRAINING}.budget={BUDGETS['from nothing']}",
)  # fmt: skip
OPEN = ("sam.gate.kind=threshold", "sam.gate.threshold=10000")
SIDES = {
    "off": ("sam=off",),
    "on": ("sam=on",),
    "frozen": ("sam=joined",),
    "trained": ("sam=trained", f"{TRAINING}.budget={BUDGETS['trained']}"),
    "from nothing": FROM_NOTHING,
    "by default": ("sam=trained",),
    "on with open gate": ("sam=on", *OPEN),
    "from nothing with open gate": (*FROM_NOTHING, *OPEN),
}  # fmt: skip
# These sizes are smaller than those of tiny_cpu, so that twenty steps take minutes.
SMALL = (
    "data.max_response_length=384", "data.train_batch_size=4", "dynamic_sampling.gen_batch_size=6",
    "dynamic_sampling.max_rounds=0",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "reward.reward_kwargs.overlong_buffer_cfg.len=64",
    "rollout_telemetry.curve_every=0",
)  # fmt: skip
LEARNED = ["actor/grad_norm", "critic/rewards/mean", "actor/pg_loss", "response_length/mean"]
SHOWN = {
    "acceptance_length": "sam/draft/acceptance_length",
    "rollout_s": "sam/engine/rollout_s",
    "engine_steps": "sam/engine/steps",
    "model_s": "sam/draft/model_s",
    "step_s": "timing_s/step",
    **{
        name: f"sam/head_training/{name}"
        for name in ("length", "first_length", "share", "updates", "failures")
    },
}  # fmt: skip


def _training_s(own: dict[str, list]) -> list[float]:
    return [share * step_s for share, step_s in zip(own["share"], own["step_s"], strict=True)]


def summary(series: dict[str, dict[str, list]]) -> list[dict[str, Any]]:
    trained, nothing = series["trained"], series["from nothing with open gate"]
    late = slice(min(4, len(trained["length"]) - 1), None)  # from step 5 on
    tokens = {name: sum(own["acceptance_length"][late]) for name, own in series.items()}
    pairs = list(zip(trained["length"], trained["first_length"], strict=True))[late]
    against = [a / b for a, b in pairs if a is not None]
    texts_alone = series["on with open gate"]["acceptance_length"]
    gains = [a / b for a, b in zip(nothing["acceptance_length"], texts_alone, strict=True)]
    ahead, well_ahead = (
        next((n for n in range(len(gains)) if min(gains[n:]) > gain), len(gains))
        for gain in (1.0, 1.1)
    )
    rows: dict[str, dict[str, Any]] = {
        "trained": {
            "least_against_frozen": min(against),
            "mean_against_frozen": sum(against) / len(against),
            "joined_against_frozen": tokens["trained"] / tokens["frozen"],
        },
        "from nothing with open gate": {
            "ahead_of_texts_from_step": ahead + 1,
            "seconds_of_training_till_then": sum(_training_s(nothing)[:ahead]),
            "ten_percent_ahead_from_step": well_ahead + 1,
            "seconds_till_ten_percent": sum(_training_s(nothing)[:well_ahead]),
        },
        "from nothing": {},
        "by default": {},
    }
    for name, row in rows.items():
        own = series[name]
        side, _, gate = name.partition(" with ")
        base = f"on with {gate}" if gate else "on"
        row |= {
            "row": name,
            "joined_against_texts": tokens[name] / tokens[base],
            "share_of_time": sum(_training_s(own)) / sum(own["step_s"]),
            "budget": BUDGETS[side],
            "updates": sum(own["updates"]),
        }
    return list(rows.values())


def against_off(series: dict[str, dict[str, list]]) -> dict[str, dict[str, Any]]:
    """Return medians, with intervals, of the ratios off / side over all steps but the first."""
    return {
        side: {
            name: measuring.median_interval(
                [a / b for a, b in zip(series["off"][name][1:], own[name][1:], strict=True)]
            )
            for name in ("rollout_s", "engine_steps", "step_s")
        }
        for side, own in series.items()
        if side != "off"
    }


def draw(series: dict[str, dict[str, list]], path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 3.8), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        left.set_title("The head alone, on texts it has not seen")
        curves = {
            "trained": series["trained"]["length"],
            "frozen": series["trained"]["first_length"],
            "from nothing": series["from nothing"]["length"],
        }
        colours = dict(zip(list(series)[1:], COLOURS, strict=False))
        for name, curve in curves.items():
            found = [(n, length) for n, length in enumerate(curve, 1) if length is not None]
            left.plot(*zip(*found, strict=True), color=colours[name])
        middle.set_title("With texts, in the steps that the gate chose")
        right.set_title("With texts, in every step")
        for name, own in series.items():
            kind, _, is_open = name.partition(" with ")
            if kind != "off":
                curve, axis = own["acceptance_length"], right if is_open else middle
                label = "texts alone" if kind == "on" else kind
                axis.plot(range(1, len(curve) + 1), curve, color=colours[kind], label=label)
        for axis in (left, middle, right):
            axis.set_xlabel("training step")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.set_ylabel("tokens per verify step")
        figure.legend(*middle.get_legend_handles_labels(), loc="outside lower center", ncols=5)
        figure.savefig(path, dpi=120, format="png")


def main() -> None:
    options = measuring.parser(__doc__, "head_online_tiny_cpu")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--work-dir", type=Path, default=Path("outputs/head_online"))
    arguments = options.parse_args()
    series, same = {}, {}
    base = None
    for side, overrides in SIDES.items():
        folder = arguments.work_dir.absolute() / side.replace(" ", "_")
        length = f"{LENGTH}{arguments.steps}"
        run = run_once(folder, TINY, *overrides, *SMALL, length)
        base = base or run
        if run is not base:
            updates = run.steps[LEARNED] == base.steps[LEARNED]
            same[side] = same_texts(run, base) | {"same_updates": int(updates.all(axis=1).sum())}
        # Values of the head's test are None in training steps without time for this test.
        steps = run.steps.astype(object).where(run.steps.notna(), None)
        series[side] = {
            short: steps[name].tolist() for short, name in SHOWN.items() if name in steps
        }
    everything = {
        "row": "all sides",
        "identical": min(one["identical"] / one["responses"] for one in same.values()),
        "same_updates": min(one["same_updates"] / arguments.steps for one in same.values()),
    }
    record = {
        "machine": machine("torch", "vllm", "verl", "ray"),
        "setting": {
            "steps": arguments.steps, "overrides": SMALL, "sides": SIDES, "budgets": BUDGETS,
        },
        "rows": [*summary(series), everything], "same": same,
        "against_off": against_off(series), "series": series,
    }  # fmt: skip
    measuring.write_record(record, arguments.output)
    draw(series, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
