"""How a tree is cut into paths for a kernel that knows texts alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sam_rollout.integrations.vllm.trees.cpu_attention import _paths


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
    assert path == list(range(1, count + 1)), "the first lies where it was written"
