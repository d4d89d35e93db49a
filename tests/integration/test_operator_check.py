import pytest

from sam_rollout.integrations.vllm.operators import operator_check
from sam_rollout.integrations.vllm.operators.operator_check import OperatorCheck, run
from tests.integration.conftest import MODEL

pytestmark = pytest.mark.usefixtures("few_collections")

K = 3
TOKENS = 24
LIMIT = 1e-3


@pytest.fixture(scope="module")
def check() -> OperatorCheck:
    return OperatorCheck(MODEL, "float32", (K,), TOKENS, prompts=3)


def test_verifying_agrees_with_decoding_and_whole_groups_were_verified(check):
    result = run(check)
    alone, verified = result["rows"]
    assert (alone["draft_tokens"], verified["draft_tokens"]) == (0, K)
    assert alone["overall"]["positions"] == check.prompts * (TOKENS - 1)
    assert verified["overall"]["positions"] >= check.prompts * (TOKENS - 1 - K)
    assert alone["overall"]["maximum"] < LIMIT
    assert result["maximum"] == verified["overall"]["maximum"] < LIMIT


def test_another_context_is_noticed(check, monkeypatch):
    verify = operator_check._verify

    def after_other_prompts(check, prompts, *rest):
        return verify(check, prompts[1:] + prompts[:1], *rest)

    monkeypatch.setattr(operator_check, "_verify", after_other_prompts)
    result = run(check)
    assert result["maximum"] > 100 * LIMIT
    assert result["rows"][1]["overall"]["top_differs"] > 0


def test_rows_round_alike_in_bfloat16():
    rows = run(OperatorCheck(MODEL, "bfloat16", (K,), TOKENS, prompts=2))["rows"]
    assert [row["overall"]["maximum"] for row in rows] == [0, 0]
