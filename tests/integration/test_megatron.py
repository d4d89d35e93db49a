"""Tests a head that learns beside a policy divided by Megatron, and does not affect this policy.

verl's Megatron engine runs on a CPU (tests/megatron_on_cpu), in processes of `megatron_probe.py`.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sam_rollout.heads.writing import write_fresh_head
from tests import megatron
from tests.integration.conftest import MODEL, REPOSITORY

LIMIT_S = 440  # megatron_probe.py gives up earlier
HEAD_LAYERS, OTHER_LAYERS = (2, 6, 9), (0, 5)
FAR = 0.1  # relative; rounding changes states by less, and two tokens' states differ by about 1
pytestmark = pytest.mark.timeout(megatron.FETCH_S + LIMIT_S + 30)


class Run:
    def __init__(self, name: str, folder: str, policy: str, processes: int, **_: Any) -> None:
        files = [Path(folder, f"{rank}.pt") for rank in range(processes)]
        self.found = [torch.load(file, weights_only=False) for file in files]
        self.stages = STAGES[name]
        self._policy = policy

    @property
    def reference(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._policy, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, head = tmp_path_factory.mktemp("untied"), tmp_path_factory.mktemp("head")
    model = AutoModelForCausalLM.from_pretrained(MODEL, tie_word_embeddings=False)
    model.lm_head.weight.data.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    write_fresh_head(head, model.config.to_dict(), str(folder), 3)
    return folder, head


DIVIDED = {
    "layers and texts divided": {
        "processes": 8,
        "engine": {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "context_parallel_size": 2,
            "use_remove_padding": True,
        },
        "transformer": {"sequence_parallel": True, "num_layers_in_first_pipeline_stage": 4},
    },
    "texts side by side": {
        "processes": 4,
        "engine": {
            "tensor_model_parallel_size": 2,
            "context_parallel_size": 2,
            "use_remove_padding": False,
        },
        "transformer": {"sequence_parallel": False},
    },
}
STAGES = {"layers and texts divided": {4, 8}, "texts side by side": {12}}  # layers per stage


@pytest.fixture(scope="module")
def runs(untied: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    asked = {}
    models = [untied, (Path(MODEL), Path(f"{MODEL}_eagle3"))]
    for (name, divided), (policy, head) in zip(DIVIDED.items(), models, strict=True):
        folder = str(tmp_path_factory.mktemp("megatron"))
        asked[name] = {**divided, "folder": folder, "policy": str(policy), "head": str(head)}
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in megatron.find()),
        "VERL_PLATFORM": "cpu",
    }
    program = [sys.executable, "-W", "ignore", "-m", "tests.integration.megatron_probe"]
    done = subprocess.run(
        [*program, json.dumps([*asked.values()])],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: Run(name, **one) for name, one in asked.items()}


@pytest.fixture(params=DIVIDED)
def run(request: Any, runs: dict[str, Run]) -> Run:
    return runs[request.param]


def test_the_policy_learns_as_without_a_head(run: Run) -> None:
    passes = 0
    for found in run.found:
        without, with_head = found["without"], found["with"]
        for step in range(2):
            pairs = zip(without["log_probs"][step], with_head["log_probs"][step], strict=True)
            for one, other in pairs:
                assert torch.equal(one, other)
                passes += 1
        assert without["weights"].keys() == with_head["weights"].keys()
        for name, weight in without["weights"].items():
            assert torch.equal(weight, with_head["weights"][name]), name
        assert torch.equal(without["random"], with_head["random"])
    assert passes
    before = run.reference.state_dict()
    after = run.found[0]["with"]["weights"]
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(before[name], after[name])


def farthest(states: torch.Tensor, expected: torch.Tensor) -> float:
    distance = (states.float() - expected.float()).norm(dim=1)
    return float((distance / expected.float().norm(dim=1)).max())


def check_states(run: Run, samples: list[dict[str, Any]], layers: tuple[int, ...]) -> None:
    texts, model, seen = run.found[0]["texts"], run.reference, []
    for sample in samples:
        tokens = sample["tokens"].tolist()
        number, start = next(
            (number, start)
            for number, text in enumerate(texts)
            for start in range(len(text))
            if text[start : start + len(tokens)] == tokens
        )
        seen.append(number)
        assert sample["prompt"] == max(0, run.found[0]["prompts"][number] - start)
        with torch.no_grad():
            output = model.model(torch.tensor([texts[number]]), output_hidden_states=True)
        part = slice(start, start + len(tokens))
        expected = torch.cat([output.hidden_states[layer][0, part] for layer in layers], -1)
        assert farthest(sample["states"], expected) < FAR
        assert farthest(sample["last"], output.last_hidden_state[0, part]) < FAR
    assert sorted(seen) == list(range(len(texts)))


def test_states_are_those_of_the_texts_tokens(run: Run) -> None:
    first = [found["with"]["taken"][0] for found in run.found]
    counts = {len(samples) for samples in first}
    assert counts == {len(run.found[0]["texts"]) // len(run.found)}  # equally many for each process
    assert {found["layers"] for found in run.found} == run.stages
    check_states(run, list(itertools.chain(*first)), HEAD_LAYERS)


def test_embeddings_are_a_layer_too(run: Run) -> None:
    trained = run.found[0]["with"]["weights"]
    for found in run.found:
        for sample in found["others"]:
            hidden = sample["states"].shape[1] // len(OTHER_LAYERS)
            rows = trained["model.embed_tokens.weight"][sample["tokens"]]
            assert torch.equal(sample["states"][:, :hidden], rows)


def test_matrices_are_the_policys_of_now(run: Run) -> None:
    model = run.reference
    for found in run.found:
        embeddings, output = found["with"]["matrices"][1]
        weights = found["with"]["weights"]
        assert torch.equal(embeddings, weights["model.embed_tokens.weight"].float())
        if model.config.tie_word_embeddings:
            assert output is embeddings or torch.equal(output, embeddings)
        else:
            assert torch.equal(output, weights["lm_head.weight"].float())
        assert not torch.equal(embeddings, model.get_input_embeddings().weight.float())


def test_one_head_learns_in_all_processes(run: Run) -> None:
    first = run.found[0]["with"]
    assert first["learned"][0]["updates"] > 0 and not first["failed"]
    for found in run.found:
        head = found["with"]["head"]
        assert found["with"]["learned"][0]["loss"] == first["learned"][0]["loss"]
        assert all(torch.equal(weight, head[name]) for name, weight in first["head"].items())
