"""A program: responses of vLLM's second model runner on a CPU, as JSON.

That runner's kernels are written in Triton, and the published Triton has no backend for a CPU. Its
interpreter runs them all the same, slowly. vLLM asks for the backend by name before it dares to,
so there is one here, which compiles nothing.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def interpret_triton() -> None:
    """Have Triton interpret kernels, and say that it can on a CPU; before vLLM asks it."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import Backend, backends

    class Interpreter:
        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = Backend(compiler=None, driver=Interpreter)
    from vllm.v1.sample.ops import topk_topp_sampler

    # The one kernel on our way that the interpreter cannot run: it calls methods of plain numbers.
    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch


def run(sides: dict[str, dict[str, Any]], prompts: list[list[int]], **asked: Any) -> dict[str, Any]:
    """Responses of each side, and what its drafter counted."""
    from sam_rollout.config import RolloutSamplerConfig, SamConfig
    from sam_rollout.integrations.vllm.offline import offline_engine
    from tests.integration.conftest import MODEL
    from tests.integration.responses import counted, drafts, generate, runner_of, texts

    coupled, found = RolloutSamplerConfig("coupled"), {}
    for name, side in sides.items():
        sam = SamConfig.from_mapping(side["sam"])
        arguments = {"dtype": "float32", "max_model_len": 256, "disable_log_stats": False}
        arguments |= side["engine"]
        with offline_engine(MODEL, sam, coupled, record=True, **arguments) as engine:
            outputs = generate(engine, prompts, **asked)
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
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    interpret_triton()
    with open(sys.argv[1]) as file:
        task = json.load(file)
    result = run(**task)
    with open(sys.argv[1], "w") as file:
        json.dump(result, file)
