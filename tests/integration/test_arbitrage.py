import argparse
import asyncio
import copy
import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config, Qwen2Model

from recipes.arbitrage import __main__ as command
from recipes.arbitrage import engines
from recipes.arbitrage.engines import RewardModel, Router, authors, judging_engine
from recipes.arbitrage.router import annotated
from recipes.arbitrage.steps import DRAFT, TARGET, Step, solve
from recipes.dapo_qwen3.evaluate import count_drafts
from recipes.dapo_qwen3.problems import TINY_MODEL
from sam_rollout.config import GateConfig, SamConfig, sources_of

pytestmark = pytest.mark.usefixtures("few_collections")

SMALL = ["--limit", "3", "--max-tokens", "80", "--max-step-tokens", "40", "--dtype", "float32",
         "--delimiter", "\\n"]  # fmt: skip


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    folder = tmp_path_factory.mktemp("router")
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(command.TINY_DRAFT, num_labels=2)
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(command.TINY_DRAFT).save_pretrained(folder)
    pairs = {"draft": [0.5, 1.0], "target": [1.0, 0.5], "chance": [0.6, 0.4]}
    pd.DataFrame(pairs).to_json(folder / "held_out.jsonl", orient="records", lines=True)
    (folder / "router.json").write_text("{}")
    return folder


def solutions_of(options):
    problems = command._problems(options, "test")
    return problems, command._engines(options, problems)


@pytest.fixture(autouse=True)
def always(monkeypatch):
    sam = SamConfig(gate=GateConfig("threshold", 1000), sources=sources_of("own"))
    monkeypatch.setattr(engines, "DRAFTER", sam)


def test_answers_of_every_mode_are_the_same_with_drafts_and_without(router, tmp_path):
    output = tmp_path / "report.json"
    options = ["report", *SMALL, "--router", str(router), "--shares", "0.5"]
    assert command.main([*options, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    rows = {row["mode"]: row for row in record["points"]}
    assert list(rows) == ["draft", "target", "rsd", "router", "oracle"]
    for row in rows.values():
        assert row["identical"] == {"off": 3, "on": 3}
    assert (rows["draft"]["target_share"], rows["draft"]["target_tokens"]) == (0, 0)
    assert (rows["target"]["target_share"], rows["target"]["draft_tokens"]) == (1, 0)
    assert 0 < rows["rsd"]["target_share"] < 1
    assert rows["oracle"]["target_tokens"] > rows["rsd"]["target_tokens"]


def test_steps_of_one_model_are_its_answer_in_one_go():
    options = command.parser().parse_args(["report", *SMALL])
    solutions, setup = solutions_of(options)
    whole = copy.deepcopy(solutions)
    with authors(*setup) as (_, target):
        for asked, drafts, changes in (
            (whole, False, {"max_step_tokens": 80, "delimiter": "never said"}),
            (solutions, True, {"max_step_tokens": 7, "delimiter": "\n"}),
        ):
            target.begin(drafts)
            target.options = argparse.Namespace(**vars(options) | changes)
            solve(asked, target)
            accepted = count_drafts(target.engine.collective_rpc("sam_drain"))[1]
            assert (accepted > 0) == drafts
    assert [one.tokens for one in solutions] == [one.tokens for one in whole]
    assert {len(one.steps) for one in whole} == {1}
    assert any(step.text.endswith("\n") for one in solutions for step in one.steps)


def judge_all(judge, solutions, steps):
    async def ask():
        waiting = [
            asyncio.create_task(judge(one, step))
            for one, step in zip(solutions, steps, strict=True)
        ]
        while not all(one.done() for one in waiting):
            await asyncio.sleep(0)
            judge.work()
        return await asyncio.gather(*waiting)

    return asyncio.run(ask())


def judged(solutions):
    for one in solutions:
        one.steps = [Step((1,), "Start with a=3.\n", TARGET, False)]
    return [Step((2,), f"Now b, {n}\n", DRAFT, False) for n in range(len(solutions))]


def test_vllm_and_transformers_agree_on_a_router(router):
    solutions, _ = solutions_of(command.parser().parse_args(["report", *SMALL]))
    steps = judged(solutions)
    with judging_engine(str(router), 0.1) as engine:
        found = judge_all(Router(engine), solutions, steps)
    model = AutoModelForSequenceClassification.from_pretrained(router)
    tokenizer = AutoTokenizer.from_pretrained(router)
    expected = []
    for solution, step in zip(solutions, steps, strict=True):
        ids = tokenizer(annotated(solution, step), return_tensors="pt")
        with torch.no_grad():
            expected.append(model(**ids).logits.softmax(-1)[0, 1].item())
    assert found == pytest.approx(expected, abs=0.02)  # vLLM computes in bfloat16
    assert np.ptp(found) > 0


def test_a_reward_model_scores_the_last_step_at_its_tag(tmp_path):
    tag = "<extra_0>"
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.add_tokens([tag])
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(6)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tokenizer), num_hidden_layers=2, num_key_value_heads=2, **sizes
    )
    config.architectures = ["Qwen2ForProcessRewardModel"]
    config.save_pretrained(tmp_path)
    body = Qwen2Model(config).eval()
    score = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    weights = {f"model.{name}": value for name, value in body.state_dict().items()}
    weights |= {f"score.{name}": value for name, value in score.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")

    solutions, _ = solutions_of(command.parser().parse_args(["report", *SMALL]))
    steps = judged(solutions)
    with judging_engine(str(tmp_path), 0.1) as engine:
        judge = RewardModel(engine, tag)
        texts = [judge.text(one, step) for one, step in zip(solutions, steps, strict=True)]
        found = judge_all(judge, solutions, steps)
        with pytest.raises(ValueError, match="step tag 'two words': must be one token"):
            RewardModel(engine, "two words")
    assert all(
        text.endswith(f"Start with a=3.{tag}Now b, {n}{tag}") for n, text in enumerate(texts)
    )
    with torch.no_grad():
        expected = [
            score(body(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1])
            .softmax(-1)[1]
            .item()
            for text in texts
        ]
    assert found == pytest.approx(expected, abs=0.02)


def test_models_of_different_vocabularies_are_refused(tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(command.TINY_DRAFT)
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path)
    assert command.main(["report", *SMALL, "--modes", "draft", "--draft", str(tmp_path)]) == 2
    assert "must have one vocabulary" in capsys.readouterr().err
