"""Processes that torchrun starts train one head, each on its texts."""

import copy
import dataclasses
import json
import os
import subprocess
import sys

import torch

from sam_rollout.heads.checkpoint import default_layers
from sam_rollout.heads.peers import Peers
from sam_rollout.heads.training import Learner, TrainingSettings, train
from tests.processes import in_processes

SETTINGS = TrainingSettings(updates=3, batch=2, window=12)


def train_together(rank, policy, head, samples):
    peers, head = Peers(torch.distributed.group.WORLD), copy.deepcopy(head)  # not the shared one
    losses = list(train(Learner(head, policy, 2), samples[rank::2], SETTINGS, peers))
    return losses, torch.cat([p.detach().flatten() for p in head.parameters()])


def test_two_processes_train_one_head(policy, traces, make_head):
    samples = policy.read(traces, default_layers(6), max_tokens=24)
    matrices = dataclasses.replace(policy, model=None)
    (losses, first), other = in_processes(train_together, 2, matrices, make_head(), samples)
    assert len(losses) == 3 and losses == other[0]
    assert (first == other[1]).all()


def test_the_command_trains_one_head_in_processes_of_torchrun(tmp_path, model_folder, texts):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2,
        "-m", "sam_rollout.cli", "head", "train", "--model", model_folder, "--traces", texts,
        "--output", tmp_path, "--steps", 2, "--updates", 20,
    ]  # fmt: skip
    launcher = subprocess.Popen(
        list(map(str, command)), env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = launcher.communicate(timeout=180)
    finally:
        launcher.terminate()  # torchrun then ends the others
        launcher.wait()
    assert launcher.returncode == 0, said
    assert said.count("acceptance length is") == 1
    loss = json.loads((tmp_path / "training.json").read_text())["loss"]
    assert sum(loss[-5:]) < 0.97 * sum(loss[:5])
