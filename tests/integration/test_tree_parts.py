"""Each part of the verification of trees is needed: without it texts are others."""

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.engine_settings import engine_arguments
from sam_rollout.integrations.vllm.trees.cpu_attention import CpuTreeAttention
from sam_rollout.integrations.vllm.trees.step_trees import StepTrees, TreeKeeper
from tests.integration.responses import generate, texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TREES = SamConfig(max_draft_tokens=12, draft_shape="tree", gate=GateConfig("threshold", 1000))


@pytest.fixture(scope="module")
def rollout(make_engine, prompts):
    """``rollout(sam)``: responses of a new engine, which has seen no text before."""

    def run(sam):
        engine = make_engine(sam, **engine_arguments(sam, RolloutSamplerConfig()))
        return texts(generate(engine, prompts[:6], 2, max_tokens=80))

    return run


@pytest.fixture(scope="module")
def reference(rollout):
    return rollout(SamConfig(enabled=False))


def left_out(part, patch):
    """An engine without a part."""
    if part == "attention":
        patch.setattr(CpuTreeAttention, "calls", lambda self, metadata: [])
        patch.setattr(CpuTreeAttention, "accept", lambda *_: None)
    elif part == "compaction":
        patch.setattr(CpuTreeAttention, "accept", lambda *_: None)
    elif part == "positions":
        read = TreeKeeper._read

        def without(self, drafts) -> StepTrees | None:
            positions = self._runner.positions.clone()
            found = read(self, drafts)
            self._runner.positions.copy_(positions)
            return found

        patch.setattr(TreeKeeper, "_read", without)


@pytest.mark.parametrize("part", ["nothing", "positions", "attention", "compaction"])
def test_texts_are_the_same_with_all_parts_alone(part, rollout, reference, monkeypatch):
    left_out(part, monkeypatch)
    assert (rollout(TREES) == reference) == (part == "nothing")
