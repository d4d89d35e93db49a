"""The models of Arbitrage in vLLM: two that write steps, and those that judge them.

The two that write have this project's drafter in them, and the coupled sampler. Its random numbers
are keyed by answer, model and position: an answer is the same with drafts and without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.arbitrage.router import annotated
from recipes.arbitrage.steps import DRAFT, TARGET, Solution, Step
from sam_rollout.config import RolloutSamplerConfig, SamConfig, sources_of
from sam_rollout.identity import VAL_SPLIT, identify
from sam_rollout.integrations.vllm.offline import offline_engine

if TYPE_CHECKING:
    from vllm import LLM

SAMPLER = RolloutSamplerConfig(kind="coupled")
# Drafts come from the answer itself and from other answers to its question in the same run: texts
# of an earlier mode would make the later ones of a comparison faster.
SIDES = {"off": SamConfig(enabled=False), "on": SamConfig(sources=sources_of("own", "siblings"))}


@dataclass(frozen=True)
class Sampling:
    """How both models sample; ``delimiter`` ends a step and belongs to it; limits in tokens."""

    delimiter: str = "\n\n"
    temperature: float = 1.0
    top_p: float = 1.0
    max_step_tokens: int = 512
    max_tokens: int = 4096
    seed: int = 0


@dataclass
class EngineAuthor:
    """One of the two models in an engine; counts ``tokens`` that it wrote, and runs."""

    name: str
    engine: LLM
    sampling: Sampling
    tokens: int = 0
    run: int = 0

    def __post_init__(self) -> None:
        self.tokenizer = self.engine.get_tokenizer()

    def begin(self) -> None:
        """Begin another answering, as if the engine had done nothing before."""
        self.engine.reset_prefix_cache()
        self.run, self.tokens = self.run + 1, 0

    def write(self, solutions: Sequence[Solution], sample: int = 0) -> list[Step]:
        """Write the next step of each solution, all in one call; as ``Author.write``."""
        from vllm import TokensPrompt

        said = [solution.tokens for solution in solutions]
        rooms = [self.sampling.max_tokens - len(tokens) for tokens in said]
        outputs = self.engine.generate(
            [
                TokensPrompt(prompt_token_ids=one.prompt + tokens)
                for one, tokens in zip(solutions, said, strict=True)
            ],
            [
                self._parameters(one, room, sample)
                for one, room in zip(solutions, rooms, strict=True)
            ],
            use_tqdm=False,
        )
        steps = [self._step(one.outputs[0], room) for one, room in zip(outputs, rooms, strict=True)]
        self.tokens += sum(len(step.tokens) for step in steps)
        return steps

    def _step(self, answer: Any, room: int) -> Step:
        """An output as a step: the last one if the model ended the answer, or no room is left."""
        delimiter, tokens = self.sampling.delimiter, list(answer.token_ids)
        delimited = answer.stop_reason == delimiter
        # Tokens that were verified together with the delimiter follow it, but not in the text.
        while delimited and delimiter in self.tokenizer.decode(tokens[:-1]):
            tokens.pop()
        goes_on = (delimited or answer.finish_reason == "length") and len(tokens) < room
        return Step(tuple(tokens), answer.text, self.name, not goes_on)

    def _parameters(self, solution: Solution, room: int, sample: int) -> Any:
        from vllm import SamplingParams

        # The models draw independently of each other: a second try is worth more that way.
        seed = 2 * self.sampling.seed + (self.name == TARGET)
        sibling = solution.identity.sibling
        own = identify(solution.prompt, seed=seed, step=sample, sibling=sibling, split=VAL_SPLIT)
        return SamplingParams(
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            max_tokens=min(self.sampling.max_step_tokens, room),
            stop=[self.sampling.delimiter],
            include_stop_str_in_output=True,
            extra_args=replace(own, step=self.run).to_extra_args(),
        )


@contextmanager
def authors(
    models: dict[str, str], sampling: Sampling, side: str, arguments: dict[str, dict[str, Any]]
) -> Iterator[tuple[EngineAuthor, EngineAuthor]]:
    """Run the draft model and the target for the length of a ``with`` statement.

    Args:
        models: ``DRAFT`` and ``TARGET`` to checkpoint folder or hub name.
        sampling: How both sample.
        side: Of ``SIDES``: whether our drafter is in both engines.
        arguments: ``DRAFT`` and ``TARGET`` to engine arguments.

    Raises:
        ValueError: The vocabularies differ: one model cannot go on from the other's tokens.
    """
    from transformers import AutoTokenizer

    draft, target = (AutoTokenizer.from_pretrained(models[name]) for name in (DRAFT, TARGET))
    if draft.get_vocab() != target.get_vocab():
        both = f"draft {models[DRAFT]}, target {models[TARGET]}"
        raise ValueError(f"{both}: must have one vocabulary, to go on from each other's tokens")

    def engine(name: str) -> Any:
        prefixes = {"enable_prefix_caching": True}
        return offline_engine(models[name], SIDES[side], SAMPLER, **prefixes | arguments[name])

    with engine(DRAFT) as first, engine(TARGET) as second:
        yield EngineAuthor(DRAFT, first, sampling), EngineAuthor(TARGET, second, sampling)


class _Judge:
    """A model of two classes that judges steps; calling it is a ``Scores``, numbers in 0..1."""

    task: str
    parameters: Any = None

    def __init__(self, engine: LLM) -> None:
        self.engine = engine
        self.tokenizer = engine.get_tokenizer()
        self.longest = engine.llm_engine.model_config.max_model_len

    def text(self, solution: Solution, step: Step) -> str:
        """What the model reads."""
        raise NotImplementedError

    def __call__(self, solutions: Sequence[Solution], steps: Sequence[Step]) -> np.ndarray:
        from vllm import TokensPrompt

        texts = [self.text(one, step) for one, step in zip(solutions, steps, strict=True)]
        # What does not fit is left out at the beginning: the step in question stands at the end.
        prompts = [self.tokenizer(text)["input_ids"][-self.longest :] for text in texts]
        outputs = self.engine.encode(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            pooling_task=self.task,
            pooling_params=self.parameters,
            use_tqdm=False,
        )
        # Of the last token, or of the text as a whole, the probability of the second class.
        return np.array([float(output.outputs.data.reshape(-1, 2)[-1, 1]) for output in outputs])


class Router(_Judge):
    """Chances that the target's step would have the higher process reward."""

    task = "classify"

    def text(self, solution: Solution, step: Step) -> str:
        """Question and steps, each with its author."""
        return annotated(solution, step)


class RewardModel(_Judge):
    """Process rewards of a model that scores steps at a tag, such as Qwen2.5-Math-PRM-7B."""

    task = "token_classify"

    def __init__(self, engine: LLM, tag: str) -> None:
        from vllm import PoolingParams

        super().__init__(engine)
        ids = self.tokenizer.encode(tag, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"step tag {tag!r}: must be one token of the reward model")
        self.tag = tag
        # Some classes of vLLM answer at the tags only; others at every token.
        if engine.llm_engine.model_config.pooler_config.tok_pooling_type == "STEP":
            self.parameters = PoolingParams(step_tag_id=ids[0])

    def text(self, solution: Solution, step: Step) -> str:
        """The conversation, with the tag after every step."""
        question = [{"role": "user", "content": solution.question}]
        begin = self.tokenizer.apply_chat_template(
            question, tokenize=False, add_generation_prompt=True
        )
        return begin + "".join(one.text.strip() + self.tag for one in [*solution.steps, step])


@contextmanager
def judging_engine(model: str, memory: float) -> Iterator[LLM]:
    """Run a model that classifies in a share of a device's memory, for a ``with`` statement."""
    arguments = {"runner": "pooling", "gpu_memory_utilization": memory}
    with offline_engine(model, SIDES["off"], enable_prefix_caching=True, **arguments) as engine:
        yield engine
