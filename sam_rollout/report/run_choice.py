"""Which of the runs named for a comparison are compared.

A repeat that crashed is left out, and so is its partner: the run of the other side with the same
seeds. Without it that side would have prompts and luck of its own.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sam_rollout.report.run_readers import load_run
from sam_rollout.report.runs import Run
from sam_rollout.telemetry.records import RunFolderError


@dataclass
class _Side:
    """`lost` maps the number of every run that is left out to its seeds, None if unknown."""

    name: str
    given: int
    runs: list[Run] = field(default_factory=list)
    lost: dict[int, Mapping[str, int] | None] = field(default_factory=dict)

    def partner(self, run: Run) -> int | None:
        """Number of the lost run that was to be laid beside a run of the other side."""
        if any(run.start.seeds == other.start.seeds for other in self.runs):
            return None
        # What could not be read tells no seeds; scripts/compare.sh names pairs in the same order.
        return next(
            (
                number
                for number, seeds in self.lost.items()
                if seeds == run.start.seeds or (seeds is None and number == run.number)
            ),
            None,
        )


def load_sides(
    base: Iterable[str | Path], sam: Iterable[str | Path]
) -> tuple[list[Run], list[Run], list[str]]:
    """The runs of both sides that can be compared, and what is left out, and why.

    A run keeps its place among those named for its side as its number. Raises RunFolderError if a
    side has no run with a training step.
    """
    left_out: list[str] = []
    sides = [
        _loaded(name, list(map(Path, paths)), left_out)
        for name, paths in (("BASE", base), ("SAM", sam))
    ]
    for side in sides:
        left_out += _leave_out_short(side)
    left_out += _leave_out_partners(*sides)
    return sides[0].runs, sides[1].runs, left_out


def _loaded(name: str, paths: list[Path], left_out: list[str]) -> _Side:
    side, refused = _Side(name, len(paths)), []
    for number, path in enumerate(paths, start=1):
        try:
            run = load_run(path)
        except RunFolderError as error:
            refused.append(error)
            side.lost[number] = None
            left_out.append(f"{name} {number} ({path.name}) is left out: {error}")
        else:
            side.runs.append(replace(run, number=number if len(paths) > 1 else None))
    if not side.runs:
        raise refused[0]
    return side


def _leave_out_short(side: _Side) -> Iterator[str]:
    """Repeats that would cost the others most of their steps."""
    longest = max(len(run.training_steps) for run in side.runs)
    if longest == 0:
        raise RunFolderError(f"{side.runs[0].path}: no training step in it")
    named, side.runs = side.runs, []
    for run in named:
        own = len(run.training_steps)
        if own and 2 * own >= longest:
            side.runs.append(run)
        else:
            side.lost[run.number or 1] = run.start.seeds
            yield (
                f"{run.name(side.name)} ({run.path.name}) is left out: it has {own} training "
                f"steps, another repeat {longest}"
            )


def _leave_out_partners(base: _Side, sam: _Side) -> Iterator[str]:
    """Runs whose seeds the other side lost with a run."""
    if base.given != sam.given or any(not run.start.seeds for run in [*base.runs, *sam.runs]):
        return
    partners = [
        (side, other, [(run, other.partner(run)) for run in side.runs])
        for side, other in ((base, sam), (sam, base))
    ]
    if any(None not in [lost for _, lost in pairs] for _, _, pairs in partners):
        return  # nothing would be left; the findings tell that the seeds differ
    for side, other, pairs in partners:
        side.runs = [run for run, lost in pairs if lost is None]
        for run, lost in pairs:
            if lost is not None:
                yield (
                    f"{run.name(side.name)} ({run.path.name}) is left out with {other.name} "
                    f"{lost}, its partner of the same seeds"
                )
