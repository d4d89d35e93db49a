import numpy as np
import pytest

from sam_rollout.bench import sides
from sam_rollout.bench.first_occurrence import FirstOccurrenceAutomaton
from sam_rollout.bench.replay import Replay, accepted_tokens, replay
from sam_rollout.bench.sessions import Session
from sam_rollout.core.traces import Trace


class Scripted(Session):
    def __init__(self, drafts: dict[tuple[str, int], list[int]]) -> None:
        self.drafts = drafts
        self.asked: list[tuple[list[str], list[int], list[list[int]]]] = []
        self.finished: list[str] = []
        self.steps_ended = 0

    def propose(self, request_ids, token_ids, lengths, sampled):
        names = [name.rpartition("/")[2] for name in request_ids]
        self.asked.append((names, lengths.tolist(), [list(tokens) for tokens in sampled]))
        self.texts = [token_ids[i, :n].tolist() for i, n in enumerate(lengths)]
        return [self.drafts.get(key, []) for key in zip(names, lengths.tolist(), strict=True)]

    def finish(self, request_ids):
        self.finished += list(request_ids)

    def end_step(self):
        self.steps_ended += 1


def trace(prompt: list[int], response: list[int], group: str = "g", sibling: int = 0) -> Trace:
    return Trace(group, sibling, np.array(prompt, np.int32), np.array(response, np.int32))


@pytest.mark.parametrize(
    ("draft", "parents", "right"),
    [
        ([], None, 0),
        ([1, 2, 3], None, 3),
        ([1, 9, 3], None, 1),
        ([9, 2], None, 0),
        ([1, 2, 3, 4, 5], None, 4),
        ([9, 1, 8, 2], [-1, -1, 0, 1], 2),  # a tree with the paths 9 8 and 1 2
        ([1, 9, 2], [-1, 0, 1], 1),
    ],
)
def test_a_draft_counts_up_to_its_first_mismatch_and_the_text_s_end(draft, parents, right):
    assert accepted_tokens(draft, [1, 2, 3, 4], parents) == right


def test_steps_tokens_and_drafts_are_those_counted_by_hand():
    session = Scripted({("0", 3): [2, 3, 9], ("0", 7): [6, 7, 8]})
    result = Replay()
    replay(session, [trace([7, 8], [1, 2, 3, 4, 5, 6])], result)
    assert session.asked == [(["0"], [3], [[1]]), (["0"], [6], [[2, 3, 4]]), (["0"], [7], [[5]])]
    assert (result.steps, result.tokens, result.drafted, result.accepted) == (3, 5, 6, 3)
    assert result.mean_acceptance_length == pytest.approx(5 / 3)
    assert result.drafted_per_step == 2
    assert session.finished == ["0/g/0"] and session.steps_ended == 1


def test_requests_advance_together_and_rows_close_up():
    session = Scripted({("1", 2): [5, 6, 7]})
    result = Replay()
    traces = [trace([1], [2, 3, 4]), trace([1], [4, 5, 6, 7, 8]), trace([1], [9])]
    replay(session, traces, result)
    assert [(names, lengths) for names, lengths, _ in session.asked] == [
        (["0", "1"], [2, 2]),
        (["0"], [3]),
    ]
    assert session.texts == [[1, 2, 3]]
    assert (result.steps, result.tokens) == (3, 6)
    assert sorted(session.finished) == ["0/g/0", "0/g/1", "0/g/2"]


def brute_force_first(text: list[int], k: int) -> list[int]:
    for length in range(len(text) - 1, 0, -1):
        for end in range(length, len(text)):
            if text[end - length : end] == text[-length:]:
                return text[end : end + k]
    return []


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_the_plain_automaton_agrees_with_brute_force(alphabet):
    text = np.random.default_rng(alphabet).integers(0, alphabet, 60).tolist()
    automaton = FirstOccurrenceAutomaton()
    for n, token in enumerate(text, start=1):
        automaton.extend([token])
        assert automaton.draft(3) == brute_force_first(text[:n], 3)


def test_our_drafter_replays_a_periodic_text_in_few_steps():
    result = Replay()
    (own,) = [side for side in sides.all_sides() if side.name == sides.OWN]
    replay(own.open(3, 1, 200), [trace([1, 2, 3], [1, 2, 3] * 20)], result)
    assert (result.tokens, result.steps) == (59, 15)
