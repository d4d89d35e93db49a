"""Our drafter and sampler inside vLLM's second model runner: the same texts as in the first.

A process of its own, with Triton's interpreter (`second_runner_probe.py`). What an accelerator has
to show on top is that what the host reads has arrived by then.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.engine_settings import engine_arguments
from tests.integration.conftest import REPOSITORY
from tests.integration.responses import generate, texts

OFF = SamConfig(enabled=False)
ALWAYS = GateConfig("threshold", 10_000)
# Requests are preempted and prompts computed in parts, like in test_same_texts.py.
SMALL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 6,
    "block_size": 64,
}
SIDES = {
    "on": (SamConfig(gate=ALWAYS), {"max_num_seqs": 16}),
    "opens and closes": (SamConfig(max_draft_tokens=3, gate=GateConfig("threshold", 4)), SMALL),
}
SIBLINGS = 2
ASKED = {"siblings": SIBLINGS, "top_p": 0.9}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def batch(prompts):
    return prompts[:3]


@pytest.fixture(scope="module")
def asked(batch):
    """Lengths that differ: the last requests run alone."""
    return {**ASKED, "max_tokens": [60 - 4 * place for place in range(SIBLINGS * len(batch))]}


@pytest.fixture(scope="module")
def found(tmp_path_factory, batch, asked):
    """Responses of each side in the second runner."""
    sides = {
        name: {"sam": sam.to_mapping(), "engine": engine} for name, (sam, engine) in SIDES.items()
    }
    task = tmp_path_factory.mktemp("second_runner") / "task.json"
    task.write_text(json.dumps({"sides": sides, "prompts": batch, **asked}))
    program = [sys.executable, "-m", "tests.integration.second_runner_probe", str(task)]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-4000:]
    return json.loads(task.read_text())


@pytest.fixture(scope="module")
def reference(make_engine, batch, asked):
    """The same responses in the first runner, without drafts."""
    coupled = RolloutSamplerConfig("coupled")
    engine = make_engine(OFF, **engine_arguments(OFF, coupled), max_model_len=256)
    return generate(engine, batch, **asked)


@pytest.mark.parametrize("side", SIDES)
def test_texts_are_those_of_the_first_runner(side, found, reference):
    assert found[side]["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert found[side]["texts"] == texts(reference)
    counters = found[side]["counters"]
    assert counters["draft/failures"] == counters["draft/rebuilds"] == 0
    assert 0 < found[side]["accepted"] < found[side]["drafted"]
    assert (found[side]["preemptions"] > 0) == (SIDES[side][1] == SMALL)
