"""Drafts of a model, which vLLM makes, for a session that chooses between them and texts.

vLLM runs the drafter: it loads it, gives it the target's hidden states, keeps its cache, captures
its graphs. Once per step it asks its runner to propose. That method is wrapped: what is proposed is
kept for the session, as one source among others, and what the session hands out is what the next
step verifies. The drafter's first pass runs over every token of the step with the target's true
hidden states, so that its cache does not depend on whose drafts were verified.

How many passes a step has travels with its schedule, the same for every rank of an engine
(`drafts_with_output.py`): as many as the source may draft, or the first one alone where the gate is
closed, which keeps the cache right. A drafter that fails is not asked again; drafts from texts go
on. Where several processes run it together, it ends the engine instead.

A draft token is the likeliest one, or (`sampled`) drawn with the noise that will draw the token of
its position: the nearer the drafter is to the target, the more often both draw the same. Either way
verification takes the token as it is: which of several drafts a row follows depends on all of them,
so that no distribution could be told for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sam_rollout.integrations.vllm.sampling import shared_noise
from sam_rollout.sources.model import IN_ONE_GO, ModelSourceConfig

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 128


class EngineDrafter:
    """Stands between a runner and its drafter; one per rank of an engine.

    Args:
        runner: vLLM's, with a drafter of vLLM's; `propose_draft_token_ids` and `sample_tokens` are
            wrapped, and the drafter's choice of likeliest tokens.
        config: of the source.
        passes: most passes of a step; those of engines that step together are the same.
        alone: whether no other process takes part in its passes. A drafter that fails then costs
            its drafts alone; with others it ends the engine.
        drafted: is called after every step with the tokens sampled in it, by row; None on ranks
            whose drafts nobody reads.

    Attributes:
        failed: whether the drafter did; it is asked no more.
        is_probed: drafts are asked for whatever the gate says, and compared with what is sampled.
    """

    def __init__(
        self,
        runner: Any,
        config: ModelSourceConfig,
        passes: int,
        alone: bool,
        drafted: Callable[[list[list[int]]], None] | None,
    ) -> None:
        self.failed = False
        self._failures, self._spent_s = 0, 0.0  # not told yet
        self.is_probed = False
        self._told: dict[str, int] = {}  # first draft token by request, while it is probed
        self._judged = self._right = 0
        self._runner = runner
        self._most, self._passes, self._alone = config.max_tokens, passes, alone
        # These draft in one go, and refuse any other number than the engine's.
        self._whole = config.method in IN_ONE_GO
        self._drafted = drafted
        self._made: Any = None
        self._chances: list[torch.Tensor] = []
        self._propose = runner.propose_draft_token_ids
        self._sample_tokens = runner.sample_tokens
        runner.propose_draft_token_ids = self._keep
        runner.sample_tokens = self._sample
        self._noise = shared_noise(runner) if config.sampled else None
        self._sampling: Any = None  # vLLM's metadata of the step
        self._position = torch.zeros(0)  # of the next draft token in each text
        self._likeliest: Any = None  # the drafter's own choice, where it is wrapped
        self._wrap_choice()

    def detach(self) -> None:
        """Give runner and drafter their methods back."""
        for name in ("propose_draft_token_ids", "sample_tokens"):
            self._runner.__dict__.pop(name, None)
        self._runner.drafter.__dict__.pop("_greedy_sample", None)

    def take(self) -> tuple[np.ndarray, np.ndarray | None] | None:
        """What was proposed in this step, as `Source.receive` takes it; None for nothing."""
        made, self._made = self._made, None
        chances, self._chances = self._chances, []
        if made is None:
            return None
        if isinstance(made, list):
            tokens = np.full((len(made), max(map(len, made), default=0)), -1, np.int32)
            for row, draft in enumerate(made):
                tokens[row, : len(draft)] = draft
        else:
            tokens = made.cpu().numpy().astype(np.int32)
        tokens = tokens[:, : self._most]
        if not tokens.shape[1]:
            return None
        if len(chances) < tokens.shape[1]:
            return tokens, None
        return tokens, torch.stack(chances[: tokens.shape[1]], dim=1).cpu().numpy()

    def take_counters(self) -> dict[str, float]:
        """What it cost since the last call, by metric without `sam/`."""
        counters = {"draft/model_failures": self._failures, "draft/model_s": self._spent_s}
        self._failures, self._spent_s = 0, 0.0
        return counters

    def begin_probe(self) -> None:
        """Compare the drafter's first tokens with what is sampled from now on."""
        self.is_probed = not self.failed
        self._judged = self._right = 0
        self._told = {}

    def end_probe(self) -> tuple[int, int]:
        """First tokens of drafts that were judged since, and how many of them were right."""
        self.is_probed = False
        return self._judged, self._right

    def _judge(self, request_ids: list[str], sampled_token_ids: list[list[int]]) -> None:
        for request_id, sampled in zip(request_ids, sampled_token_ids, strict=True):
            told = self._told.pop(request_id, None)
            if sampled and told is not None:
                self._judged += 1
                self._right += sampled[0] == told
        if self._made is not None:
            for request_id, draft in zip(request_ids, self._made, strict=False):
                if len(draft):
                    self._told[request_id] = int(draft[0])

    # --- wrapped around runner and drafter ------------------------------------------------------

    def _wrap_choice(self) -> None:
        """Have drafters that choose tokens by a method of their own choose by ours."""
        self._likeliest = getattr(self._runner.drafter, "_greedy_sample", None)
        if self._likeliest is not None:
            self._runner.drafter._greedy_sample = self._choose

    def _keep(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Have the drafter propose; nothing is left for vLLM to hand to its scheduler."""
        self._made, self._chances = None, []
        if self.failed:
            return []
        started_s = time.perf_counter()
        try:
            self._made = self._ask(*args, **kwargs)
        except Exception:
            if not self._alone:
                raise  # others wait for its passes: they would hang, or take the next ones for them
            self.failed, self._failures = True, 1
            logger.warning(
                "The model that drafts failed and is not asked any more; the rollout continues "
                "with drafts from texts.",
                exc_info=True,
            )
        self._spent_s += time.perf_counter() - started_s
        return []

    def _ask(self, *args: Any, **kwargs: Any) -> Any:
        """Have the drafter propose, with as many passes as the step shall have."""
        scheduler_output, sampled, sampling, _hidden, _sample_hidden, _aux, metadata, *_ = args
        self._find_positions(sampled, sampling, metadata)
        asked = scheduler_output.num_spec_tokens_to_schedule
        scheduler_output.num_spec_tokens_to_schedule = (
            self._runner.num_spec_tokens if self._whole else min(asked, self._passes)
        )
        try:
            return self._propose(*args, **kwargs)
        finally:
            scheduler_output.num_spec_tokens_to_schedule = asked

    def _find_positions(self, sampled: Any, sampling: Any, metadata: Any) -> None:
        """Where in their texts the first draft tokens will stand: behind what was sampled."""
        if self._noise is None:
            return
        runner, self._sampling = self._runner, sampling
        if isinstance(sampled, list):
            counts = torch.tensor([len(tokens) for tokens in sampled])
        else:
            counts = ((sampled >= 0) & (sampled < runner.input_batch.vocab_size)).sum(dim=1)
        # The last scheduled token that is no draft; what is sampled after it comes next.
        last = runner.query_start_loc.gpu[1 : len(counts) + 1] - 1
        if metadata is not None:
            drafts = metadata.cu_num_draft_tokens.diff(prepend=last.new_zeros(1))
            last = last - drafts
        self._position = runner.positions[last] + counts.to(last.device) + 1

    def _choose(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """A token for each row, in place of vLLM's; its probability is kept."""
        drafter = self._runner.drafter
        ways = ("use_local_argmax_reduction", "use_heterogeneous_vocab")
        if any(getattr(drafter, way, False) for way in ways):
            return self._likeliest(hidden_states)
        return self._pick(drafter.model.compute_logits(hidden_states))

    def _pick(self, logits: torch.Tensor) -> torch.Tensor:
        """A token for each row of [requests, vocabulary]; its probability is kept."""
        if self._noise is None:
            tokens = logits.argmax(dim=-1)
        else:
            copied = logits.to(torch.float32, copy=True)
            tokens = self._noise.draw_drafts(copied, self._sampling, self._position)
            self._position = self._position + 1
        # In pieces: the engine has not reckoned with a second vocabulary of floats for each row.
        scores = logits.gather(1, tokens.unsqueeze(1)).squeeze(1).float()
        pieces = logits.split(_ROWS_AT_ONCE)
        sums = torch.cat([piece.float().logsumexp(dim=-1) for piece in pieces])
        self._chances.append((scores - sums).exp())
        return tokens

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        computed = self._runner.execute_model_state is not None
        output = self._sample_tokens(*args, **kwargs)
        if computed and self._drafted is not None:
            if self.is_probed:
                self._judge(output.req_ids, output.sampled_token_ids)
            self._drafted(output.sampled_token_ids)
        return output
