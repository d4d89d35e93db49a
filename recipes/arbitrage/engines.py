"""Runs the models of Arbitrage in vLLM: two models write steps, and others judge the steps.

The models that write use this project's drafter and the coupled sampler, so drafts do not change
an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recipes.arbitrage.router import annotated
from recipes.arbitrage.steps import DRAFT, TARGET, Solution, Step
from sam_rollout.config import RolloutSamplerConfig, SamConfig, sources_of
from sam_rollout.core.identity import VAL_SPLIT, identify
from sam_rollout.integrations.vllm.engine_settings import WITHOUT_DRAFTS_KEY
from sam_rollout.integrations.vllm.offline import offline_engine

if TYPE_CHECKING:
    from vllm import LLM

SAMPLER = RolloutSamplerConfig(kind="coupled")
# The source `run` is off. Otherwise drafts from one mode's texts would make the next mode of the
# comparison faster.
DRAFTER = SamConfig(sources=sources_of("own", "prompt"))


class Engine:
    """A model's engine, which accepts requests at any time."""

    def __init__(self, engine: LLM) -> None:
        self.engine = engine
        self.tokenizer = engine.get_tokenizer()
        self.waiting: dict[str, asyncio.Future] = {}
        self.names = itertools.count()

    async def ask(self, tokens: list[int], parameters: Any) -> Any:
        """Return the output of a request once ``work`` has finished the request."""
        from vllm import TokensPrompt

        name, ended = str(next(self.names)), asyncio.get_running_loop().create_future()
        prompt = TokensPrompt(prompt_token_ids=tokens)
        self.engine.llm_engine.add_request(name, prompt, parameters)
        self.waiting[name] = ended
        return await ended

    def work(self) -> None:
        if not self.waiting:
            return
        for output in self.engine.llm_engine.step():
            if output.finished:
                self.waiting.pop(output.request_id).set_result(output)

    def forget(self) -> None:
        """Empty the prefix cache before another run."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the engine did not reset its prefix cache: requests are under way")


class EngineAuthor(Engine):
    """A model that writes reasoning steps; several runs use it, one after another.

    ``run`` is the number of the current run, and ``tokens`` counts the tokens that the model has
    written in this run. ``options`` are the command's options, which say how both models sample.
    """

    def __init__(self, name: str, engine: LLM, options: argparse.Namespace) -> None:
        super().__init__(engine)
        self.name, self.options = name, options
        self.tokens = self.run = 0
        self.drafts = True

    def begin(self, drafts: bool) -> None:
        """Begin another run, either without drafts or with drafts from this run's answers."""
        self.forget()
        self.engine.collective_rpc("sam_drain")
        self.run, self.tokens, self.drafts = self.run + 1, 0, drafts

    async def write(self, solution: Solution, sample: int = 0) -> Step:
        said = solution.tokens
        room = self.options.max_tokens - len(said)
        output = await self.ask(solution.prompt + said, self._parameters(solution, room, sample))
        answer = output.outputs[0]
        tokens, delimited = tuple(answer.token_ids), answer.stop_reason == self.options.delimiter
        self.tokens += len(tokens)
        goes_on = (delimited or answer.finish_reason == "length") and len(tokens) < room
        return Step(tokens, answer.text, self.name, last=not goes_on)

    def _parameters(self, solution: Solution, room: int, sample: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Different seeds make the steps of the two models independent.
        seed = 2 * self.options.seed + (self.name == TARGET)
        sibling = solution.identity.sibling
        own = identify(solution.prompt, seed=seed, step=sample, sibling=sibling, split=VAL_SPLIT)
        asked = {} if self.drafts else {WITHOUT_DRAFTS_KEY: True}
        return SamplingParams(
            temperature=self.options.temperature,
            top_p=self.options.top_p,
            max_tokens=min(self.options.max_step_tokens, room),
            stop=[self.options.delimiter],
            include_stop_str_in_output=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=replace(own, step=self.run).to_extra_args() | asked,
        )


@contextmanager
def authors(
    models: dict[str, str], options: argparse.Namespace, arguments: dict[str, dict[str, Any]]
) -> Iterator[tuple[EngineAuthor, EngineAuthor]]:
    """Run the draft model and the target until the ``with`` statement ends.

    Raises:
        ValueError: The vocabularies differ, so one model cannot continue the other's tokens.
    """
    from transformers import AutoTokenizer

    draft, target = (AutoTokenizer.from_pretrained(models[name]) for name in (DRAFT, TARGET))
    if draft.get_vocab() != target.get_vocab():
        both = f"draft {models[DRAFT]}, target {models[TARGET]}"
        raise ValueError(f"{both}: must have one vocabulary, to continue each other's tokens")

    def engine(name: str) -> Any:
        settings = {"record": True, "enable_prefix_caching": True, **arguments[name]}
        return offline_engine(models[name], DRAFTER, SAMPLER, **settings)

    with engine(DRAFT) as first, engine(TARGET) as second:
        yield EngineAuthor(DRAFT, first, options), EngineAuthor(TARGET, second, options)


class _Judge(Engine):
    """A two-class classifier that rates steps with a number in 0..1; it serves as a ``Score``."""

    def __init__(self, engine: LLM, task: str) -> None:
        from vllm import PoolingParams

        super().__init__(engine)
        self.parameters = PoolingParams(task=task)
        self.longest = engine.llm_engine.model_config.max_model_len

    def text(self, solution: Solution, step: Step) -> str:
        raise NotImplementedError

    async def __call__(self, solution: Solution, step: Step) -> float:
        # The text ends with the step to judge. If the text is too long, its beginning is cut.
        tokens = self.tokenizer(self.text(solution, step))["input_ids"][-self.longest :]
        output = await self.ask(tokens, self.parameters.clone())
        # The output has two probabilities for every token (`token_classify`) or for the whole text
        # (`classify`).
        return float(output.outputs.data.reshape(-1, 2)[-1, 1])


class Router(_Judge):
    """Predicts the probability that the target's step would have the higher process reward."""

    def __init__(self, engine: LLM) -> None:
        super().__init__(engine, "classify")

    def text(self, solution: Solution, step: Step) -> str:
        return annotated(solution, step)


class RewardModel(_Judge):
    """A process reward model, such as Qwen2.5-Math-PRM-7B, which scores a step at its end tag."""

    def __init__(self, engine: LLM, tag: str) -> None:
        super().__init__(engine, "token_classify")
        ids = self.tokenizer.encode(tag, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"step tag {tag!r}: must be one token of the reward model")
        self.tag = tag
        # Some of vLLM's poolers return probabilities at end tags only, other poolers at every
        # token.
        if engine.llm_engine.model_config.pooler_config.tok_pooling_type == "STEP":
            self.parameters.step_tag_id = ids[0]

    def text(self, solution: Solution, step: Step) -> str:
        question = [{"role": "user", "content": solution.question}]
        begin = self.tokenizer.apply_chat_template(
            question, tokenize=False, add_generation_prompt=True
        )
        return begin + "".join(one.text.strip() + self.tag for one in [*solution.steps, step])


def judging_engine(model: str, memory: float) -> Any:
    """Return a context manager that runs a classifier; ``memory`` is its share of device memory."""
    arguments = {"runner": "pooling", "gpu_memory_utilization": memory}
    return offline_engine(model, SamConfig(enabled=False), enable_prefix_caching=True, **arguments)
