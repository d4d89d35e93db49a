import json

import pytest

from sam_rollout.core.identity import RequestIdentity, group_of, identify, key_of

PROMPT = [151644, 872, 198, 3838, 374, 220, 17, 10, 17, 30]
FIELDS = {"seed": 42, "step": 3, "group": "0123456789abcdef", "sibling": 1}


def test_hashes_are_fixed_for_all_times():
    """Comparisons match requests of recorded runs by these hashes."""
    assert group_of(PROMPT) == "37eab9d2693cff16"
    assert group_of([]) == "e4a6a0577479b2b4"
    assert key_of(**FIELDS) == 3454342004548469330


def test_groups_depend_on_every_token_and_their_order():
    variants = [PROMPT, PROMPT[:-1], [*PROMPT, 30], PROMPT[::-1], [PROMPT[0] + 1, *PROMPT[1:]]]
    variants += [[2**40], [0]]  # beyond 32 bits
    assert len({group_of(prompt) for prompt in variants}) == len(variants)


def test_round_trip_through_extra_args():
    identity = identify(PROMPT, seed=42, step=3, sibling=1, split="train")
    group = group_of(PROMPT)
    assert identity == RequestIdentity(group, 1, 3, "train", key_of(42, 3, group, 1))
    sent = json.loads(json.dumps({"other": 1, **identity.to_extra_args()}))
    assert RequestIdentity.from_extra_args(sent) == identity


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}])
def test_a_request_without_identity_has_none(extra_args):
    assert RequestIdentity.from_extra_args(extra_args) is None
