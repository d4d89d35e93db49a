"""Turns a draft model, which vLLM runs, into one of the session's sources of drafts.

vLLM loads the draft model and runs its passes; we wrap the runner's method that calls the model.
The first pass runs over every token of a step, so the model's cache is complete, even if another
source made the drafts. With a closed gate only the first pass runs. The number of passes is sent
with each step's schedule (`drafts_with_output.py`), so every rank runs the same number.

A draft token is drawn with the noise with which the sampler will draw the token at the same
position. It is the draft model's likeliest token if the setting `sampled` is off, if the sampler is
not `coupled`, or if the method makes a whole draft in one pass. In all cases verification gets no
probabilities of draft tokens, because a draft may come from several sources.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from sam_rollout.integrations.vllm.sampling.samplers import DRAFT_ROWS_AT_ONCE, shared_noise
from sam_rollout.integrations.vllm.wrapping import Wrapper
from sam_rollout.sources.model import BY_PASSES, IN_ONE_GO, ModelSourceConfig

logger = logging.getLogger(__name__)


class Made(NamedTuple):
    """The drafter's proposals in a step of B rows."""

    tokens: torch.Tensor  # [B, passes], -1 where a draft has ended
    chances: torch.Tensor | None  # [B, passes], the drafter's probabilities of the tokens


class EngineDrafter(Wrapper):
    """Wraps a runner's calls of vLLM's own drafter; each rank of an engine has one wrapper.

    Args:
        passes: largest number of passes in a step, the same for engines in lockstep.
        alone: true if the drafter runs in this process only. If other processes take part in its
            passes, a failure of the drafter ends the engine.
        drafted: called after every step with the step's sampled tokens by row; None on ranks whose
            drafts are not read, and with asynchronous scheduling.
        ahead: whether the caller calls `launched` and `arrived` (asynchronous scheduling).
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
        super().__init__()
        self.failed = False
        self._failures, self._spent_s = 0, 0.0  # counted since the last `take_counters`
        self.is_probed = False
        self._told: dict[str, int] = {}  # first draft token by request
        self._judged = self._right = 0
        self._runner = runner
        self._most, self._passes, self._alone = config.max_tokens, passes, alone
        # Methods in IN_ONE_GO draft all tokens in one pass.
        self._whole = config.method in IN_ONE_GO
        self._drafted, self._ahead = drafted, ahead
        self._made: Made | None = None
        self._chances: list[torch.Tensor] = []
        self._propose = self.replace(runner, "propose_draft_token_ids", self._keep)
        self._sample_tokens = self.replace(runner, "sample_tokens", self._sample)
        draws = config.sampled and config.method in BY_PASSES
        self._noise = shared_noise(runner) if draws else None
        self._sampling: Any = None  # vLLM's metadata of the step
        self._position = torch.zeros(0)  # position of the next draft token in each text
        self._likeliest: Any = None  # the drafter's method that `_choose` replaces
        self._wrap_choice()

    def take(self) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Return this step's proposals for `Source.receive`; None if there are none."""
        made = self.launched()
        if made is None:
            return None
        chances = None if made.chances is None else made.chances.cpu().numpy()
        return made.tokens.cpu().numpy().astype(np.int32), chances

    def launched(self) -> Made | None:
        """Return the launched step's proposals, which may not have reached the host yet."""
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
        """Keep a step's proposals for `take`, now that they have reached the host.

        Args:
            made: what `launched` returned for the step.
            request_ids: B ids in the step's row order.
            sampled: int32[B], the first token that each row sampled; -1 if a row sampled none.
            rows: int[B], each row's index in the present batch, -1 if its request has left the
                batch; None if the batch has not changed.
            count: number of rows of the present batch.
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
        """Return metrics since the last call: failures and host time.

        The metrics' names do not have the prefix `sam/`.
        """
        counters = {"draft/model_failures": self._failures, "draft/model_s": self._spent_s}
        self._failures, self._spent_s = 0, 0.0
        return counters

    def probe(self, begin: bool) -> tuple[int, int]:
        """Begin or end a comparison of the drafter's first tokens with the sampled tokens.

        Returns how many first draft tokens were compared so far, and how many were right.
        """
        self.is_probed = begin and not self.failed
        if begin:
            self._judged, self._right, self._told = 0, 0, {}
        return self._judged, self._right

    def _judge(self, request_ids: list[str], sampled: list[int], made: Made | None) -> None:
        """Compare each request's first sampled token with its first draft token.

        The draft token comes from an earlier step; this step's drafts are kept for the next call.
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

    def _wrap_choice(self) -> None:
        if hasattr(self._runner.drafter, "_greedy_sample"):
            self._likeliest = self.replace(self._runner.drafter, "_greedy_sample", self._choose)

    def _keep(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Run the drafter and keep its proposals; vLLM's scheduler gets none."""
        self._made, self._chances = None, []
        if self.failed:
            return []
        started_s = time.perf_counter()
        try:
            self._made = self._collect(self._ask(*args, **kwargs))
        except Exception:
            if not self._alone:
                raise
            self.failed, self._failures = True, 1
            logger.warning(
                "The draft model failed and is not run any more; the rollout continues with drafts "
                "from texts.",
                exc_info=True,
            )
        self._spent_s += time.perf_counter() - started_s
        return []

    def _collect(self, tokens: Any) -> Made | None:
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
        """Compute the text positions of the first draft tokens."""
        if self._noise is None:
            return
        runner, self._sampling = self._runner, sampling
        if isinstance(sampled, list):
            counts = torch.tensor([len(tokens) for tokens in sampled])
        else:
            counts = ((sampled >= 0) & (sampled < runner.input_batch.vocab_size)).sum(dim=1)
        # `last` becomes the index of the last scheduled token before each row's draft tokens.
        last = runner.query_start_loc.gpu[1 : len(counts) + 1] - 1
        if metadata is not None:
            drafts = metadata.cu_num_draft_tokens.diff(prepend=last.new_zeros(1))
            last = last - drafts
        self._position = runner.positions[last] + counts.to(last.device) + 1

    def _choose(self, hidden_states: torch.Tensor) -> torch.Tensor:
        drafter = self._runner.drafter
        ways = ("use_local_argmax_reduction", "use_heterogeneous_vocab")
        if any(getattr(drafter, way, False) for way in ways):
            return self._likeliest(hidden_states)
        return self._pick(drafter.model.compute_logits(hidden_states))

    def _pick(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose a token for each row of logits, [requests, vocabulary]; store its probability."""
        if self._noise is None:
            tokens = logits.argmax(dim=-1)
        else:
            tokens = self._noise.draw_drafts(logits, self._sampling, self._position)
            self._position = self._position + 1
        scores = logits.gather(1, tokens.unsqueeze(1)).squeeze(1).float()
        pieces = logits.split(DRAFT_ROWS_AT_ONCE)
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
    """Start a copy to the host; later work of the stream begins after the copy has ended."""
    return tensor.to("cpu", non_blocking=True)
