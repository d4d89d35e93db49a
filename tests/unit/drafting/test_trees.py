import numpy as np
import pytest

from sam_rollout.config import GateConfig, SamConfig, sources_of
from sam_rollout.core.limits import Limits
from sam_rollout.drafting.drafter import SamDrafter
from tests.unit.drafting.texts import int32, rows_of

MAX_ROWS, WIDTH = 4, 4096


def drafter_of(k=8, budget=64, shape="tree", sources=("own",), vocabulary=1000, gate="threshold"):
    config = SamConfig(
        max_draft_tokens=k,
        draft_shape=shape,
        step_budget=budget,
        gate=GateConfig(gate),
        sources=sources_of(*sources),
    )
    return SamDrafter(config, Limits(MAX_ROWS, WIDTH, vocabulary))


def grow(drafter, *texts, **options):
    tokens, lengths = rows_of(texts, WIDTH)
    names = [f"request {row}" for row in range(len(texts))]
    drafter.bind(names)
    rows = len(names)
    gained = lengths - drafter.batch.length[:rows]
    verified = drafter.observe(tokens, lengths, gained)
    batch = drafter.draft(tokens, lengths, np.ones(rows, bool), gate_open=True, **options)
    drafter.settle()
    nodes = [
        list(zip(batch.tokens[row, :n].tolist(), batch.parents[row, :n].tolist(), strict=True))
        for row, n in enumerate(batch.counts[:rows])
    ]
    return nodes, verified


def paths(nodes):
    found = []
    for token, parent in nodes:
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


BRANCHING = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5, 9, 1, 2]


def test_a_tree_holds_what_followed_each_time():
    (nodes,), _ = grow(drafter_of(), BRANCHING)
    assert all(parent < place for place, (_, parent) in enumerate(nodes))
    assert {path[0] for path in paths(nodes)} >= {3, 4, 5}
    assert len({tuple(path) for path in paths(nodes)}) == len(nodes), "no text twice"
    assert [5, 9, 1] in paths(nodes)


def test_one_token_a_request_is_the_chains_first():
    for text in (BRANCHING, [1, 2, 3, 1, 2, 3, 1]):
        (tree,), _ = grow(drafter_of(k=1), text)
        (chain,), _ = grow(drafter_of(k=1, shape="chain"), text)
        assert tree == chain


def test_no_row_and_no_step_gets_more_than_it_may():
    rows = [BRANCHING, [1, 2, 3] * 20, [7, 7, 8, 7, 7, 9, 7, 7]]
    nodes, _ = grow(drafter_of(k=6), *rows)
    assert max(map(len, nodes)) == 6
    nodes, _ = grow(drafter_of(k=16, budget=9), *rows)
    assert sum(map(len, nodes)) == 9
    assert len(nodes[1]) > max(len(nodes[0]), len(nodes[2])), "the surest text gets the most"
    nodes, _ = grow(drafter_of(k=6), *rows, max_tokens=int32(2, 0, 6))
    assert [len(row) for row in nodes] == [2, 0, 6]


def test_tokens_outside_the_vocabulary_are_left_out():
    (nodes,), _ = grow(drafter_of(vocabulary=5), BRANCHING)
    assert nodes and all(token < 5 for token, _ in nodes)


@pytest.mark.parametrize("branch", [3, 4, 5])
def test_what_was_accepted_is_a_path(branch):
    drafter = drafter_of(k=12)
    (nodes,), _ = grow(drafter, BRANCHING)
    _, verified = grow(drafter, [*BRANCHING, branch, 9, 6])
    assert [branch, 9] in paths(nodes)
    assert verified.accepted[0] == verified.right[0] == 2
    assert verified.drafted[0] == verified.judged[0] == len(nodes)


def test_a_step_that_the_engine_cut_verified_what_came_before():
    drafter = drafter_of(k=12)
    (nodes,), _ = grow(drafter, BRANCHING)
    tail = [5, 9, 1]
    third = paths(nodes).index(tail)
    _, verified = grow(drafter, [*BRANCHING, *tail])
    assert verified.accepted[0] == 2 and verified.drafted[0] == third < len(nodes)


def test_chances_that_proved_too_high_are_lowered():
    drafter = drafter_of(k=8)
    text, sizes = [1, 2, 3, 4], []
    rng = np.random.default_rng(0)
    for _ in range(60):
        (nodes,), _ = grow(drafter, text, least_chance=0.3)
        sizes.append(len(nodes))
        text = [*text, int(rng.integers(10, 900)), 1, 2]
    assert sum(sizes[:10]) > 2 * sum(sizes[-10:])


def test_requests_may_change_rows_while_trees_are_in_flight():
    drafter = drafter_of(k=12)
    other = [7, 8, 7, 9, 7]
    tokens, lengths = rows_of([BRANCHING, other], WIDTH)
    drafter.bind(["a", "b"])
    drafter.draft(tokens, lengths, np.ones(2, bool), gate_open=True)
    drafter.bind(["b", "a"])
    tokens, lengths = rows_of([[*other, 8, 7, 1], [*BRANCHING, 4, 9, 1, 6]], WIDTH)
    verified = drafter.observe(tokens, lengths, int32(3, 4))
    assert verified.accepted.tolist() == [2, 3]


def test_the_gate_is_told_what_trees_could_have_held():
    drafter = drafter_of(k=12, gate="auto")
    (nodes,), _ = grow(drafter, BRANCHING)
    _, verified = grow(drafter, [*BRANCHING, 4, 9, 6])
    offered = drafter.offered(verified)
    assert offered.rows == 1
    all_of_them, judged, right, expected = offered.tokens.sum(axis=1)
    assert all_of_them == judged == len(nodes), "what follows a wrong token is wrong"
    assert right == 2 and 0 < expected < judged


def test_the_gate_is_told_nothing_of_what_the_text_does_not_reach():
    drafter = drafter_of(k=12, gate="auto")
    (nodes,), _ = grow(drafter, BRANCHING)
    _, verified = grow(drafter, [*BRANCHING, 4])
    _, judged, right, _ = drafter.offered(verified).tokens.sum(axis=1)
    below = sum(path[0] == 4 for path in paths(nodes)) - 1
    assert below > 0 and judged == len(nodes) - below and right == 1


def test_tokens_that_prove_right_as_often_as_expected_say_so():
    drafter, rng = drafter_of(k=12, gate="auto"), np.random.default_rng(1)
    text, told = [1, 2, 3, 4] * 2, np.zeros(4)
    for step in range(700):
        grow(drafter, text)
        text = [*text, *rng.integers(1, 4, 4).tolist()]
        tokens, lengths = rows_of([text], WIDTH)
        verified = drafter.observe(tokens, lengths, int32(4))
        drafter.batch.length[0] = len(text)
        if step >= 100:
            told += drafter.offered(verified).tokens.sum(axis=1)
    right, expected = told[2:]
    assert 0.8 < right / expected < 1.25
