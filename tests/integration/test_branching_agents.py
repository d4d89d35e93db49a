import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams, TokensPrompt

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.verl import agent_loop
from sam_rollout.integrations.verl.agent_loop import IdentityClient
from sam_rollout.integrations.vllm.engine_settings import engine_arguments

MAX_TOKENS = 60
OFF = SamConfig(enabled=False)
ALWAYS = SamConfig(max_draft_tokens=8, gate=GateConfig("threshold", 10_000))


class EngineClient:
    def __init__(self, engine: Any, *, backwards: bool) -> None:
        self._engine, self._backwards = engine, backwards
        self._asked: list[tuple[list[int], dict[str, Any], asyncio.Future]] = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        answer = asyncio.get_running_loop().create_future()
        self._asked.append((prompt_ids, sampling_params, answer))
        return await answer

    async def run(self, loop: Any) -> Any:
        task = asyncio.ensure_future(loop)
        while not task.done():
            await asyncio.sleep(0.01)
            asked, self._asked = self._asked, []
            if not asked:
                continue
            outputs = self._engine.generate(
                [TokensPrompt(prompt_token_ids=list(prompt)) for prompt, _, _ in asked],
                [SamplingParams(**params) for _, params, _ in asked],
                use_tqdm=False,
            )
            answered = [*zip(asked, outputs, strict=True)]
            for (_, _, answer), output in reversed(answered) if self._backwards else answered:
                answer.set_result(SimpleNamespace(token_ids=list(output.outputs[0].token_ids)))
                await asyncio.sleep(0)
        return task.result()


async def branching(client: IdentityClient, prompt: list[int]) -> list[list[int]]:
    async def ask(text, **more):
        params = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **more}
        output = await client.generate("r", prompt_ids=text, sampling_params=params)
        return output.token_ids

    async def candidate(**more):
        first = await ask(prompt, **more)
        return first, await ask([*prompt, *first, prompt[0]])

    pairs = await asyncio.gather(candidate(), candidate(), candidate(), candidate(seed=3))
    return [*(part for pair in pairs for part in pair), await ask([*prompt, prompt[-1]])]


@pytest.fixture(scope="module")
def candidates(make_engine, prompts):
    def run(sam: SamConfig, *, backwards: bool) -> list[list[list[int]]]:
        engine = make_engine(sam, **engine_arguments(sam, RolloutSamplerConfig("coupled")))
        client = EngineClient(engine, backwards=backwards)

        async def one(prompt: list[int], sibling: int) -> list[list[int]]:
            agent_loop._current_response.set(agent_loop._Response(0, "train", sibling))
            return await branching(IdentityClient(client, seed=1), prompt)

        return [
            asyncio.run(client.run(one(prompt, sibling)))
            for prompt in prompts[:2]
            for sibling in range(2)
        ]

    return run


def test_candidates_differ_and_are_the_same_with_and_without_drafts(candidates):
    off = candidates(OFF, backwards=False)
    for texts in off:
        first = [tuple(text) for text in texts[0:8:2]]
        assert len(set(first)) == 4, "candidates of one prompt differ"
    assert len({tuple(map(tuple, texts)) for texts in off}) == len(off), "responses differ"
    assert candidates(ALWAYS, backwards=True) == off
