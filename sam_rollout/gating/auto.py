"""The gate that measures: the budget with the most tokens per second, on this engine, now.

The time of a step is the time between two calls of the proposer: with synchronous scheduling
(drafters of others leave vLLM no other) a call is made after every step, once its tokens are on the
host, so that nothing has to be waited for. It contains everything a budget costs, drafting too.
Steps that did anything but decode the same requests as the step before are left out: prompts,
requests that joined or left, steps in which the engine did not call.

Rate of a budget k: requests * (1 + expected accepted tokens) / expected step time. The budget with
the highest rate is taken. A lead of less than `_LEAD` changes nothing, and drafts have to promise
as much before they are made at all. Now and then another one is tried, where its time or its
acceptance is not known (any more). The time this loses against the best one is kept below
`exploration` of all step time; a few steps are given in advance.

Where engines decide together (``agreement.py``), times are learned from the busiest one's load, and
acceptance from one's own requests.

Nothing here is random and nothing depends on a seed: decisions follow from times alone. They are
not repeatable, as times are not; with the coupled sampler the texts do not depend on them.
"""

import numpy as np

from sam_rollout.gating.acceptance import Acceptance
from sam_rollout.gating.step import EngineStep, LoadMeter
from sam_rollout.gating.step_times import StepTimes

_LEAD = 1.01
_ADVANCE = 4  # steps that may be lost before any exploration was earned
_DECIDE_EVERY = 4  # steps, as long as nobody joins or leaves
_ENOUGH = 4  # steps after which a budget is known for a number of requests
_STALE = 512  # steps after which it has to be measured again
# Steps after which a longer draft is tried, to see whether it is accepted today: more and more of
# them while the answer changes nothing.
_ASK_AGAIN, _ASK_AT_LEAST_EVERY = 32, 128
# Learning from a step costs some 50 us where other code has emptied the caches since the last one.
# Of steps that tell nothing new one in so many is looked at; few requests tell less a step.
_LOOK_EVERY = 4
_FAMILIAR = 16  # steps after which a cell counts as such


class AutoGate:
    """Chooses budgets by measured rates; see the module.

    Args:
        max_rows: most requests in one batch.
        max_draft_tokens: largest budget.
        exploration: share of step time that trying out may lose.
    """

    def __init__(self, max_rows: int, max_draft_tokens: int, exploration: float) -> None:
        self._k = max_draft_tokens
        self._exploration = exploration
        self._times = StepTimes(max_rows, max_draft_tokens)
        self._octaves: list[Acceptance | None] = [None] * (max_rows.bit_length() + 1)
        self._octave = max_rows.bit_length()
        self._acceptance = self._octaves[self._octave] = Acceptance(max_draft_tokens)
        self._all = range(max_draft_tokens + 1)
        self._ends = (0, max_draft_tokens)
        self._expected = [0.0] * (max_draft_tokens + 1)  # seconds, of the last decision
        self._seen = [[-_STALE] * (max_draft_tokens + 1) for _ in range(self._times.bins)]
        self._steps = 0
        self._asked_at = 0  # when a longer draft than the best was tried
        self._ask_again = _ASK_AGAIN
        self._faded_at = 0
        self._last_ns = 0
        self._context = 0  # of the last step looked at
        self._unseen = self._to_skip = 0  # steps since the last look, and before the next
        self._passed_s = 0.0  # of all steps, without what interrupted them
        self._before: tuple[np.ndarray, int] = np.zeros(0, np.int32), 0  # tokens sampled, budget
        self._meter = LoadMeter()
        self._drafting_share = 1.0  # of the requests: may draft at all
        self._best = 0  # the budget chosen
        self._decided_for = 0  # requests
        self._budget = 0  # the one given, which may be a trial
        self._fair_s_per_token = 0.0  # of the budget chosen
        self._lost_s = 0.0  # by trials
        self._begin_report()

    def observe(self, step: EngineStep) -> None:
        """Learn what the step before cost and what it brought."""
        if self._to_skip and step.same_batch and step.group is None and not self.is_trial:
            self._to_skip -= 1
            self._unseen += 1
            self._skipped += 1
            self._last_ns = step.now_ns
            self._before = step.verified.sampled, self._budget
            return
        if step.group is None:
            load, budget = self._meter.load(step), self._budget
            trial = self.is_trial
        else:
            load, budget, trial = step.group
        rows, tokens, context = load.rows, load.tokens, load.context
        seconds = (step.now_ns - self._last_ns) * 1e-9
        before, self._context, self._last_ns = self._context, context, step.now_ns
        unseen, self._unseen, self._to_skip = self._unseen, 0, 0
        if unseen:
            before = context - tokens
        everybody = isinstance(step.may_draft, int)
        own_rows = max(len(step.verified.sampled), 1)
        self._drafting_share = 1.0 if everybody else float(np.add.reduce(step.may_draft)) / own_rows
        if budget and step.same_batch:  # those who join were allowed nothing
            self._learn_acceptance(budget, step)
        self._before = step.verified.sampled, budget
        expected = self._expected[budget]
        if not load.steady or before + tokens != context:
            self._left_out += 1
            self._passed_s += min(seconds, expected)
            if trial:  # not to be measured, and paid for all the same
                self._lost_s += max(0.0, expected - tokens * self._fair_s_per_token)
            return
        if trial:
            # What the best budget would have made of a pause is not the trial's fault.
            fair_s = tokens * self._fair_s_per_token
            self._lost_s += min(max(0.0, seconds - fair_s), self._k * self._expected[self._best])
        if not self._times.observe(rows, budget, load.draft_tokens, before, seconds, expected):
            self._left_out += 1
            return
        number = self._times.bin_of[rows]
        self._seen[number][budget] = self._steps
        if self._times.weight(rows, budget) >= _FAMILIAR:
            self._to_skip = min(_LOOK_EVERY - 1, rows // _LOOK_EVERY)
        steps = 1 + unseen  # that this one stands for
        self._passed_s += steps * seconds
        self._measured += 1
        self._time_s += seconds
        self._predicted_s += expected
        self._tokens += tokens
        self._tokens_of[number][budget] += steps * tokens
        batch = self._batch_of[number]
        batch[0] += steps
        batch[1] += steps * rows
        batch[2] += steps * before

    @property
    def is_trial(self) -> bool:
        """Whether the last budget is another than the best known."""
        return self._budget != self._best

    def _learn_acceptance(self, budget: int, step: EngineStep) -> None:
        sampled, drafted, accepted = step.verified[:3]
        sampled_before, budget_before = self._before
        if len(sampled_before) == len(sampled):
            going_on = sampled_before > max(budget_before, 1)
        else:
            going_on = np.zeros(len(sampled), bool)
        gained = np.where(sampled > 0, accepted + 1, 0)
        if not isinstance(step.may_draft, int):
            gained *= step.may_draft  # who gets no drafts tells nothing about them
        self._acceptance.observe(budget, drafted, gained, going_on)

    def budget(self, rows: int, *, whole: bool = False) -> int:
        """The budget with the highest expected rate, or one that has to be tried."""
        self._steps += 1
        self._budget = self._decide(rows, self._ends if whole else self._all) if rows else 0
        self._chosen[self._budget] += 1
        if self._budget:
            self._faded_at = self._steps
        elif self._steps - self._faded_at >= _ASK_AGAIN:
            self._acceptance.fade(self._steps - self._faded_at)
            self._faded_at = self._steps
        return self._budget

    def _decide(self, rows: int, choices: range | tuple[int, ...]) -> int:
        if rows == self._decided_for and self._steps % _DECIDE_EVERY:
            return self._best
        if rows.bit_length() != self._octave:
            self._enter(rows.bit_length())
        if not self._times.ready:
            self._best = 0
            return 0
        self._decided_for = rows
        share, expected, gains = self._drafting_share, self._expected, self._acceptance.gains
        fill = share * rows * self._acceptance.fill
        self._times.expect(rows, self._context, fill, expected)
        best, best_rate, drafting, drafting_rate = 0, 0.0, 0, 0.0
        for k in choices if share else (0,):
            rate = (1 + share * gains[k]) / expected[k]
            if k and rate > drafting_rate:
                drafting, drafting_rate = k, rate
            if k == 0:
                rate *= _LEAD
            if k == self._best:
                rate *= _LEAD
            if rate > best_rate:
                best, best_rate = k, rate
        if best != self._best:
            self._ask_again = _ASK_AGAIN
        self._best = best
        self._fair_s_per_token = expected[best] / (rows * (1 + share * gains[best]))
        return self._trial(rows, drafting, choices) if share else best

    def _enter(self, octave: int) -> None:
        """Change to what is accepted with about so many requests."""
        known = self._octaves[octave]
        if known is None:
            known = self._octaves[octave] = self._acceptance.heir()
        self._acceptance, self._octave = known, octave

    def _trial(self, rows: int, drafting: int, choices: range | tuple[int, ...]) -> int:
        """A budget about which too little is known, if its trial is affordable; or the best."""
        best = self._best
        room = self._exploration * self._passed_s + _ADVANCE * self._expected[best] - self._lost_s
        if room <= 0:
            return best
        seen = self._seen[self._times.bin_of[rows]]
        rival = 0 if best else drafting
        ask = self._steps - self._asked_at >= self._ask_again
        for k in (rival, best + 1, best - 1):
            if k not in choices:
                continue
            known = self._times.weight(rows, k) >= _ENOUGH and self._steps - seen[k] < _STALE
            asked = k > best and ask and (k == rival or self._acceptance.is_vague(k))
            if not asked and (known or not self._can_pay(k)):
                continue
            tokens = rows * (1 + self._drafting_share * self._acceptance.gains[k])
            loss = self._expected[k] - tokens * self._fair_s_per_token
            if loss <= room:
                if k > best:
                    self._asked_at = self._steps
                    self._ask_again = min(2 * self._ask_again, _ASK_AT_LEAST_EVERY)
                self._trials += 1
                return k
        return best

    def _can_pay(self, k: int) -> bool:
        """Whether k could replace the best if what it costs more were half of what is expected."""
        share, gains, best = self._drafting_share, self._acceptance.gains, self._best
        tokens = (1 + share * gains[k]) / (1 + share * gains[best])
        return k < best or tokens > (1 + self._expected[k] / self._expected[best]) / 2

    def drain(self) -> dict[str, float]:
        """What was decided since the last call, and how good that was by what is known now."""
        regret_s, compared_s = self._regret()
        report: dict[str, float] = {
            **{f"gate/steps_with_k_{k}": steps for k, steps in enumerate(self._chosen)},
            "gate/trials": self._trials,
            "gate/measured_steps": self._measured,
            "gate/left_out_steps": self._left_out,
            "gate/skipped_steps": self._skipped,
            "gate/decoding_s": self._passed_s - self._passed_before_s,
            "gate/measured_s": self._time_s,
            "gate/predicted_s": self._predicted_s,
            "gate/measured_tokens": self._tokens,
            "gate/trial_loss_s": self._lost_s - self._lost_before_s,
            "gate/regret_s": regret_s,
            "gate/compared_s": compared_s,
        }
        self._begin_report()
        return report

    def _begin_report(self) -> None:
        """Count from here on."""
        self._chosen = [0] * (self._k + 1)
        self._trials = self._left_out = self._measured = self._skipped = self._tokens = 0
        self._time_s = self._predicted_s = 0.0
        self._passed_before_s, self._lost_before_s = self._passed_s, self._lost_s
        # Tokens by number of requests and budget, and the steps' requests and context.
        self._tokens_of = [[0] * (self._k + 1) for _ in range(self._times.bins)]
        self._batch_of = [[0, 0, 0] for _ in range(self._times.bins)]  # steps, requests, context

    def _regret(self) -> tuple[float, float]:
        """Time lost against the best fixed threshold and budget, and all time, by the final model.

        Both sides are expectations for the tokens that were made, by number of requests.
        """
        if not any(steps for steps, _, _ in self._batch_of):
            return 0.0, 0.0
        expected = [0.0] * (self._k + 1)
        # [requests, budget]: seconds that the tokens of a number of requests would take.
        would_s, did_s = [], 0.0
        for tokens, (steps, rows, context) in zip(self._tokens_of, self._batch_of, strict=True):
            if not steps:
                continue
            mean = round(rows / steps)
            acceptance = self._octaves[mean.bit_length()] or self._acceptance
            gains = 1 + np.array(acceptance.gains)
            self._times.expect(mean, context / steps, mean * acceptance.fill, expected)
            s_per_token = np.array(expected) / (mean * gains)
            would_s.append(sum(tokens) * s_per_token)
            did_s += float(np.dot(tokens, s_per_token))
        would = np.array(would_s)
        closed_above = would[::-1, :1].cumsum(axis=0)[::-1] - would[:, :1]
        best_s = min(float((would.cumsum(axis=0) + closed_above).min()), float(would[:, 0].sum()))
        return max(0.0, did_s - best_s), did_s
