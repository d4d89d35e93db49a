"""Processes that torchrun starts train one head, each on its texts."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

# The command, and every process writes down the head that it ends with.
COMMAND = """
import os, torch
from sam_rollout import cli
from sam_rollout.heads import front

def train(learner, *others):
    history = plain(learner, *others)
    torch.save(learner.head.state_dict(), f"{os.environ['HEADS']}.{os.environ['RANK']}.pt")
    return history

plain, front._train = front._train, train
cli.app()
"""


@pytest.fixture
def two_processes(tmp_path, model_folder, texts):
    """Runs `head train` in two processes; the record, and the head of either."""

    def run(name, *options):
        (tmp_path / "command.py").write_text(COMMAND)
        # With an output matrix of its own, which is then split too.
        config = Qwen3Config.from_pretrained(model_folder, tie_word_embeddings=False)
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
        output = tmp_path / name
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2,
            tmp_path / "command.py", "head", "train", "--model", tmp_path / "model",
            "--traces", texts, "--output", output, "--steps", 2, "--window", 16, "--updates", 20,
            *options,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HEADS": str(output)}
        launcher = subprocess.Popen(
            list(map(str, command)), env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = launcher.communicate(timeout=180)
        finally:
            launcher.terminate()  # torchrun then ends the others
            launcher.wait()
        assert launcher.returncode == 0, said
        assert said.count("tokens per verify step") == 1
        heads = [torch.load(f"{output}.{rank}.pt") for rank in (0, 1)]
        return json.loads((output / "training.json").read_text()), heads

    return run


def test_two_processes_train_one_head(two_processes):
    whole, heads = two_processes("whole")
    for name, tensor in heads[0].items():
        assert torch.equal(heads[1][name], tensor)
    assert sum(whole["loss"][-5:]) < 0.97 * sum(whole["loss"][:5])
    split, _ = two_processes("split", "--split-model")
    assert split["loss"] == pytest.approx(whole["loss"], rel=0.01)
    for one, other in zip(split["held_out"], whole["held_out"], strict=True):
        assert one["positions"] == other["positions"]
