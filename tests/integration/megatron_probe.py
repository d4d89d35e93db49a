"""Trains a policy and a head with verl's Megatron engine, in several processes on a CPU.
    python -m tests.integration.megatron_probe RUNS

PYTHONPATH must contain tests/megatron_on_cpu and Megatron. RUNS is a JSON list of objects with the
keys "folder", "policy", "head", "processes" (their number), "engine" (settings of verl's engine)
and "transformer" (settings of Megatron's transformer). Process N of a run writes its results into
the run's folder, as N.pt.
"""

import json
import multiprocessing
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import distributed
from transformers import AutoConfig
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.megatron_utils import unwrap_model
from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from sam_rollout.config import SamConfig
from sam_rollout.heads.peers import Peers
from sam_rollout.integrations.verl.head_training import HeadTraining
from sam_rollout.integrations.verl.policy_part_megatron import MegatronPart
from sam_rollout.integrations.verl.state_capture import StateCapture
from sam_rollout.integrations.vllm.engine_settings import EngineSettings
from tests.megatron import ON_CPU

# For each text: the length of its prompt, and the length of prompt and response together.
LENGTHS = ((3, 12), (2, 9), (15, 26), (1, 7), (4, 40), (1, 11), (9, 31), (2, 8))
WINDOW = 8
OTHER_LAYERS = (0, 5)
STEPS = 2
LIMIT_S = 200


def texts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(500) for _ in range(length)] for _, length in LENGTHS]


def batch() -> TensorDict:
    def nested(rows: list[list[int]]) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.tensor(r) for r in rows], layout=torch.jagged)

    own = texts()
    pairs = [(text[:prompt], text[prompt:]) for text, (prompt, _) in zip(own, LENGTHS, strict=True)]
    tensors = {
        "input_ids": nested(own),
        "prompts": nested([prompt for prompt, _ in pairs]),
        "responses": nested([response for _, response in pairs]),
        "loss_mask": nested([[1] * len(response) for _, response in pairs]),
        "temperature": torch.ones(len(pairs)),
    }
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    return tensordict_utils.get_tensordict(tensors, settings)


def make_engine(asked: dict[str, Any]) -> MegatronEngineWithLMHead:
    config = AutoConfig.from_pretrained(asked["policy"])
    model = SimpleNamespace(
        hf_config=config,
        local_path=asked["policy"],
        model_type="language_model",
        architectures=config.architectures,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        mtp=SimpleNamespace(enable=False, enable_train=False),
        lora={},
        tokenizer=SimpleNamespace(pad_token_id=0),
        get=lambda _name, default=None: default,
        get_processor=lambda: None,
    )
    settings = McoreEngineConfig(
        **asked["engine"],
        vanilla_mbridge=True,
        param_offload=True,
        override_transformer_config=ON_CPU | asked["transformer"],
    )
    optimizer = McoreOptimizerConfig(lr=1e-3, total_training_steps=10, lr_decay_steps=10)
    engine = MegatronEngineWithLMHead(model, settings, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


def make_head(engine: Any, asked: dict[str, Any]) -> HeadTraining:
    model = {"enabled": True, "path": asked["head"], "train": {"enabled": True, "window": WINDOW}}
    settings = EngineSettings(SamConfig.from_mapping({"sources": {"model": model}}))
    vllm = SimpleNamespace(additional_config=settings.arguments()["additional_config"])
    config = SimpleNamespace(
        rollout=SimpleNamespace(engine_kwargs=SimpleNamespace(vllm=vllm)),
        actor=SimpleNamespace(strategy="megatron"),
        model=SimpleNamespace(path=asked["policy"]),
    )
    return HeadTraining(SimpleNamespace(config=config, actor=SimpleNamespace(engine=engine)))


def log_probs(engine: Any, data: TensorDict) -> list[torch.Tensor]:
    """Return log-probabilities of a step's responses; only the last pipeline stage has them."""
    with engine.eval_mode(), torch.no_grad():
        output = engine.forward_backward_batch(data, None, forward_only=True)
    return list(output["model_output"]["log_probs"].unbind()) if output else []


def train(engine: Any, data: TensorDict) -> None:
    def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        return -model_output["log_probs"].values().float().mean(), {}

    with engine.train_mode():
        engine.train_batch(data, loss)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    found = {name: weight.clone() for name, weight in engine.get_per_tensor_param()[0]}
    engine.to("cpu")
    return found


def without_head(engine: Any, data: TensorDict) -> dict[str, Any]:
    passes = []
    for _ in range(STEPS):
        passes.append(log_probs(engine, data))
        train(engine, data)
    return {"log_probs": passes, "weights": weights(engine), "random": torch.get_rng_state()}


def with_head(engine: Any, data: TensorDict, head: HeadTraining) -> dict[str, Any]:
    passes, taken, learned, matrices = [], [], [], []
    for _ in range(STEPS):
        with head.reading(len(data)):
            passes.append(log_probs(engine, data))
        taken.append([vars(sample) for sample in head._capture.taken])
        head._capture.spent_s = 0.0  # so that the head learns even on a busy machine
        learned.append(head.learn(1.0))
        train(engine, data)
        whole = head._part.matrices(Peers(distributed.group.WORLD))
        matrices.append((whole.embeddings, whole.output))
    return {
        "log_probs": passes,
        "weights": weights(engine),
        "random": torch.get_rng_state(),
        "taken": taken,
        "learned": learned,
        "matrices": matrices,
        "failed": head.online.failed,
        "head": dict(head.weights()),
    }


def states_of_other_layers(engine: Any, data: TensorDict) -> list[dict[str, Any]]:
    capture = StateCapture(MegatronPart(engine), OTHER_LAYERS, WINDOW, 4, random.Random(0))
    with capture.running(len(data)):
        log_probs(engine, data)
    return [vars(sample) for sample in capture.taken]


def process(rank: int, asked: dict[str, Any]) -> None:
    folder, count = Path(asked["folder"]), asked["processes"]
    store = distributed.FileStore(str(folder / "store"), count)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    found: dict[str, Any] = {"texts": texts(), "prompts": [prompt for prompt, _ in LENGTHS]}
    torch.manual_seed(0)
    engine = make_engine(asked)
    data = batch()
    found["without"] = without_head(engine, data)
    torch.manual_seed(0)
    engine = make_engine(asked)
    found["layers"] = sum(len(unwrap_model(chunk).decoder.layers) for chunk in engine.module)
    found["with"] = with_head(engine, data, make_head(engine, asked))
    found["others"] = states_of_other_layers(engine, data)
    torch.save(found, folder / f"{rank}.pt")


def run(asked: dict[str, Any]) -> None:
    """Run all processes of a divided policy; end this program if one of them fails."""
    forking = multiprocessing.get_context("fork")
    processes = [
        forking.Process(target=process, args=(rank, asked), daemon=True)
        for rank in range(asked["processes"])
    ]
    for one in processes:
        one.start()
    last_s = time.monotonic() + LIMIT_S
    for one in processes:
        one.join(max(0.0, last_s - time.monotonic()))
    for one in processes:  # processes may still wait for each other
        one.kill()
        one.join()
    if status := max(abs(one.exitcode) for one in processes):
        sys.exit(status)


def main() -> None:
    torch.set_num_threads(1)
    for asked in json.loads(sys.argv[1]):
        run(asked)


if __name__ == "__main__":
    main()
