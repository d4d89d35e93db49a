from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sam_rollout.config import SamConfig
from sam_rollout.core.traces import Trace
from sam_rollout.heads.checkpoint import QWEN3
from sam_rollout.heads.eagle3 import Eagle3Head
from sam_rollout.heads.expected_acceptance import acceptance
from sam_rollout.heads.hidden_states import Policy
from sam_rollout.heads.training import Learner
from sam_rollout.heads.writing import TrainableHead, load_head, write_fresh_head, write_head
from sam_rollout.integrations.vllm.model_drafts.head_update import PREFIX
from tests.integration.conftest import MODEL

pytestmark = pytest.mark.usefixtures("few_collections")

HEAD = Path(f"{MODEL}_eagle3")
STEPS, FEW = 3, 8  # draft tokens; prompts whose greedy texts are compared


def engine(**arguments):
    from sam_rollout.integrations.vllm.offline import offline_engine

    return offline_engine(
        MODEL, SamConfig(enabled=False), dtype="float32", max_model_len=1280, max_num_seqs=32,
        num_gpu_blocks_override=330, seed=5, disable_log_stats=False, **arguments,
    )  # fmt: skip


def generate(engine, prompts, temperature):
    from vllm import SamplingParams, TokensPrompt

    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
        SamplingParams(temperature=temperature, max_tokens=256),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def counted(engine):
    found = {
        metric.name.removeprefix("vllm:spec_decode_"): metric for metric in engine.get_metrics()
    }
    accepted = found["num_accepted_tokens_per_pos"].values
    return np.array([found["num_drafts"].value, *accepted])


def drafting(head):
    return {
        "speculative_config": {
            "method": "eagle3", "model": str(head), "num_speculative_tokens": STEPS,
        }
    }  # fmt: skip


@pytest.fixture(scope="module")
def drafted(prompts):
    found, before = {}, np.zeros(1 + STEPS)
    with engine(**drafting(HEAD)) as drafter:
        for temperature, asked in (1.0, prompts), (0.0, prompts[:FEW]):
            texts = generate(drafter, asked, temperature)
            found[temperature] = texts, counted(drafter) - before
            before = counted(drafter)
    return found


@pytest.fixture(scope="module")
def policy():
    return Policy.load(MODEL, torch.device("cpu"))


def write_other_kind(folder, policy):
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
    trained = TrainableHead(head, shape, chosen, 1.5 * policy.output[chosen])
    write_head(folder, trained, config, MODEL, STEPS, {})


def assert_replayed(folder, policy, prompts, texts, counts):
    head, shape, vocabulary, output = load_head(folder, policy.model.config.to_dict())
    traces = [
        Trace(str(i), 0, np.array(prompt, np.int32), np.array(text, np.int32))
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    samples = policy.read(traces, shape.target_layers, 2048)
    found = acceptance(Learner(head, policy, STEPS, vocabulary, output), samples)
    # The first count is the number of verify steps.
    assert counts[0] == pytest.approx(found.positions / found.length, rel=0.01)
    return counts[1:] / counts[0]


def test_the_engine_accepts_what_a_replay_of_its_texts_accepts(drafted, policy, prompts):
    accepted = assert_replayed(HEAD, policy, prompts, *drafted[1.0])
    assert accepted[0] > 0.8 and 1 + accepted.sum() > 3


def test_it_does_so_with_a_head_of_another_kind(policy, prompts, tmp_path):
    write_other_kind(tmp_path, policy)
    with engine(**drafting(tmp_path)) as drafter:
        texts = generate(drafter, prompts, 1.0)
        counts = counted(drafter)
    accepted = assert_replayed(tmp_path, policy, prompts, texts, counts)
    assert accepted[0] > 0.1 and 1 + accepted.sum() > 1.1


def _send(worker, weights):
    from sam_rollout.integrations.vllm.model_drafts.head_update import HeadUpdates

    policys = []

    class Transfer:
        def update_weights_from_ipc(self):
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


def test_weights_that_come_with_a_sync_draft_from_then_on(drafted, policy, prompts, tmp_path):
    config = policy.model.config.to_dict()
    write_fresh_head(tmp_path, config, str(MODEL), STEPS)
    weights = load_head(HEAD, config).head.state_dict()
    sent = [(PREFIX + name, tensor) for name, tensor in weights.items()]
    sent.insert(2, ("model.norm.weight", torch.ones(1)))
    with engine(**drafting(tmp_path)) as drafter:
        assert generate(drafter, prompts[:FEW], 0.0) == drafted[0.0][0]
        before = counted(drafter)
        assert drafter.collective_rpc(_send, args=(sent,)) == [["model.norm.weight"]]
        assert generate(drafter, prompts[:FEW], 0.0) == drafted[0.0][0]
        after = counted(drafter) - before
    assert before[1:].sum() < 0.2 * before[0]
    assert after == pytest.approx(drafted[0.0][1])
