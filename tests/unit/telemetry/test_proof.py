import math

import pytest

from sam_rollout.config import ProofConfig
from sam_rollout.telemetry.proof import Compared, proof_line, proof_metrics, split_over
from sam_rollout.telemetry.schema import declared

SAME = Compared(100)
TIE = Compared(100, 40, 0.01, True)
STRAY = Compared(100, 7, 3.5, False)
ENDED = Compared(100, 9, math.inf, False)
UNKNOWN = Compared(100, 90)


@pytest.mark.parametrize(
    ("found", "metrics"),
    [
        ([], {}),
        ([SAME, SAME], {"identical_share": 1}),
        ([SAME, TIE, TIE, STRAY], {"identical_share": 0.25, "first_difference": 40,
                                   "ties_share": 2 / 3}),
        ([SAME, UNKNOWN], {"identical_share": 0.5, "first_difference": 90}),
    ],
)  # fmt: skip
def test_shares_of_nothing_are_left_out(found, metrics):
    expected = {f"proof/{name}": value for name, value in metrics.items()}
    values = proof_metrics(found, 2.0)
    assert values == pytest.approx(expected | {"proof/time_s": 2.0})
    for name in values:
        assert declared(f"sam/{name}")


@pytest.mark.parametrize(
    ("found", "said", "unsaid"),
    [
        ([], "no response of this step had drafts", "are the same"),
        ([SAME, SAME], "2 of 2 responses (200 tokens) are the same", "differ"),
        ([SAME, TIE], "1 differ, 1 of them first at a numerical tie", "NOT"),
        ([TIE, STRAY, UNKNOWN], "1 NOT (one at token 7 of the response: 3.5 from a tie), 1 not "
                                "checked", "distance"),
        ([ENDED], "no distance explains it", "inf"),
    ],
)  # fmt: skip
def test_the_line_says_what_is_rounding_and_what_is_not(found, said, unsaid):
    line = proof_line(found, 2.0)
    assert said in line and unsaid not in line and "\n" not in line


@pytest.mark.parametrize(
    ("every", "responses", "replicas"), [(1, 8, 1), (1, 8, 3), (1, 2, 5), (1, 3, 3), (10, 8, 16)]
)
def test_responses_are_shared_out_and_every_replica_has_its_turn(every, responses, replicas):
    proof = ProofConfig(every, responses)
    counts = [split_over(proof, replicas, every * n) for n in range(replicas)]
    assert all(sum(one) == responses and max(one) - min(one) <= 1 for one in counts)
    assert {sum(of_replica) for of_replica in zip(*counts, strict=True)} == {responses}
