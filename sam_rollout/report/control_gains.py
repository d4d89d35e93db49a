"""What the control within a run tells: gains over its compared steps, without another run."""

from sam_rollout.report.runs import Run, with_names
from sam_rollout.telemetry.control import so_far

_PREFIX, _SO_FAR = "sam/control/", "_so_far"
_TITLES = {
    "without_drafts_gain": "rollout without drafts (estimate) / rollout - 1",
    "gain": "tokens per step with drafts / without - 1",
    "rollout_gain": "rollout of control replicas / of the others - 1",
    "tail_gain": "tail time per token of control replicas / of the others - 1",
}


def control_lines(runs: list[Run], steps: list[int]) -> list[str]:
    """A line for each of SAM's runs that had a control, in words."""
    lines = []
    for name, run in with_names([], runs):
        table = run.steps.reindex(steps)
        values = so_far({int(step): row.dropna().to_dict() for step, row in table.iterrows()})
        told = [
            f"{title} {_gain(values, f'{_PREFIX}{gain}{_SO_FAR}')}"
            for gain, title in _TITLES.items()
            if f"{_PREFIX}{gain}{_SO_FAR}" in values
        ]
        if told:
            lines.append(f"Control within {name}: {'; '.join(told)}.")
    return lines


def _gain(values: dict[str, float], name: str) -> str:
    if f"{name}_low" not in values:
        return f"{values[name]:+.1%}"
    return f"{values[name]:+.1%} [{values[f'{name}_low']:+.1%}, {values[f'{name}_high']:+.1%}]"
