import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sam_rollout.verification import NO_TOKEN, DraftLayout
from sam_rollout.verification.trees import TreeShapes, verify_tree


def walk(tokens, parents, drawn):
    node, path = 0, [0]
    while children := [
        child
        for child, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1)
        if parent == node and token == drawn[node]
    ]:
        (node,) = children
        path.append(node)
    return [drawn[node] for node in path], path


@st.composite
def trees(draw):
    batch = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 7))
        parents = [draw(st.integers(0, node)) for node in range(count)]
        siblings = [parents[:node].count(parent) for node, parent in enumerate(parents)]
        drawn = draw(st.lists(st.integers(0, 3), min_size=count + 1, max_size=count + 1))
        batch.append((siblings, parents, drawn))
    return batch


@settings(max_examples=200, deadline=None)
@given(trees())
def test_the_path_is_that_of_a_walk(batch):
    counts = [len(tokens) for tokens, _, _ in batch]
    most = max(counts)
    shape = len(batch), most
    parents, depths = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    ancestors = np.zeros((*shape, most), bool)
    for row, (_, of_row, _) in enumerate(batch):
        for place in range(most):
            parent = of_row[place] if place < counts[row] else place
            parents[row, place] = parent
            depths[row, place] = 1 + (depths[row, parent - 1] if parent else 0)
            if parent and place < counts[row]:
                ancestors[row, place] = ancestors[row, parent - 1]
            ancestors[row, place, place] = True
    layout = DraftLayout(torch.tensor(np.cumsum(counts)), sum(counts), most)
    drafts = torch.tensor([token for tokens, _, _ in batch for token in tokens], dtype=torch.int32)
    drawn = torch.tensor([token for _, _, row in batch for token in row])
    shapes = TreeShapes(*map(torch.from_numpy, (parents, depths, ancestors)))
    kept, path = verify_tree(layout, drafts, drawn, shapes)
    assert kept.dtype == torch.int32
    for row, (tokens, of_row, of_nodes) in enumerate(batch):
        expected, nodes = walk(tokens, of_row, of_nodes)
        fill = most + 1 - len(expected)
        assert kept[row].tolist() == expected + [NO_TOKEN] * fill
        assert path[row, : len(nodes)].tolist() == nodes
