import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from sam_rollout.cli import app
from sam_rollout.core.settings import ConfigError
from sam_rollout.core.traces import Trace
from sam_rollout.heads import training
from sam_rollout.heads.checkpoint import default_layers
from sam_rollout.heads.expected_acceptance import acceptance
from sam_rollout.heads.offline_training import frequent_tokens, split
from sam_rollout.heads.training import Learner, TrainingSettings, train
from sam_rollout.heads.writing import load_head

SETTINGS = TrainingSettings(updates=40, batch=4, window=16, warmup=2)


@pytest.fixture(scope="module")
def samples(policy, traces):
    return policy.read(traces, default_layers(6), max_tokens=64)


def test_hidden_states_are_those_of_the_layers(policy, traces, samples):
    trace, sample = traces[3], samples[3]
    with torch.no_grad():
        out = policy.model(torch.tensor(trace.tokens)[None].long(), output_hidden_states=True)
    near = {"atol": 0.05, "rtol": 0.02}  # states are in bfloat16
    expected = torch.cat([out.hidden_states[layer][0] for layer in (2, 3, 4)], -1)
    torch.testing.assert_close(sample.states.float(), expected, **near)
    torch.testing.assert_close(sample.last.float() @ policy.output.T, out.logits[0], **near)
    assert sample.prompt == len(trace.prompt) and sample.tokens.tolist() == trace.tokens.tolist()


def test_long_texts_are_cut_and_unknown_tokens_refused(policy, traces):
    (short,) = policy.read(traces[:1], (2,), max_tokens=7)
    assert len(short.tokens) == len(short.states) == len(short.last) == 7
    unknown = Trace("x", 0, np.zeros(1, np.int32), np.array([3, 48], np.int32))
    with pytest.raises(ConfigError, match="= 48: must be below 48"):
        policy.read([unknown], (2,), max_tokens=7)


def test_targets_are_what_the_policy_says_of_the_drafted_token(policy, traces, samples, make_head):
    trace = traces[0]
    with torch.no_grad():
        logits = policy.model(torch.tensor(trace.tokens)[None].long()).logits[0]
    steps = list(Learner(make_head(), policy, 3).unrolled([samples[0]]))
    first, total = len(trace.prompt), len(trace.tokens)  # the first response token is never drafted
    for number, step in enumerate(steps):
        places = range(first + 1 + number, total)
        assert step.tokens.tolist() == trace.tokens[first + 1 + number :].tolist()
        expected = logits[[place - 1 for place in places]].softmax(-1)
        torch.testing.assert_close(step.target, expected, atol=0.02, rtol=0.1)


def test_a_batch_is_its_texts_one_by_one(policy, samples, make_head):
    learner = Learner(make_head(), policy, 2)
    together = list(learner.unrolled(samples[:3]))
    alone = [list(learner.unrolled([sample])) for sample in samples[:3]]
    for number, step in enumerate(together):
        torch.testing.assert_close(step.logits, torch.cat([a[number].logits for a in alone]))


@pytest.mark.parametrize("reduced", [None, 30])
def test_the_loss_falls_and_drafts_get_better(policy, traces, samples, make_head, reduced):
    vocabulary = frequent_tokens(traces, reduced or 48, 48)
    learner = Learner(make_head(reduced), policy, 3, vocabulary)
    before = acceptance(learner, samples)
    losses = list(train(learner, samples, SETTINGS))
    assert len(losses) == SETTINGS.updates
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    after = acceptance(learner, samples)
    assert after.length > before.length
    assert after.per_position[0] > before.per_position[0]


@pytest.mark.parametrize("reduced", [None, 30])
def test_large_vocabularies_go_in_parts(policy, traces, samples, make_head, reduced, monkeypatch):
    learner = Learner(make_head(reduced), policy, 3, reduced and frequent_tokens(traces, 30, 48))

    def gradients():
        learner.head.zero_grad()
        loss = learner.loss(samples[:5])
        loss.backward()
        return [loss, *(p.grad.clone() for p in learner.head.parameters())]

    whole = gradients()
    monkeypatch.setattr(training, "LARGEST", 7 * 48)
    for one, other in zip(whole, gradients(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_the_seed_decides(policy, samples, make_head):
    def weights(seed):
        learner = Learner(make_head(seed=seed), policy, 2)
        settings = TrainingSettings(updates=3, batch=2, window=12, seed=seed)
        assert len(list(train(learner, samples, settings))) == 3
        return torch.cat([p.detach().flatten() for p in learner.head.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_a_loss_that_is_no_number_ends_the_training(policy, samples, make_head):
    head = make_head()
    torch.nn.init.constant_(head.norm.weight, float("nan"))
    with pytest.raises(ConfigError, match="the loss was nan after 0 updates"):
        list(train(Learner(head, policy, 2), samples, SETTINGS))


def test_responses_to_one_prompt_stay_on_one_side():
    nothing, response = np.zeros(1, np.int32), np.arange(5, dtype=np.int32)
    traces = [Trace(str(i % 20), i // 20, nothing, response) for i in range(60)]
    learning, held_out = split(traces)
    assert len(learning) + len(held_out) == 60 and len(held_out) == 12
    assert not {trace.group for trace in learning} & {trace.group for trace in held_out}
    with pytest.raises(ConfigError, match="prompts in the traces = 7: must be at least 8"):
        split(traces[:7])


def run(*arguments):
    return CliRunner().invoke(app, ["head", "train", *map(str, arguments)])


def test_the_command_trains_and_begins_with_a_head(model_folder, model_config, texts, tmp_path):
    common = ["--model", model_folder, "--traces", texts, "--steps", 2]
    first, second = tmp_path / "first", tmp_path / "second"
    result = run(*common, "--output", first, "--updates", 30, "--draft-vocab", 30)
    assert result.exit_code == 0, result.output
    assert "acceptance length is" in result.output
    assert load_file(first / "model.safetensors")["d2t"].shape == (30,)
    record = json.loads((first / "training.json").read_text())
    assert record["updates"] == 30 and record["base_model"]["hidden_size"] == 32
    assert [len(found["per_position"]) for found in record["held_out"]] == [2] * 10
    result = run(*common, "--output", second, "--updates", 1, "--start", first, "--split-model")
    assert result.exit_code == 0, result.output
    assert load_head(second, model_config).shape == load_head(first, model_config).shape
    again = json.loads((second / "training.json").read_text())
    assert again["loss"][0] < 0.9 * record["loss"][0]
    refused = run(*common, "--output", second, "--start", first, "--draft-vocab", 30)
    assert refused.exit_code == 2 and "has its own vocabulary" in refused.output


def test_the_command_says_what_it_lacks(tmp_path):
    for texts, message in ((["--traces", "x.jsonl"], "No such file"), ([], "--traces")):
        result = run("--output", tmp_path / "head", "--model", "nowhere", *texts)
        assert result.exit_code == 2 and message in result.output
        assert not (tmp_path / "head").exists()


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
        launcher.terminate()  # torchrun then ends its processes
        launcher.wait()
    assert launcher.returncode == 0, said
    assert said.count("acceptance length is") == 1
    loss = json.loads((tmp_path / "training.json").read_text())["loss"]
    assert sum(loss[-5:]) < 0.97 * sum(loss[:5])
