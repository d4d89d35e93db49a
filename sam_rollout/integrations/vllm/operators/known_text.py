"""Makes an engine decode known texts, and keeps the model's scores of their tokens.

The drafts are the next tokens of the known text. Before sampling, every position's logits are
replaced: the known token's logit by 0, all others by minus infinity. So no draft token is rejected.
"""

from collections.abc import Sequence
from typing import Any

import torch

from sam_rollout.integrations.vllm.drafting.proposer import SamProposer
from sam_rollout.integrations.vllm.worker import SamWorkerExtension

EXTRA_ARGS_KEY = "sam_known_text"


def known_text_arguments(
    number: int, token_ids: Sequence[int], draft_tokens: int
) -> dict[str, dict[str, Any]]:
    """Return ``SamplingParams.extra_args`` of a request whose output shall be ``token_ids``.

    ``number`` is the text's key in the result of ``known_text_drain``. If ``draft_tokens`` is 0,
    the text is decoded without drafts.
    """
    known = {"number": number, "token_ids": list(token_ids), "draft_tokens": draft_tokens}
    return {EXTRA_ARGS_KEY: known}


def _known_text_of(request: Any) -> dict[str, Any]:
    return request.sampling_params.extra_args[EXTRA_ARGS_KEY]


class KnownTextProposer(SamProposer):
    """Drafts the known text."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        *_args: Any,
        **_kwargs: Any,
    ) -> list[list[int]]:
        if self.session is None:
            return [[]] * len(sampled_token_ids)
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            request = self._runner.requests[self._runner.input_batch.req_ids[row]]
            known = _known_text_of(request)
            done = int(num_tokens_no_spec[row]) - request.num_prompt_tokens
            end = done + known["draft_tokens"]
            drafts.append(known["token_ids"][done:end] if sampled else [])
        return drafts


class KnownTextExtension(SamWorkerExtension):
    """Adds two methods to the worker: one begins a check with known texts, one returns scores."""

    def known_text_install(self) -> None:
        """Wrap the runner's sampling; from then on, every request needs a known text."""
        runner = self.model_runner
        self._scores: dict[int, dict[str, list]] = {}
        sample = runner._sample

        def led(logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
            if logits is not None:  # some ranks may have no logits
                drafted = [0] * len(runner.input_batch.req_ids)
                if spec_decode_metadata is not None:
                    drafted = list(spec_decode_metadata.num_draft_tokens)
                requests = [runner.requests[name] for name in runner.input_batch.req_ids]
                _lead(logits, requests, [count + 1 for count in drafted], self._scores)
            return sample(logits, spec_decode_metadata)

        runner._sample = led

    def known_text_drain(self) -> dict[int, dict[str, list]]:
        """Return the scores, and forget them: text number -> column -> one value for each token.

        The columns are ``logprobs`` (natural logarithm of the known token's probability), ``top``
        (the likeliest token) and ``widths`` (number of positions that the step scored for the
        request; 0 if the token was never scored).
        """
        drained, self._scores = self._scores, {}
        return drained


def _lead(
    logits: torch.Tensor, requests: Sequence[Any], widths: Sequence[int], scores: dict[int, dict]
) -> None:
    """Store the score of each position's known token; change logits to allow only that token.

    ``logits``, [rows, vocabulary], has ``widths[i]`` rows for request i, in the requests' order.
    """
    if sum(widths) != logits.shape[0]:
        raise RuntimeError(
            f"{sum(widths)} scored positions expected, {logits.shape[0]} rows of logits found"
        )
    rows: list[int] = []
    tokens: list[int] = []
    places: list[tuple[dict[str, list], int, int]] = []  # columns, position, width
    first = 0
    for request, width in zip(requests, widths, strict=True):
        known = _known_text_of(request)
        text, done = known["token_ids"], len(request.output_token_ids)
        ahead = text[done : done + width]  # shorter at the end of the text
        columns = scores.setdefault(
            known["number"],
            {"logprobs": [0.0] * len(text), "top": [-1] * len(text), "widths": [0] * len(text)},
        )
        rows += range(first, first + len(ahead))
        tokens += ahead
        places += [(columns, done + offset, width) for offset in range(len(ahead))]
        first += width
    row = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    token = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    # vLLM computes its raw log-probabilities in the same way.
    logprobs = logits[row].log_softmax(dim=-1, dtype=torch.float32)
    # vLLM uses `topk`, too; argmax may choose another one of several equally likely tokens.
    top = logprobs.topk(1, dim=-1).indices.squeeze(1).tolist()
    values = logprobs.gather(1, token.unsqueeze(1)).squeeze(1).tolist()
    # If a long prompt is computed in chunks, every chunk writes a score for the known text's first
    # token. The last chunk's score is right, and replaces the earlier scores.
    for (columns, position, width), value, likeliest in zip(places, values, top, strict=True):
        columns["logprobs"][position] = value
        columns["top"][position] = likeliest
        columns["widths"][position] = width
    logits[row] = float("-inf")
    logits[row, token] = 0.0
