import numpy as np
import pytest

from sam_rollout.bench import sides
from sam_rollout.bench.replay import Replay, replay
from sam_rollout.core.traces import Trace

TEXT = [5, 6, 7, 8, 9, 10, 11, 12] * 6


@pytest.mark.parametrize("name", [sides.NGRAM, sides.NGRAM_24, sides.ARCTIC, sides.ARCTIC_4])
def test_a_periodic_text_takes_few_steps(name):
    (side,) = [side for side in sides.all_sides() if side.name == name]
    if name.startswith(sides.ARCTIC):
        pytest.importorskip("arctic_inference")
    trace = Trace("a", 0, np.array(TEXT[:8], np.int32), np.array(TEXT[8:], np.int32))
    result = Replay()
    replay(side.open(3, 2, 128), [trace, trace], result)
    assert result.tokens == 2 * (len(TEXT) - 9)
    assert result.mean_acceptance_length > 2.5


def test_a_side_that_cannot_be_made_is_named(monkeypatch):
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    def fail(self, vllm_config):
        raise AttributeError("no attribute 'later'")

    monkeypatch.setattr(NgramProposer, "__init__", fail)
    there, missing = sides.available()
    assert {sides.NGRAM, sides.NGRAM_24} <= set(missing) and sides.OWN in there
    assert missing[sides.NGRAM] == "AttributeError: no attribute 'later'"
