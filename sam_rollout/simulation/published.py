"""The published setups on paper: fitted on baseline figures of one, held against all that is known.

Fitted: three numbers, on the baseline of Qwen3-32B alone. Every figure with speculation, and every
figure of the other two setups, is predicted and set beside the published one. Source of all
published figures: article "SAM投机推理：长序列强化学习训练加速利器", sections 1.3, 2.3, 3.1 and 3.2
(cann-recipes-train, docs/llm_rl/sam_decoding.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
from scipy.optimize import brentq, minimize

from sam_rollout.config import SamConfig
from sam_rollout.simulation.acceptance import Acceptance
from sam_rollout.simulation.costs import StepCosts
from sam_rollout.simulation.lengths import LengthModel
from sam_rollout.simulation.policies import budget_of, no_drafts
from sam_rollout.simulation.rollout import Outcome, Setting, simulate
from sam_rollout.simulation.setups import Setup
from sam_rollout.sizing import ModelShape

SETUPS = ("article_32b", "article_235b", "customer_32b_128die")
FITTED_SETUP = "article_32b"
FIT_SEEDS, SEEDS = 8, {"article_32b": 16, "article_235b": 6, "customer_32b_128die": 4}
MAX_ERROR_POINTS, MAX_TAIL_ERROR = 3.0, 0.1


@dataclasses.dataclass(frozen=True)
class Published:
    """A published pair of times, seconds.

    `figure` names the property of `Outcome` it is compared with; `rounds`: generation rounds that
    the baseline figure holds, as far as can be told.
    """

    setup: str
    title: str
    figure: str
    baseline_s: float
    sam_s: float
    rounds: float = 1.0
    remark: str = ""

    @property
    def gain(self) -> float:
        """Baseline / SAM - 1."""
        return self.baseline_s / self.sam_s - 1


GAINS = (
    Published("article_32b", "round, mean of replicas", "mean_s", 3904.22, 3548.62),
    Published("article_32b", "rollout of a step", "rollout_s", 4159.06, 3793.29),
    Published("article_235b", "round, mean of replicas", "mean_s", 7102.92, 6467.52),
    Published(
        "article_235b", "rollout of a step", "rollout_s", 14287.54, 12811.98,
        rounds=14287.54 / 7102.92,
        remark="two rounds; without drafts 2.01 rounds' time a step, with drafts 1.98: the 1.5 "
        "points above the gain of a round are rounds saved, not drafts",
    ),
    Published("customer_32b_128die", "rollout of a step", "rollout_s", 9094.0, 8223.0),
)  # fmt: skip
TAIL_S, TAIL_FACTOR = 1435.0, 1.35  # of Qwen3-32B, section 3.2.4: bar chart and text
# Mean response length of a Qwen3-32B step without drafts (section 2.3, step 5 of the curves).
MEAN_RESPONSE = 9315.0


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What is neither fitted nor published for these runs; each has a line in the sensitivities.

    `bandwidth` (its 70 %) and `moe_layer` are guesses without a source.

    Attributes:
        bandwidth: bytes a second that a die reads the KV cache with: 1.6 TB/s, of which 70 %.
        rereads: whether the verify attention reads keys and values once for every query head, not
            once for the heads that share them. The article (3.1.1) says of its verify operator that
            it degrades severely with batch and length, without numbers.
        sampler_s: verification of a step: a tenth of "more than 50 ms" (3.1.2).
        moe_layer: host time of a layer with experts, in layers of a dense model.
        overlap: whether launching operators (eager mode) and running them overlap, so that the
            longer one counts. Assumed not: the engine waits for a step's tokens before it launches
            the next, and were attention hidden behind launches, the article's warning of its cost
            in verify steps (3.1.1) would be moot.
        acceptance, verify: factors on the chances of drafts and on the time of verify steps.
        mean_response: tokens, published of Qwen3-32B alone.
    """

    bandwidth: float = 0.7 * 1.6e12
    rereads: bool = True
    sampler_s: float = 0.005
    moe_layer: float = 2.0
    overlap: bool = False
    acceptance: float = 1.0
    verify: float = 1.0
    mean_response: float = MEAN_RESPONSE


@dataclasses.dataclass(frozen=True)
class Fit:
    """The free parameters, fitted on three baseline figures of Qwen3-32B.

    Attributes:
        layer_s: host time of a dense layer, seconds a step.
        sigma, capped_share: of `LengthModel`.
    """

    layer_s: float
    sigma: float
    capped_share: float

    def lengths(self, setup: Setup, assumed: Assumptions) -> LengthModel:
        """Response lengths of a setup: those of Qwen3-32B for all."""
        return LengthModel(assumed.mean_response, self.sigma, self.capped_share,
                           setup.max_response)  # fmt: skip

    def costs(
        self, setup: Setup, assumed: Assumptions, max_k: int, captured: Container[int] = (),
        *, pad: bool = False,
    ) -> StepCosts:  # fmt: skip
        """Step times of a setup.

        Args:
            setup: on paper.
            assumed: what is not fitted.
            max_k: most drafts of a step.
            captured: query lengths that run as a full graph, the others eagerly. A graph's step
                launches nothing from the host; instead its die reads all its weights once, which
                no eager step of these setups waits for.
            pad: all steps are filled up to `max_k` drafts.
        """
        shape, per_layer = setup.shape, self.layer_s
        host_s = shape.layers * per_layer * (assumed.moe_layer if shape.experts else 1.0)
        weights_s = setup.weight_bytes / assumed.bandwidth
        token_s = shape.kv_cache_bytes(setup.tensor) / assumed.bandwidth
        batches = np.unique(np.geomspace(1, max(setup.fleet.max_num_seqs, 2), 9).round())
        contexts = np.linspace(0.0, 40_960.0, 11)
        device_s = batches[:, None] * contexts[None, :] * token_s
        reads = _readers(shape, setup.tensor) if assumed.rereads else 1
        join: Callable[..., Any] = np.maximum if assumed.overlap else np.add
        seconds = []
        for query in [max_k + 1] * (max_k + 1) if pad else range(1, max_k + 2):
            attention_s = device_s if query == 1 else device_s * reads
            if query in captured:
                step_s = attention_s + min(weights_s, host_s)
            else:
                step_s = join(attention_s, host_s)
            seconds.append(step_s if query == 1 else (step_s + assumed.sampler_s) * assumed.verify)
        return StepCosts(batches, contexts, np.stack(seconds))


def _readers(shape: ModelShape, tensor: int) -> int:
    """Query heads of a rank that share a key and value head."""
    return (shape.heads // tensor) // max(1, shape.kv_heads // tensor)


@dataclasses.dataclass(frozen=True)
class Times:
    """Means over several draws of lengths, seconds."""

    mean_s: float
    rollout_s: float
    tail_s: float

    @classmethod
    def of(cls, outcomes: list[Outcome]) -> Times:
        """The means."""
        return cls(
            *(float(np.mean([getattr(outcome, field.name) for outcome in outcomes]))
              for field in dataclasses.fields(cls))
        )  # fmt: skip


def run(
    setup: Setup, fit: Fit, assumed: Assumptions, sam: SamConfig | None, acceptance: Acceptance,
    seeds: int, tail_threshold: int | None = None,
) -> Times:  # fmt: skip
    """Simulate a round of a setup, `sam` None for the baseline."""
    lengths = fit.lengths(setup, assumed)
    max_k = sam.max_draft_tokens if sam else 1
    costs = fit.costs(setup, assumed, max_k)
    setting = Setting(
        budget_of(sam) if sam else no_drafts,
        (acceptance.scaled(assumed.acceptance),),
        tail_threshold=setup.sam.gate.threshold if tail_threshold is None else tail_threshold,
    )
    return Times.of(
        [
            simulate(lengths.draw(setup.prompts, setup.siblings, seed), setup.fleet, costs, setting,
                     seed=seed)
            for seed in range(seeds)
        ]
    )  # fmt: skip


def fit_baseline(setup: Setup, assumed: Assumptions, acceptance: Acceptance) -> Fit:
    """Free parameters from the baseline figures of Qwen3-32B: two times and the long tail."""
    target = np.array([GAINS[0].baseline_s, GAINS[1].baseline_s, TAIL_S])

    def made(x: np.ndarray) -> Fit:
        return Fit(1e-3 * abs(x[0]), abs(x[1]), min(0.01 * abs(x[2]), 0.1))

    def loss(x: np.ndarray) -> float:
        times = run(setup, made(x), assumed, None, acceptance, FIT_SEEDS)
        found = np.array([times.mean_s, times.rollout_s, times.tail_s])
        return float((((found - target) / target) ** 2).sum())

    options = {"maxfev": 90, "xatol": 2e-3, "fatol": 1e-7}
    start = np.array([[1.1, 0.5, 1.0], [1.3, 0.5, 1.0], [1.1, 0.3, 1.0], [1.1, 0.5, 0.7]])
    found = minimize(loss, start[0], method="Nelder-Mead",
                     options={**options, "initial_simplex": start})  # fmt: skip
    return made(found.x)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A held-out gain beside the published one."""

    published: Published
    baseline_s: float
    sam_s: float
    constant_gain: float  # mean of the other published gains
    verify_needed: float | None = None  # factor on verify steps that would give the published gain

    @property
    def gain(self) -> float:
        """Baseline / SAM - 1."""
        return self.baseline_s / self.sam_s - 1

    @property
    def error_points(self) -> float:
        """Predicted less published, percentage points."""
        return 100 * (self.gain - self.published.gain)

    @property
    def constant_error_points(self) -> float:
        """The same of the constant predictor."""
        return 100 * (self.constant_gain - self.published.gain)


class OnPaper:
    """All published setups under one set of assumptions.

    Args:
        configs: composed configurations by experiment, those of `SETUPS`.
        acceptance: what the published drafter has accepted, by context.
        assumed: everything else.
    """

    def __init__(
        self,
        configs: Mapping[str, Mapping[str, Any]],
        acceptance: Acceptance,
        assumed: Assumptions | None = None,
        *,
        fit: Fit | None = None,
    ) -> None:
        self.setups = {name: Setup.of(name, configs[name]) for name in configs}
        self.acceptance = acceptance
        self.assumed = assumed or Assumptions()
        self.fit = fit or fit_baseline(self.setups[FITTED_SETUP], self.assumed, acceptance)

    def times(self, name: str, sam: SamConfig | None, assumed: Assumptions | None = None) -> Times:
        """A setup with or without speculation."""
        return run(self.setups[name], self.fit, assumed or self.assumed, sam, self.acceptance,
                   SEEDS[name])  # fmt: skip

    def pair(
        self, name: str, assumed: Assumptions | None = None, **changes: int
    ) -> tuple[Times, Times]:
        """A setup without and with speculation, both with the assumptions and changes given.

        Args:
            name: of the setup.
            assumed: instead of this object's; the fit stays.
            changes: `k` or `threshold` instead of the setup's.
        """
        sam = self.setups[name].sam
        if "k" in changes:
            sam = dataclasses.replace(sam, max_draft_tokens=changes["k"])
        if "threshold" in changes:
            gate = dataclasses.replace(sam.gate, threshold=changes["threshold"])
            sam = dataclasses.replace(sam, gate=gate)
        return self.times(name, None, assumed), self.times(name, sam, assumed)

    def predictions(self, name: str, *, diagnose: bool = False) -> list[Prediction]:
        """Every published gain of a setup, predicted."""
        base, sam = self.pair(name)
        found = []
        for row in (row for row in GAINS if row.setup == name):
            others = [other.gain for other in GAINS if other is not row]
            needed = self._verify_needed(row) if diagnose else None
            found.append(
                Prediction(
                    row,
                    getattr(base, row.figure) * row.rounds,
                    getattr(sam, row.figure) * row.rounds,
                    float(np.mean(others)),
                    needed,
                )
            )
        return found

    def tail_factor(self) -> float:
        """How much faster the long tail of Qwen3-32B is with drafts."""
        base, sam = self.pair(FITTED_SETUP)
        return base.tail_s / sam.tail_s

    def _verify_needed(self, row: Published) -> float | None:
        """How much dearer verify steps would have to be for the published gain; None if never."""
        base = getattr(self.times(row.setup, None), row.figure)

        def excess(factor: float) -> float:
            assumed = dataclasses.replace(self.assumed, verify=self.assumed.verify * factor)
            sam = self.times(row.setup, self.setups[row.setup].sam, assumed)
            return base / getattr(sam, row.figure) - 1 - row.gain

        low, high = 0.5, 3.0
        if excess(low) < 0 or excess(high) > 0:
            return None
        return float(brentq(excess, low, high, xtol=0.01))

    def sensitivities(self, name: str) -> list[tuple[str, float]]:
        """Gain of a step's rollout if an assumption were another; the fit stays."""
        cases: list[tuple[str, dict[str, Any], dict[str, int]]] = [
            ("as assumed", {}, {}),
            ("acceptance 10 % lower", {"acceptance": 0.9}, {}),
            ("threshold 4", {}, {"threshold": 4}),
            ("threshold 16", {}, {"threshold": 16}),
            ("k = 4", {}, {"k": 4}),
            ("verify steps 20 % dearer", {"verify": 1.2}, {}),
            ("verify steps 60 % dearer", {"verify": 1.6}, {}),
            ("keys and values read once", {"rereads": False}, {}),
            ("KV cache read at 50 % of the bandwidth", {"bandwidth": 0.5 * 1.6e12}, {}),
            ("verification 10 ms a step", {"sampler_s": 0.010}, {}),
            ("a layer with experts as quick as a dense one", {"moe_layer": 1.0}, {}),
            ("launching and running overlap", {"overlap": True}, {}),
            ("mean response 20 % shorter", {"mean_response": 0.8 * MEAN_RESPONSE}, {}),
        ]
        found = []
        for title, assumed, changes in cases:
            base, sam = self.pair(name, dataclasses.replace(self.assumed, **assumed), **changes)
            found.append((title, base.rollout_s / sam.rollout_s - 1))
        return found
