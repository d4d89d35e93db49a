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

Where the engine schedules a step ahead, nobody waits for what is proposed. It is copied to the host
in the stream that made it, before the copy of what was sampled begins, and so is there when that
is: `late_binding.py`, which waits for the sampled tokens, hands both to the session.

A draft token is the likeliest one, or (`sampled`) drawn with the noise that will draw the token of
its position: the nearer the drafter is to the target, the more often both draw the same. Either way
verification takes the token as it is: which of several drafts a row follows depends on all of them,
so that no distribution could be told for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from sam_rollout.integrations.vllm.sampling.samplers import shared_noise
from sam_rollout.sources.model import IN_ONE_GO, ModelSourceConfig

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 128


class Made(NamedTuple):
    """What was proposed in a step of B rows.

    Attributes:
        tokens: [B, passes], -1 where a draft has ended.
        chances: [B, passes], of the tokens; None where the drafter does not tell.
    """

    tokens: torch.Tensor
    chances: torch.Tensor | None


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
            whose drafts nobody reads, and where the engine schedules a step ahead.
        ahead: whether it does, and drafts are read here: `launched` and `arrived` are called.

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
        ahead: bool = False,
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
        self._drafted, self._ahead = drafted, ahead
        self._made: Made | None = None
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
        if made is None:
            return None
        chances = None if made.chances is None else made.chances.cpu().numpy()
        return made.tokens.cpu().numpy().astype(np.int32), chances

    def launched(self) -> Made | None:
        """Hand over what the step under way proposed: it is on its way to the host."""
        made, self._made = self._made, None
        return made

    def arrived(
        self,
        made: Made | None,
        request_ids: list[str],
        sampled: np.ndarray,
        rows: np.ndarray | None,
        count: int,
    ) -> None:
        """What a step proposed and sampled is on the host; `take` has it from now on.

        Args:
            made: what `launched` returned then.
            request_ids: B ids in the step's row order.
            sampled: int32[B], first token that each row sampled; -1 for none.
            rows: int[B], place of each in the batch of now, -1 where it has left; None where
                nothing has changed.
            count: rows of that batch.
        """
        if self.is_probed:
            self._judge(request_ids, sampled.tolist(), made)
        if made is not None and rows is not None:
            stays = rows >= 0
            before = np.full(count, -1)
            before[rows[stays]] = np.flatnonzero(stays)
            tokens = made.tokens[before]
            tokens[before < 0] = -1
            made = Made(tokens, None if made.chances is None else made.chances[before])
        self._made = made

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

    def _judge(self, request_ids: list[str], sampled: list[int], made: Made | None) -> None:
        """Compare each row's first sampled token with what it was told before; note what it is now.

        Args:
            request_ids: B ids in row order.
            sampled: first tokens, -1 where a row sampled none.
            made: in this step.
        """
        for request_id, token in zip(request_ids, sampled, strict=True):
            told = self._told.pop(request_id, None)
            if token >= 0 and told is not None:
                self._judged += 1
                self._right += token == told
        if made is not None:
            firsts = made.tokens[:, 0].tolist()
            pairs = zip(request_ids, firsts, strict=False)
            self._told |= {request_id: token for request_id, token in pairs if token >= 0}

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
            self._made = self._collect(self._ask(*args, **kwargs))
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

    def _collect(self, tokens: Any) -> Made | None:
        """What was proposed, and how likely it is; None for nothing."""
        chances, self._chances = self._chances, []
        if isinstance(tokens, list):
            drafts = np.full((len(tokens), max(map(len, tokens), default=0)), -1)
            for row, draft in enumerate(tokens):
                drafts[row, : len(draft)] = draft
            tokens = torch.from_numpy(drafts)
        tokens = tokens[:, : self._most]
        width = tokens.shape[1]
        if not width:
            return None
        told = torch.stack(chances[:width], dim=1) if len(chances) >= width else None
        if self._ahead:
            tokens, told = _to_host(tokens), None if told is None else _to_host(told)
        return Made(tokens, told)

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
                firsts = [tokens[0] if tokens else -1 for tokens in output.sampled_token_ids]
                self._judge(output.req_ids, firsts, self._made)
            self._drafted(output.sampled_token_ids)
        return output


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is there when what was launched before it has ended."""
    return tensor.to("cpu", non_blocking=True)
