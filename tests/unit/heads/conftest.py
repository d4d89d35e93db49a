import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sam_rollout.core.traces import Trace
from sam_rollout.heads.eagle3 import Eagle3Head
from sam_rollout.heads.hidden_states import Policy
from sam_rollout.heads.writing import TrainableHead, fresh_head, write_head

VOCABULARY = 48


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("policy")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_config(model_folder):
    return json.loads((model_folder / "config.json").read_text())


@pytest.fixture(scope="session")
def policy(model_folder):
    return Policy.load(str(model_folder), torch.device("cpu"))


@pytest.fixture(scope="session")
def traces(policy):
    torch.manual_seed(1)
    found = []
    for number in range(24):
        prompt = torch.randint(VOCABULARY, (1, 4 + number % 3))
        ids = policy.model.generate(
            prompt, do_sample=True, max_new_tokens=20 + number % 5, min_new_tokens=20,
            pad_token_id=0,
        )[0].numpy().astype(np.int32)  # fmt: skip
        size = prompt.shape[1]
        found.append(Trace(str(number), 0, ids[:size], ids[size:]))
    return found


@pytest.fixture
def make_head(model_config):
    def make(draft_vocabulary=None, seed=0):
        return fresh_head(model_config, seed, draft_vocabulary).head

    return make


@pytest.fixture
def write(tmp_path, model_config):
    """Return a function that writes a head's folder.

    If `rows` is given, the head has its own output matrix with this number of rows, for token 3
    and the tokens after it.
    """

    def write(rows=None, **changes):
        shape = replace(fresh_head(model_config, 0, rows).shape, **changes)
        chosen = torch.arange(3, 3 + rows) if rows else None
        own = torch.randn(rows, 32).bfloat16().float() if rows else None
        head = TrainableHead(Eagle3Head(shape), shape, chosen, own)
        write_head(tmp_path / "head", head, model_config, "some/policy", 3, {})
        return tmp_path / "head"

    return write


@pytest.fixture
def texts(tmp_path, traces):
    lines = [{"prompt": t.prompt.tolist(), "response": t.response.tolist()} for t in traces]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "texts.jsonl"
