"""Tests our drafter and sampler in vLLM's second model runner, against texts of the first runner.

This file is also the program that runs the second runner. The runner's Triton kernels run in
Triton's interpreter, because Triton has no backend for a CPU. vLLM asks for a backend by name, so
this file registers one that compiles nothing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.engine_settings import engine_arguments
from tests.integration.conftest import MODEL, REPOSITORY
from tests.integration.responses import counted, drafts, generate, runner_of, texts

OFF = SamConfig(enabled=False)
COUPLED = RolloutSamplerConfig("coupled")
ALWAYS = GateConfig("threshold", 10_000)
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
PROMPTS, SIBLINGS, LONGEST = 3, 2, 256
LENGTHS = [60 - 4 * place for place in range(SIBLINGS * PROMPTS)]
ASKED: dict[str, Any] = {"siblings": SIBLINGS, "top_p": 0.9, "max_tokens": LENGTHS}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def batch(prompts):
    return prompts[:PROMPTS]


@pytest.fixture(scope="module")
def found(tmp_path_factory, batch):
    file = tmp_path_factory.mktemp("second_runner") / "file.json"
    file.write_text(json.dumps(batch))
    program = [sys.executable, "-m", "tests.integration.test_second_runner", str(file)]
    environment = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(program, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-4000:]
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def reference(make_engine, batch):
    engine = make_engine(OFF, **engine_arguments(OFF, COUPLED), max_model_len=LONGEST)
    return texts(generate(engine, batch, **ASKED))


@pytest.mark.parametrize("side", SIDES)
def test_texts_are_those_of_the_first_runner(side, found, reference):
    assert found[side]["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert found[side]["texts"] == reference
    counters = found[side]["counters"]
    assert counters["draft/failures"] == counters["draft/rebuilds"] == 0
    assert 0 < found[side]["accepted"] < found[side]["drafted"]
    assert (found[side]["preemptions"] > 0) == (SIDES[side][1] == SMALL)


def admit_interpreter() -> None:
    from triton.backends import Backend, backends

    class Interpreter:
        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = Backend(compiler=None, driver=Interpreter)
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch


def run_sides(prompts: list[list[int]]) -> dict[str, Any]:
    from sam_rollout.integrations.vllm.offline import offline_engine

    found = {}
    for name, (sam, engine_sizes) in SIDES.items():
        arguments = {"dtype": "float32", "max_model_len": LONGEST, "disable_log_stats": False}
        arguments |= engine_sizes
        with offline_engine(MODEL, sam, COUPLED, record=True, **arguments) as engine:
            outputs = generate(engine, prompts, **ASKED)
            (report,) = engine.collective_rpc("sam_drain")
            drafted, accepted = drafts(report)
            found[name] = {
                "runner": type(runner_of(engine)).__module__,
                "texts": texts(outputs),
                "counters": report["counters"],
                "drafted": drafted,
                "accepted": accepted,
                "preemptions": counted(engine, "num_preemptions"),
            }
    return found


if __name__ == "__main__":
    admit_interpreter()
    task = Path(sys.argv[1])
    task.write_text(json.dumps(run_sides(json.loads(task.read_text()))))
