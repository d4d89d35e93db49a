"""Heads learn, in the same way every time, and are tested on texts they have not seen."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from sam_rollout.bench.traces import Trace
from sam_rollout.cli import app
from sam_rollout.heads import training
from sam_rollout.heads.acceptance import acceptance, tokens_per_step
from sam_rollout.heads.checkpoint import default_layers
from sam_rollout.heads.front import frequent_tokens, split
from sam_rollout.heads.training import Learner, TrainingSettings, train
from sam_rollout.heads.writing import load_head
from sam_rollout.settings import ConfigError

SETTINGS = TrainingSettings(updates=40, batch=4, window=16, warmup=2)


@pytest.fixture(scope="module")
def samples(policy, traces):
    return policy.read(traces, default_layers(6), max_tokens=64)


def test_hidden_states_are_those_of_the_layers(policy, traces, samples):
    trace, sample = traces[3], samples[3]
    with torch.no_grad():
        out = policy.model(torch.tensor(trace.tokens)[None].long(), output_hidden_states=True)
    near = {"atol": 0.05, "rtol": 0.02}  # bfloat16
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
    first, total = len(trace.prompt), len(trace.tokens)  # the first response token is no draft
    for step in steps:
        places = range(first + 1 + step.number, total)
        assert step.tokens.tolist() == trace.tokens[first + 1 + step.number :].tolist()
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
    losses = [now.loss for now in train(learner, samples, SETTINGS)]
    assert len(losses) == SETTINGS.updates
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    after = acceptance(learner, samples)
    assert after.length > before.length
    assert after.per_position[0] > before.per_position[0]


@pytest.mark.parametrize("reduced", [None, 30])
def test_a_large_vocabulary_is_gone_through_in_parts(
    policy, traces, samples, make_head, reduced, monkeypatch
):
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
        assert list(train(learner, samples, settings))[-1].share == 1
        return torch.cat([p.detach().flatten() for p in learner.head.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_minutes_end_the_training(policy, samples, make_head):
    settings = TrainingSettings(updates=None, minutes=1e-6, batch=2, window=12)
    (now,) = train(Learner(make_head(), policy, 2), samples, settings)
    assert now.updates == 1 and now.share >= 1


def test_a_loss_that_is_no_number_ends_the_training(policy, samples, make_head):
    head = make_head()
    torch.nn.init.constant_(head.norm.weight, float("nan"))
    with pytest.raises(ConfigError, match="the loss was nan after 0 updates"):
        list(train(Learner(head, policy, 2), samples, SETTINGS))


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [([], (0, 0)), ([0, 0, 0], (3, 3)), ([3, 0, 0, 0], (4, 1)), ([1, 3, 0, 2, 1, 0], (6, 3))],
)
def test_texts_are_replayed_step_by_step(accepted, expected):
    assert tokens_per_step(accepted) == expected


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


def test_the_command_trains_and_writes_a_head(model_folder, texts, tmp_path):
    output, picture = tmp_path / "head", tmp_path / "head.png"
    result = run(
        "--model", model_folder, "--traces", texts, "--output", output, "--updates", 12,
        "--steps", 2, "--draft-vocab", 30, "--window", 16, "--picture", picture,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "tokens per verify step" in result.output
    assert load_file(output / "model.safetensors")["d2t"].shape == (30,)
    record = json.loads((output / "training.json").read_text())
    assert record["updates"] == 12 and record["base_model"]["hidden_size"] == 32
    assert len(record["held_out"][-1]["per_position"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_training_begins_with_another_head(model_folder, model_config, texts, tmp_path):
    common = ["--model", model_folder, "--traces", texts, "--steps", 2, "--window", 16]
    first, second = tmp_path / "first", tmp_path / "second"
    result = run(*common, "--output", first, "--updates", 30, "--layers", "1,4")
    assert result.exit_code == 0, result.output
    result = run(*common, "--output", second, "--updates", 1, "--start", first)
    assert result.exit_code == 0, result.output
    heads = [load_head(folder, model_config) for folder in (first, second)]
    assert heads[1].shape == heads[0].shape and heads[0].shape.target_layers == (1, 4)
    losses = [json.loads((f / "training.json").read_text())["loss"] for f in (first, second)]
    assert losses[1][0] < 0.9 * losses[0][0]
    refused = run(*common, "--output", second, "--start", first, "--layers", "1,4")
    assert refused.exit_code == 2 and "decides its layers" in refused.output
    config = model_config | {"vocab_size": 50}
    (first / "training.json").write_text(json.dumps({"base_model": config}))
    refused = run(*common, "--output", second, "--start", first)
    assert refused.exit_code == 2 and "made for a model with vocab_size = 50" in refused.output


def test_a_training_that_was_cut_off_goes_on(model_folder, texts, tmp_path, monkeypatch):
    common = ["--model", model_folder, "--traces", texts, "--steps", 2, "--window", 16]
    common += ["--updates", 20]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*common, "--output", whole).exit_code == 0
    looked = []

    def cut_off(learner, samples, peers):
        looked.append(samples)
        if len(looked) == 5:
            raise KeyboardInterrupt
        return acceptance(learner, samples)

    with monkeypatch.context() as patch:
        patch.setattr("sam_rollout.heads.front.acceptance", cut_off)
        assert run(*common, "--output", parts).exit_code != 0
    assert [file.name for file in parts.iterdir()] == ["training_state.pt"]
    refused = run(*common, "--output", parts)
    assert refused.exit_code == 2 and "go on with --resume" in refused.output
    refused = run(*common, "--output", parts, "--resume", "--batch", 9)
    assert refused.exit_code == 2 and "--resume: batch = 9: was 8 before" in refused.output
    result = run(*common, "--output", parts, "--resume")
    assert result.exit_code == 0, result.output
    for name in ("model.safetensors", "config.json", "training.json"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert sorted(file.name for file in parts.iterdir()) == sorted(f.name for f in whole.iterdir())
    refused = run(*common, "--output", parts, "--resume")
    assert refused.exit_code == 2 and "holds no training that was cut off" in refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere", "--traces", "x.jsonl", "--layers", "2,b"], "2,b"),
        (["--model", "nowhere", "--traces", "x.jsonl"], "No such file"),
        (["--model", "nowhere"], "texts of the policy: --run or --traces"),
    ],
)
def test_the_command_says_what_it_lacks(tmp_path, arguments, message):
    result = run("--output", tmp_path / "head", *arguments)
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "head").exists()
