"""Which of the runs named for a comparison are compared.

A repeat that crashed is left out, and so is its partner: the run of the other side in the same
place, which has its seeds. Without it that side would have prompts and luck of its own.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from sam_rollout.report.runs import Run, load_run
from sam_rollout.telemetry.records import RunFolderError

_Side = dict[int, Run]  # by the run's place among those named for its side, from 1


def load_sides(
    base: Iterable[str | Path], sam: Iterable[str | Path]
) -> tuple[list[Run], list[Run], list[str]]:
    """The runs of both sides that can be compared, and what is left out, and why.

    A run keeps its place among those named for its side as its number. Raises RunFolderError if a
    side has no run with a training step.
    """
    left_out: list[str] = []
    named = {"BASE": list(map(Path, base)), "SAM": list(map(Path, sam))}
    sides = {name: _loaded(name, paths, left_out) for name, paths in named.items()}
    whole = sides["BASE"].keys() & sides["SAM"].keys()
    if len(named["BASE"]) == len(named["SAM"]) and whole:
        for (name, runs), other in zip(sides.items(), ("SAM", "BASE"), strict=True):
            for number in sorted(runs.keys() - whole):
                if _has_a_seed_of_its_own(runs[number], runs.values()):
                    left_out.append(
                        f"{name} {number} ({runs[number].path.name}) is left out with {other} "
                        f"{number}, its partner of the same seeds"
                    )
                    del runs[number]
    return list(sides["BASE"].values()), list(sides["SAM"].values()), left_out


def _loaded(name: str, paths: list[Path], left_out: list[str]) -> _Side:
    """The runs of a side that can be read and would not cost the others most of their steps."""
    runs: _Side = {}
    refused: RunFolderError | None = None
    for number, path in enumerate(paths, start=1):
        try:
            runs[number] = replace(load_run(path), number=number if len(paths) > 1 else None)
        except RunFolderError as error:
            refused = refused or error
            left_out.append(f"{name} {number} ({path.name}) is left out: {error}")
    if refused and not runs:
        raise refused
    longest = max(len(run.training_steps) for run in runs.values())
    if longest == 0:
        raise RunFolderError(f"{paths[0]}: no training step in it")
    for number, run in list(runs.items()):
        own = len(run.training_steps)
        if 2 * own < longest:
            left_out.append(
                f"{name} {number} ({run.path.name}) is left out: it has {own} training steps, "
                f"another repeat {longest}"
            )
            del runs[number]
    return runs


def _has_a_seed_of_its_own(run: Run, runs: Iterable[Run]) -> bool:
    """Whether no other run of its side has its seeds."""
    seeds = [other.start.seeds for other in runs]
    return bool(run.start.seeds) and seeds.count(run.start.seeds) == 1
