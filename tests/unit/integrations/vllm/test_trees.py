from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sam_rollout.core.limits import Limits
from sam_rollout.drafting.in_flight import DraftBatch
from sam_rollout.integrations.vllm.trees.cpu_attention import _paths
from sam_rollout.integrations.vllm.trees.drafter_inputs import DrafterInputs
from sam_rollout.integrations.vllm.trees.step_trees import TreeKeeper


@st.composite
def parents_of_nodes(draw):
    count = draw(st.integers(1, 12))
    return np.array([0] + [draw(st.integers(0, node)) for node in range(1, count)], np.int32)


@given(parents_of_nodes())
def test_each_node_is_new_on_one_path_from_the_root(parents):
    found = _paths(parents)
    new = [node for path, count in found for node in path[-count:]]
    assert sorted(new) == list(range(1, len(parents) + 1))
    for path, count in found:
        assert count > 0
        assert [int(parents[node - 1]) for node in path] == [0, *path[:-1]]
    path, count = found[0]
    assert path == list(range(1, count + 1)), "the first path stays where it is"


def step_of(parents_by_row, counts, known=(10, 20)):
    rows, k = len(counts), max(map(len, parents_by_row))
    names = [f"request {row}" for row in range(rows)]
    ends = np.cumsum(np.array(counts) + 1).astype(np.int32)
    positions = [torch.arange(at, at + count + 1) for at, count in zip(known, counts, strict=True)]
    ids = torch.arange(100, 100 + int(ends[-1]), dtype=torch.int32)
    runner = SimpleNamespace(
        requests=dict.fromkeys(names),
        device=torch.device("cpu"),
        positions=torch.cat(positions),
        input_ids=SimpleNamespace(gpu=ids),
        query_start_loc=SimpleNamespace(np=np.array([0, *ends], np.int32)),
        input_batch=SimpleNamespace(req_ids=names),
        _prepare_inputs=lambda *_: "prepared",
        propose_draft_token_ids=lambda *arguments: arguments,
    )
    keeper = TreeKeeper(runner)
    batch = DraftBatch(Limits(rows, 100, k=k))
    batch.has_trees = True
    for row, parents in enumerate(parents_by_row):
        batch.parents[row, : len(parents)] = parents
    keeper.keep(names, batch)
    drafts = {name: [7] * count for name, count in zip(names, counts, strict=True) if count}
    output = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    assert runner._prepare_inputs(output, None) == "prepared"
    return runner, keeper


BRANCHES, CHAIN = [-1, 0, 0, 2], [-1, 0, 1, 2]


def test_tokens_of_a_tree_stand_as_deep_in_the_text_as_in_the_tree():
    runner, keeper = step_of([BRANCHES, CHAIN], [4, 2])
    assert runner.positions.tolist() == [10, 11, 12, 12, 13, 20, 21, 22]
    step = keeper.step
    assert step.shapes.depths[0].tolist() == [1, 2, 2, 3] and step.branching.tolist() == [0]
    assert step.row_parents.tolist() == [-1, 0, 1, 1, 3, -1, 0, 1]
    assert step.row_parents.dtype == np.int32
    assert step.shapes.ancestors[0, 3].tolist() == [True, False, True, True]
    assert step.first.tolist() == [0, 5]


def test_what_the_scheduler_has_cut_to_a_chain_is_no_tree():
    runner, keeper = step_of([BRANCHES, CHAIN], [2, 1])
    assert keeper.step is None
    assert runner.positions.tolist() == [10, 11, 12, 20, 21]


def test_a_model_that_drafts_reads_accepted_tokens_first():
    runner, keeper = step_of([BRANCHES, CHAIN], [4, 2])
    path = torch.tensor([[0, 1, 3, 4, 0], [0, 1, 0, 0, 0]])
    runner.rejection_sampler = SimpleNamespace(path=path)
    inputs = DrafterInputs(runner, keeper)
    hidden, of_rows, auxiliary = (torch.arange(8.0)[:, None] + shift for shift in (0, 10, 20))
    runner.propose_draft_token_ids(None, None, None, hidden, of_rows, [auxiliary], None)
    order = [0, 1, 3, 4, 4, 5, 6, 7]
    assert hidden[:, 0].tolist() == order
    assert of_rows[:, 0].tolist() == [10 + place for place in order]
    assert auxiliary[:, 0].tolist() == [20 + place for place in order]
    assert runner.input_ids.gpu.tolist() == [100 + place for place in order]
    assert runner.positions.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    inputs.detach()
