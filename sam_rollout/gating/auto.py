"""The gate `auto`: it measures which drafts yield the most tokens per second on this engine.

docs/gating.md explains how the gate decides. The terms of this module:

* A level is one choice of the gate: to draft nothing, or to draft a certain shape (chain or tree)
  with a certain minimum chance of acceptance. The rate of a level is
  requests * (1 + expected accepted tokens) / expected step time.
* The offers of a level are the tokens that could be drafted at this level.
* A trial is a step at another level than the best level, made only to learn from the step.

If only some requests may have drafts of a shape, the gate learns this shape's offers from these
requests.
"""

import math
from collections.abc import Sequence

from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import CHANCES, Offered
from sam_rollout.gating.draft_supply import LEVELS, Calibration, Levels, Supply
from sam_rollout.gating.gate import LOOK, Gate, hands_over
from sam_rollout.gating.shape_trials import LOOK_ROWS, ShapeTrials
from sam_rollout.gating.step import DecidedStep, EngineStep, LoadMeter
from sam_rollout.gating.step_times import StepTimes

# A level replaces the best level if its rate is higher by this factor. A level that drafts also
# needs this lead over level 0 (no drafts).
_LEAD = 1.01
# Trials may lose a share of the step time (`exploration`), and in addition the time of _ADVANCE
# steps. So the first trials need not wait.
_ADVANCE = 4
_DECIDE_EVERY = 4  # steps between two decisions while the number of requests stays the same
_ENOUGH = 4  # measured steps after which the time of a cell (`step_times.py`) is known
_STALE = 512  # steps after which the time of a cell has to be measured again
# A closed gate tries the most promising drafts again after _ASK_AGAIN steps. While the gate stays
# closed, this wait doubles with each trial, up to _ASK_AT_LEAST_EVERY steps.
_ASK_AGAIN, _ASK_AT_LEAST_EVERY = 32, 128
# The lead that a draft shape needs to replace the other shape: a chain's lead, and a tree's lead.
_SHAPE_LEADS = 1.01, 1.05
# Learning from a step prolongs the step by microseconds (benchmarks/gate.py). So the gate learns
# from only one in _LOOK_EVERY familiar steps. While few requests run, this share is larger.
_LOOK_EVERY = 4
_FAMILIAR = 16  # a step is familiar if its cell has this number of measured steps
_COUNTED = (
    "open_steps", "trials", "open_trials", "measured_steps", "decoding_s", "measured_s",
    "predicted_s", "measured_tokens", "trial_loss_s",
)  # fmt: skip
_ENDS = (0, LEVELS - 1)
_CLASSES = len(CHANCES)


class AutoGate(Gate):
    """Chooses the level (see the module's docstring) with the highest measured rate.

    `exploration` is the share of step time that trials may lose. `shapes` is the number of draft
    shapes to choose from. At level `1 + s * len(CHANCES) + n`, drafts have shape `s` and the
    minimum chance `CHANCES[n]`.
    """

    def __init__(self, limits: Limits, exploration: float, shapes: int = 1) -> None:
        self._k = limits.k
        self._exploration = exploration
        self._times = StepTimes(limits, shapes)
        self._calibrations = [Calibration() for _ in range(shapes)]
        self._octaves: list[list[Supply] | None] = [None] * (limits.max_rows.bit_length() + 1)
        self._octave = limits.max_rows.bit_length()
        self._supplies = self._octaves[self._octave] = list(map(Supply, self._calibrations))
        self._levels = 1 + shapes * _CLASSES
        self._all = tuple(range(self._levels))
        # A step's draft tokens and seconds at each level, as expected at the last decision.
        self._draft_tokens = [0.0] * self._levels
        self._expected = [0.0] * self._levels
        self._best_shape = 0  # shape of the last chosen level that drafts
        self._shape_trials = [ShapeTrials() for _ in self._octaves]
        # The share of requests that may have drafts of each shape: now, and at the last decision.
        self._may_draft = self._decided_may_draft = (1.0,) * shapes
        self._filling = 0.0  # padding tokens per request in a step without drafts
        self._seen = [[-_STALE] * self._times.loads for _ in range(self._times.bins)]
        self._steps = 0
        self._asked_at = 0  # step in which a closed gate last tried drafts
        self._ask_again = _ASK_AGAIN
        self._last_ns = 0
        self._context = 0  # tokens of all requests after the last step that the gate learned from
        # Number of steps skipped since the gate last learned, and number of steps still to skip.
        self._unseen = self._to_skip = 0
        self._passed_s = 0.0  # time of all steps, without interruptions
        self._meter = LoadMeter()
        self._whole = False  # whether each step has 0 or k draft tokens per request (with padding)
        self._best = 0  # the chosen level
        self._decided_for = 0  # number of requests at the last decision
        self._budget = 0
        self._postponed = 0  # level of a trial that waits until a step can verify drafts, else 0
        self._fair_s_per_token = 0.0  # expected seconds per token at the chosen level
        self._lost_s = 0.0  # time that trials have lost
        self._counts = self._no_counts()  # since the last drain
        self._told_s = 0.0, 0.0  # `_passed_s` and `_lost_s` at the last drain

    def observe(self, step: EngineStep) -> None:
        """Learn the cost and the yield of the previous step."""
        seconds, self._last_ns = (step.now_ns - self._last_ns) * 1e-9, step.now_ns
        self._may_draft = step.may_draft or self._may_draft
        if step.wasted:  # nothing is learned, but the lost time is charged to the budget of trials
            self._unseen += 1
            self._lose(seconds - self._expected[self._best])
            return
        if self._to_skip and step.same_batch and step.group is None and not self.is_trial:
            self._to_skip -= 1
            self._unseen += 1
            return
        made = step.group or DecidedStep(
            self._meter.load(step), self._budget, self.is_trial, self.shape
        )
        unseen, self._unseen, self._to_skip = self._unseen, 0, 0
        gained, context = made.load.tokens, made.load.context
        before, self._context = context - gained if unseen else self._context, context
        if step.offered is not None:
            self._hear(step.offered, max(made.load.rows, len(step.verified.sampled), 1), made.shape)
        if made.load.steady and before + gained == context:
            self._measure(made, before, seconds, stands_for=1 + unseen)
            return
        self._passed_s += min(seconds, self._expected[self._best])
        if made.trial and made.load.rows:  # this trial was not measured, so its loss is estimated
            expected = self._expect(made, context)
            self._lost_s += max(0.0, expected - gained * self._fair_s_per_token)

    def _hear(self, offered: Offered, rows: int, shape: int) -> None:
        self._calibrations[shape].observe(offered)
        trials = self._shape_trials[self._octave]
        fresh = trials.fresh if shape != self._best_shape else None
        (fresh or self._supplies[shape]).observe(offered)
        if fresh is not None and fresh.rows >= LOOK_ROWS:
            self._supplies[shape], trials.fresh = fresh, None
        if self._best:
            return
        self._calibrations[shape].look(offered)
        if self._would_pay(offered, rows, shape):
            self._asked_at, self._ask_again = -_ASK_AGAIN, _ASK_AGAIN
            # Offers for other numbers of requests may have changed, too, so they are learned anew.
            self._octaves = [None] * len(self._octaves)
            self._octaves[self._octave] = self._supplies

    def _measure(self, made: DecidedStep, context: int, seconds: float, stands_for: int) -> None:
        """Learn the time of a step that computed no prompt.

        `context` is the number of all requests' tokens before the step. `stands_for` is 1 plus the
        number of skipped steps just before the step. Each skipped step is assumed to have taken as
        long as this step.
        """
        rows, draft_tokens = made.load.rows, made.load.draft_tokens
        if made.trial:
            self._lose(seconds - made.load.tokens * self._fair_s_per_token)
        if not made.budget:
            self._filling = draft_tokens / rows
        expected = self._expect(made, context)
        column = self._times.load_of(rows, draft_tokens, drafting=made.budget > 0, shape=made.shape)
        if not self._times.observe(rows, column, draft_tokens, context, seconds, expected):
            return
        self._seen[self._times.bin_of[rows]][column] = self._steps
        if self._times.weight(rows, column) >= _FAMILIAR:
            self._to_skip = min(_LOOK_EVERY - 1, rows // _LOOK_EVERY)
        self._passed_s += stands_for * seconds
        self._counts["measured_steps"] += 1
        self._counts["measured_s"] += seconds
        self._counts["predicted_s"] += expected
        self._counts["measured_tokens"] += made.load.tokens

    def _lose(self, seconds: float) -> None:
        """Add a step's loss to the lost time, up to a bound, because a step may contain a pause."""
        self._lost_s += min(max(0.0, seconds), self._k * self._expected[self._best])

    def _expect(self, made: DecidedStep, context: int) -> float:
        if not self._times.ready:
            return 0.0
        tokens = made.load.draft_tokens
        both = (0, tokens) if made.budget else (tokens,)
        return self._times.expect(made.load.rows, context, both, (0, made.shape))[-1]

    def budget(self, rows: int, *, whole: bool = False, room: bool = True) -> int:
        """Return k, or 0 for no drafts; also set `least_chance`, which limits drafts further."""
        self._steps += 1
        level = self._decide(rows, whole) if rows else 0
        if self._postponed and rows.bit_length() == self._octave:
            level = self._postponed
        wish = self._k if level else 0
        is_look = level == self._levels
        self.least_chance = LOOK if is_look else CHANCES[(level - 1) % _CLASSES] if level else 0.0
        self.shape = 0 if is_look else _shape_of(level)
        is_open = hands_over(wish, self.least_chance)
        # If the next step cannot verify drafts, the gate stays closed until a step can.
        postponed = is_open and not room
        self._postponed = level if postponed and level != self._best else 0
        self.is_trial = level != self._best and not postponed
        self._budget = 0 if postponed else wish
        is_open = is_open and room
        self._counts["open_steps"] += is_open
        self._counts["open_trials"] += is_open and self.is_trial
        if self._levels > LEVELS:
            self._counts["tree_steps"] += is_open and self.shape > 0
        return wish

    def _decide(self, rows: int, whole: bool) -> int:
        same = rows == self._decided_for and self._may_draft == self._decided_may_draft
        if same and self._steps % _DECIDE_EVERY:
            return self._best
        if rows.bit_length() != self._octave:
            self._enter(rows.bit_length())
        if not self._times.ready:
            self._best = 0
            return 0
        self._decided_for, self._decided_may_draft = rows, self._may_draft
        if not self._may_draft[self._best_shape] and any(self._may_draft):
            self._use(1 - self._best_shape)
        self._whole = whole
        offered = [supply.by_level() for supply in self._supplies]
        tokens, expected, fair = self._work_out(rows, self._context, offered)
        self._draft_tokens, self._expected = tokens, expected
        choices = _ENDS if whole else self._all
        s_per_token = fair.copy()
        if self._levels > LEVELS:
            for level in self._all[1:]:
                shape = _shape_of(level)
                if not self._may_draft[shape]:
                    s_per_token[level] = math.inf
                elif shape != self._best_shape:
                    known = self._supplies[shape].rows >= LOOK_ROWS
                    s_per_token[level] *= _SHAPE_LEADS[shape] if known else math.inf
        drafting = min(choices[1:], key=s_per_token.__getitem__)
        s_per_token[0] /= _LEAD
        s_per_token[self._best] /= _LEAD
        best = min(choices, key=s_per_token.__getitem__)
        if bool(best) != bool(self._best):
            self._ask_again = _ASK_AGAIN
        if best and _shape_of(best) != self._best_shape:
            self._use(_shape_of(best))
        self._best = best
        self._fair_s_per_token = fair[best] / rows
        return best if self._postponed else self._trial(rows, drafting, choices)

    def _use(self, shape: int) -> None:
        self._best_shape = shape
        for trials in self._shape_trials:  # from now on, trials of all octaves try the other shape
            trials.changed(self._steps)

    def _work_out(
        self, rows: int, context: int, by_shape: Sequence[Levels], first: int = 0
    ) -> tuple[list[float], list[float], list[float]]:
        """Return a step's expected draft tokens, its time, and the time per token, by level.

        The time per token is the time in which one request gains a token. `context` is the number
        of all requests' tokens. `by_shape` holds the offers per request for shape number `first`
        and the following shapes.
        """
        tokens, weights = [self._filling * rows], []
        sizes, shapes, accepted = list(tokens), [0], [0.0]
        # The expected time is a weighted mean of the times of two step sizes, because time need not
        # grow in proportion to draft tokens. Sizes and weights are chosen such that the number of
        # draft tokens has the same mean and the same standard deviation as in the offers.
        for shape, levels in enumerate(by_shape, first):
            share = self._may_draft[shape]
            drafting, root = rows * share, math.sqrt(rows * share)
            accepted += [share * right for right in levels.accepted[1:]]
            shapes += [shape] * (2 * _CLASSES)
            for offered, spread in zip(levels.offered[1:], levels.spread[1:], strict=True):
                mean, off = offered * drafting, spread * root
                if self._whole:
                    mean, off = self._k * rows, 0.0
                below = min(mean, off)
                above = off * off / below if below > 0 else 0.0
                tokens.append(mean)
                sizes += mean + above, mean - below
                weights.append(below / (below + above) if below > 0 else 0.0)
        closed, *times = self._times.expect(rows, context, sizes, shapes)
        both = zip(times[::2], times[1::2], weights, strict=True)
        expected = [closed, *(b + weight * (a - b) for a, b, weight in both)]
        pairs = zip(expected, accepted, strict=True)
        return tokens, expected, [s / (1 + right) for s, right in pairs]

    def _would_pay(self, offered: Offered, rows: int, shape: int) -> bool:
        """Return whether a closed gate should open if all steps had the offers of this step."""
        if not self._times.ready:
            return False
        supply = Supply(self._calibrations[shape])
        supply.observe(offered)
        _, _, s_per_token = self._work_out(rows, self._context, [supply.by_level()], shape)
        return min(s_per_token) * _LEAD < s_per_token[0]

    def _enter(self, octave: int) -> None:
        """Use the offers of another octave, a range of numbers of requests (`draft_supply.py`)."""
        known = self._octaves[octave]
        if known is None:
            known = self._octaves[octave] = [supply.heir() for supply in self._supplies]
        self._supplies, self._octave = known, octave

    def _trial(self, rows: int, drafting: int, choices: tuple[int, ...]) -> int:
        """Return a level that is worth an affordable trial; if there is none, the best level."""
        best, expected = self._best, self._expected
        room = self._exploration * self._passed_s + _ADVANCE * expected[best] - self._lost_s
        if (other := self._other_shape(choices, room)) != best:
            self._counts["trials"] += 1
            return other
        if room <= 0:
            return best
        # A look (see `LOOK`) counts only the offers of chains, so it is made only while chains are
        # the best shape.
        looks = self._best_shape == 0 and self._may_draft[0] and not self._whole
        if looks and self._supplies[0].rows < LOOK_ROWS:
            self._counts["trials"] += 1
            return self._levels
        seen = self._seen[self._times.bin_of[rows]]
        ask = not best and self._steps - self._asked_at >= self._ask_again
        for level in (0 if best else drafting, best + 1, best - 1):
            if level == best or level not in choices:
                continue
            if level and best and _shape_of(level) != self._best_shape:
                continue  # only levels of the same shape are neighbours
            load = self._times.load_of(
                rows, self._draft_tokens[level], drafting=level > 0, shape=_shape_of(level)
            )
            known = self._times.weight(rows, load) >= _ENOUGH and self._steps - seen[load] < _STALE
            asked = ask and level == drafting
            if not asked and (known or not self._can_pay(level)):
                continue
            tokens = rows * (1 + self._accepted(level))
            if expected[level] - tokens * self._fair_s_per_token > room:
                continue
            if not best:
                self._asked_at = self._steps
                self._ask_again = min(2 * self._ask_again, _ASK_AT_LEAST_EVERY)
            self._counts["trials"] += 1
            return level
        return best

    def _other_shape(self, choices: tuple[int, ...], room: float) -> int:
        """Return a level of the other shape to try, or the best level if no trial should be made.

        A trial is made if a series of trials (`shape_trials.py`) is under way or may begin, and if
        the expected loss is at most `room`, the time that trials may still lose. If `room` is used
        up, only trials without an expected loss are made.
        """
        best = self._best
        if self._levels == LEVELS or not best or len(choices) < self._levels:
            return best
        shape, trials = 1 - self._best_shape, self._shape_trials[self._octave]
        known = self._supplies[shape]
        begins = trials.is_over(known)
        if not self._may_draft[shape] or (begins and not trials.is_due(self._steps)):
            return best
        level = 1 + shape * _CLASSES + (best - 1) % _CLASSES
        accepted = self._accepted(level)
        # A tree contains the chain with the same minimum chance, so it yields at least as much.
        if shape:
            share = self._may_draft[shape] / (self._may_draft[1 - shape] or 1.0)
            accepted = max(accepted, share * self._accepted(best))
        gained_s = self._decided_for * (1 + accepted) * self._fair_s_per_token
        if self._expected[level] - gained_s > max(room, 0.0):
            return best
        if begins:
            has_enough = known.rows >= LOOK_ROWS and trials.fresh is None
            fresh = Supply(self._calibrations[shape]) if has_enough else trials.fresh
            trials.begin(self._steps, fresh)
        trials.rows += self._decided_for * self._may_draft[shape]
        return level

    def _accepted(self, level: int) -> float:
        """Return how many draft tokens per request are expected to be accepted at a level."""
        if not level:
            return 0.0
        shape = _shape_of(level)
        accepted = self._supplies[shape].by_level().accepted[1 + (level - 1) % _CLASSES]
        return self._may_draft[shape] * accepted

    def _can_pay(self, level: int) -> bool:
        """Return whether a level is below the best one, or would pay with half its extra time."""
        best = self._best
        tokens = (1 + self._accepted(level)) / (1 + self._accepted(best))
        return level < best or tokens > (1 + self._expected[level] / self._expected[best]) / 2

    def drain(self) -> dict[str, float]:
        """Return counts of decisions, and measured and expected times, since the last call."""
        counts, self._counts = self._counts, self._no_counts()
        passed_s, lost_s = self._told_s
        self._told_s = self._passed_s, self._lost_s
        counts["decoding_s"] = self._passed_s - passed_s
        counts["trial_loss_s"] = self._lost_s - lost_s
        return {f"gate/{name}": value for name, value in counts.items()}

    def _no_counts(self) -> dict[str, float]:
        trees = ["tree_steps"] if self._levels > LEVELS else []
        return dict.fromkeys([*_COUNTED, *trees], 0)


def _shape_of(level: int) -> int:
    """Return the draft shape of a level; 0 for level 0, which drafts nothing."""
    return (level - 1) // _CLASSES if level else 0
