"""Makes verify steps of vllm-ascend by hand."""

from collections.abc import Callable

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState

NO_TOKEN = -1


def same_draft_for_all(drafts: list[int], batch: int) -> SpecDecodeMetadata:
    count = len(drafts)
    rows = torch.arange(batch * (count + 1), dtype=torch.int32).view(batch, count + 1)
    cumulative = torch.arange(1, batch + 1, dtype=torch.int32)
    return SpecDecodeMetadata(
        draft_token_ids=torch.tensor(drafts, dtype=torch.int32).repeat(batch),
        num_draft_tokens=[count] * batch,
        cu_num_draft_tokens=cumulative * count,
        cu_num_sampled_tokens=cumulative * (count + 1),
        target_logits_indices=rows[:, :-1].flatten(),
        bonus_logits_indices=rows[:, -1].clone(),
        logits_indices=rows.flatten(),
    )


def sampling_metadata(
    batch: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> SamplingMetadata:
    empty = torch.empty(0)
    return SamplingMetadata(
        temperature=torch.full((batch,), temperature),
        all_greedy=False,
        all_random=True,
        top_p=None if top_p is None else torch.full((batch,), top_p),
        top_k=None if top_k is None else torch.full((batch,), top_k, dtype=torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=empty,
        presence_penalties=empty,
        repetition_penalties=empty,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


class ToyEngine:
    """Generates texts with a real model runner's batch and samplers; a function replaces the model.

    ``runner`` is vllm-ascend's model runner without a model. ``model`` maps a text to the logits
    of the next token, float32 [vocabulary].
    """

    def __init__(self, runner, model: Callable[[list[int]], torch.Tensor]) -> None:
        self.runner, self.model = runner, model
        self.texts: list[list[int]] = []
        self._requests: list[CachedRequestState] = []

    def add(self, prompt: list[int], params: SamplingParams) -> None:
        request = CachedRequestState(
            req_id=f"request-{len(self.texts)}",
            prompt_token_ids=list(prompt),
            mm_features=[],
            sampling_params=params,
            generator=None,
            block_ids=([len(self.texts) + 1],),
            num_computed_tokens=len(prompt),
            output_token_ids=[],
        )
        self.runner.requests[request.req_id] = request
        self.runner.input_batch.add_request(request)
        self.runner.input_batch.refresh_metadata()
        self.texts.append(list(prompt))
        self._requests.append(request)

    def step(self, drafts: list[list[int]]) -> SamplerOutput:
        """Schedule each request's last token and its drafts, and let the runner sample."""
        runner = self.runner
        counts = np.array([len(some) for some in drafts], dtype=np.int32)
        scheduled = counts + 1
        ends = np.cumsum(scheduled, dtype=np.int32)
        ids, positions, logits = [], [], []
        for text, some in zip(self.texts, drafts, strict=True):
            for place in range(len(some) + 1):
                seen = text + some[:place]
                ids.append(seen[-1])
                positions.append(len(seen) - 1)
                logits.append(self.model(seen))
        runner.input_ids.gpu[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        runner.positions[: len(ids)] = torch.tensor(positions)
        runner.query_start_loc.gpu[1 : len(ends) + 1] = torch.from_numpy(ends)
        metadata = None
        if counts.any():
            metadata = runner._calc_spec_decode_metadata(counts, ends, None)
        output = runner._sample(torch.stack(logits), metadata)
        rows = output.sampled_token_ids.tolist()
        for text, request, row in zip(self.texts, self._requests, rows, strict=True):
            new = [token for token in row if token != NO_TOKEN]
            text += new
            request.output_token_ids += new
        return output
