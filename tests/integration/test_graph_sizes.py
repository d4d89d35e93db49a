"""The graphs that presets capture, in the eyes of vLLM's own dispatcher."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from sam_rollout.core.limits import Limits
from sam_rollout.integrations.verl.graphs import capture_sizes, filled_up_requests
from sam_rollout.integrations.verl.run_config import read_run_config
from sam_rollout.integrations.vllm.drafting.proposer import SamProposer
from sam_rollout.session.padding import Padding, padding_by_rows
from tests.unit.test_configs import composed


@pytest.mark.parametrize("name", ["article_32b_graph", "reference_script_235b_grpo"])
def test_the_presets_graphs_hold_every_filled_up_step(name):
    """vLLM's own dispatcher agrees with what the launcher reckons before there is an engine."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    config = composed(f"experiment={name}", "sam=matched")
    sam = read_run_config(config).sam
    rollout, k = config.actor_rollout_ref.rollout, sam.max_draft_tokens
    sizes = capture_sizes(config, sam)
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1],
        compile_sizes=[],
    )
    dispatcher = CudagraphDispatcher(
        SimpleNamespace(
            compilation_config=compilation,
            num_speculative_tokens=k,
            lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=rollout.max_num_seqs),
        )
    )
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 1 + k)
    proposer = SimpleNamespace(_runner=SimpleNamespace(cudagraph_dispatcher=dispatcher))
    graph_of = partial(SamProposer._graph_of, proposer)
    limits = Limits(rollout.max_num_seqs, 1, max_batched_tokens=rollout.max_num_batched_tokens, k=k)
    by_rows = padding_by_rows("auto", graph_of, limits)
    assert (by_rows[1:] == Padding.EVERY_STEP).all()
    assert filled_up_requests(config, sam) == rollout.max_num_seqs
