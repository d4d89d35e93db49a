"""vLLM loads the tiny model's draft head as it is, and drafts with it what its training drafted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sam_rollout.bench.traces import Trace
from sam_rollout.config import SamConfig
from sam_rollout.heads.acceptance import acceptance
from sam_rollout.heads.checkpoint import QWEN3
from sam_rollout.heads.hidden_states import Policy
from sam_rollout.heads.model import Eagle3Head
from sam_rollout.heads.training import Learner
from sam_rollout.heads.writing import load_head, speculators_config, write_head
from tests.integration.conftest import MODEL

HEAD = Path(f"{MODEL}_eagle3")
STEPS = 3


@pytest.fixture(scope="module")
def sample(prompts):
    """`sample(temperature, **engine arguments)`: token ids of responses, and vLLM's counters."""
    from vllm import SamplingParams, TokensPrompt

    from sam_rollout.integrations.vllm.offline import offline_engine

    def run(temperature, **arguments):
        with offline_engine(
            MODEL, SamConfig(enabled=False), dtype="float32", max_model_len=1280, max_num_seqs=32,
            num_gpu_blocks_override=330, seed=5, disable_log_stats=False, **arguments,
        ) as engine:  # fmt: skip
            outputs = engine.generate(
                [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
                SamplingParams(temperature=temperature, max_tokens=256),
                use_tqdm=False,
            )
            counters = {m.name.removeprefix("vllm:spec_decode_"): m for m in engine.get_metrics()}
        return [list(output.outputs[0].token_ids) for output in outputs], counters

    return run


def drafting(head):
    """Engine arguments of a head."""
    return {
        "speculative_config": {
            "method": "eagle3", "model": str(head), "num_speculative_tokens": STEPS,
        }
    }  # fmt: skip


@pytest.fixture(scope="module")
def policy():
    return Policy.load(MODEL, torch.device("cpu"))


def write_other_kind(folder, policy):
    """The shipped head's matrices in another kind of head, with 400 output rows of its own."""
    config = policy.model.config.to_dict()
    shipped, shape, *_ = load_head(HEAD, config)
    shape = replace(
        shape, architecture=QWEN3, norm_before_residual=True, rope_theta=5000.0,
        draft_vocabulary=400,
    )  # fmt: skip
    head = Eagle3Head(shape)
    head.load_state_dict(shipped.state_dict(), strict=False)
    torch.nn.init.constant_(head.layers[0].self_attn.q_norm.weight, 2.0)
    chosen = torch.arange(50, 450)
    learner = Learner(head, policy, STEPS, chosen, 1.5 * policy.output[chosen])
    write_head(folder, learner, speculators_config(shape, config, MODEL, STEPS), config, {})
    return folder


@pytest.mark.parametrize("kind", ["shipped", "other"])
def test_the_engine_accepts_what_a_replay_of_its_texts_accepts(
    sample, prompts, policy, kind, tmp_path
):
    folder = HEAD if kind == "shipped" else write_other_kind(tmp_path / "head", policy)
    texts, counters = sample(1.0, **drafting(folder))
    drafts = counters["num_drafts"].value
    accepted = np.array(counters["num_accepted_tokens_per_pos"].values) / drafts
    head, shape, vocabulary, output = load_head(folder, policy.model.config.to_dict())
    traces = [
        Trace(str(i), 0, np.array(prompt, np.int32), np.array(text, np.int32))
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    samples = policy.read(traces, shape.target_layers, 2048)
    found = acceptance(Learner(head, policy, STEPS, vocabulary, output), samples)
    first, length = (0.8, 3) if kind == "shipped" else (0.1, 1.1)
    assert accepted[0] > first and 1 + accepted.sum() > length
    assert drafts == pytest.approx(found.positions / found.length, rel=0.01)  # verify steps


def test_greedy_texts_are_those_without_drafts(sample):
    texts, counters = sample(0.0, **drafting(HEAD))
    assert texts == sample(0.0)[0]
    assert counters["num_accepted_tokens"].value > counters["num_drafts"].value


def _send(worker, weights):
    """What `SamColocateWorkerExtension` does with a sync that brings these tensors."""
    from sam_rollout.integrations.vllm.head_update import HeadUpdates

    policys = []

    class Transfer:
        def update_weights_from_ipc(self):
            # In two buckets, the first of which holds tensors of both.
            for part in (weights[:5], weights[5:]):
                self._update_weights(iter(part))

        def _update_weights(self, weights):
            policys.extend(name for name, _ in weights)

    class Extension(HeadUpdates, Transfer):
        model_runner, vllm_config, device = (
            worker.model_runner, worker.vllm_config, worker.model_runner.device
        )  # fmt: skip

    Extension().update_weights_from_ipc()
    return policys


def test_weights_that_come_with_a_sync_draft_from_then_on(prompts, tmp_path):
    import json

    from vllm import SamplingParams, TokensPrompt

    from sam_rollout.heads.writing import write_fresh_head
    from sam_rollout.integrations.vllm.head_update import PREFIX
    from sam_rollout.integrations.vllm.offline import offline_engine

    config = json.loads(Path(MODEL, "config.json").read_text())
    write_fresh_head(tmp_path, config, str(MODEL), STEPS)
    head, *_ = load_head(HEAD, config)
    weights = [(PREFIX + name, tensor) for name, tensor in head.state_dict().items()]
    weights.insert(2, ("model.norm.weight", torch.ones(1)))
    drafter = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": STEPS}
    lengths, texts = [], []
    with offline_engine(
        MODEL, SamConfig(enabled=False), dtype="float32", max_model_len=1280, max_num_seqs=32,
        num_gpu_blocks_override=330, disable_log_stats=False, speculative_config=drafter,
    ) as engine:  # fmt: skip
        for policys in ([], ["model.norm.weight"]):
            if policys:
                (found,) = engine.collective_rpc(_send, args=(weights,))
                assert found == policys
            before = {m.name: m for m in engine.get_metrics()}
            outputs = engine.generate(
                [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
                SamplingParams(temperature=0.0, max_tokens=128), use_tqdm=False,
            )  # fmt: skip
            texts.append([output.outputs[0].token_ids for output in outputs])
            drafts, accepted = (
                next(
                    m.value - (before[m.name].value if m.name in before else 0)
                    for m in engine.get_metrics()
                    if m.name == f"vllm:spec_decode_num_{name}"
                )
                for name in ("drafts", "accepted_tokens")
            )
            lengths.append(1 + accepted / drafts)
    assert texts[0] == texts[1]
    assert lengths[0] < 1.2 and lengths[1] > 3
