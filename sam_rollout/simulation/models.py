"""Drafts of a model that the engine runs: what its passes cost, and how many are accepted.

What texts and a model accept together does not follow from what each accepts alone: both are right
at the same easy places. So joined drafts are forecast from a run that joined them, and from nothing
else; a model alone from such a run, or from chances that somebody gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sam_rollout.simulation.chances import Acceptance
from sam_rollout.simulation.costs import StepCosts
from sam_rollout.simulation.workload import WorkloadError, model_of, seen_chances
from sam_rollout.telemetry.records import RunFolder


@dataclasses.dataclass(frozen=True)
class ModelDrafts:
    """A model that drafts, alone or joined with texts.

    Attributes:
        title: `model` or `joined`.
        chances: of its drafts, whatever the context.
        passes: of a step with drafts; one of any other, which keeps the model's cache right.
        pass_share: what a pass takes of a decode step of as many requests.
    """

    title: str
    chances: Acceptance
    passes: int
    pass_share: float

    def added_to(self, costs: StepCosts) -> StepCosts:
        """Step costs with its passes."""
        passes = np.full((len(costs.seconds), 1, 1), self.passes)
        passes[0] = 1
        seconds = costs.seconds + self.pass_share * passes * costs.seconds[0]
        return dataclasses.replace(costs, seconds=seconds)


def given_model(survival: Sequence[float], pass_share: float) -> ModelDrafts:
    """A model alone that has at least 1, 2, ... drafts accepted with these chances.

    Raises:
        ValueError: chances that rise, or are none.
    """
    if any(later > before for before, later in zip([1.0, *survival], survival, strict=False)):
        raise ValueError(f"chances of 1, 2, ... drafts are at most 1 and never rise: {survival}")
    chances = Acceptance(np.zeros(1), np.array([survival], float))
    return ModelDrafts("model", chances, len(survival), pass_share)


def recorded_model(path: Path, pass_share: float) -> ModelDrafts:
    """The model of a run, alone or joined with texts as the run had it.

    Raises:
        WorkloadError: the run had no model, or verified no drafts.
        RunFolderError: no run folder.
    """
    folder = RunFolder(path)
    sources = model_of(folder)
    if sources is None:
        raise WorkloadError(f"{path}: no model drafted in this run (sam.sources.model.enabled)")
    requests = folder.read("requests").to_pandas()
    chances = seen_chances(folder, requests[requests["split"] == "train"])
    if chances is None:
        raise WorkloadError(f"{path}: no training step with an open gate was recorded")
    title = "joined" if len(sources) > 1 else "model"
    return ModelDrafts(title, chances, sources["model"]["max_tokens"], pass_share)
