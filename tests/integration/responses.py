import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from sam_rollout.core.identity import identify
from sam_rollout.sources import NAMES


def requests(
    prompts: Sequence[list[int]],
    siblings: int = 1,
    *,
    max_tokens: int | Sequence[int],
    step: int = 0,
    **sampling: Any,
) -> tuple[list[Any], list[Any]]:
    """Return prompts and sampling parameters of requests to a ``vllm.LLM``.

    ``siblings`` is the number of requests with the same prompt. ``max_tokens`` is one number for
    all responses, or a number for each response. ``sampling`` contains more fields of
    ``SamplingParams``.
    """
    from vllm import SamplingParams, TokensPrompt

    asked = [(prompt, sibling) for prompt in prompts for sibling in range(siblings)]
    limits = [max_tokens] * len(asked) if isinstance(max_tokens, int) else max_tokens
    parameters = []
    for (prompt, sibling), limit in zip(asked, limits, strict=True):
        who = identify(prompt, seed=1, step=step, sibling=sibling, split="train")
        extra_args = who.to_extra_args()
        parameters.append(SamplingParams(**sampling, max_tokens=limit, extra_args=extra_args))
    return [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in asked], parameters


def generate(engine: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Return responses of a ``vllm.LLM`` to ``requests(*args, **kwargs)``, prompt by prompt."""
    outputs = engine.generate(*requests(*args, **kwargs), use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def texts(outputs: Iterable[Any]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def come_and_go(
    engine: Any,
    prompts: Sequence[list[int]],
    *,
    longest: int,
    aborts: bool = False,
    between: Callable[[Any], None] | None = None,
) -> dict[str, list[int]]:
    """Return responses to requests that join a few at a time; some have grammars or penalties.

    ``between`` is called with the ``LLMEngine`` every eleven steps.
    """
    from vllm.sampling_params import StructuredOutputsParams

    chance = random.Random(3)
    limits = [chance.randint(longest // 8, longest) for _ in prompts]
    asked, parameters = requests(prompts, max_tokens=limits, step=1, stop_token_ids=[7, 11, 13])
    for number, one in enumerate(parameters):
        kind = number % 4
        one.min_tokens = one.max_tokens // 2 if kind == 1 else 0
        one.repetition_penalty = 1.2 if kind == 2 else 1.0
        if kind == 3:
            one.structured_outputs = StructuredOutputsParams(regex="((yes|no) ){8}")
    core, joined, live, steps = engine.llm_engine, 0, [], 0
    found: dict[str, list[int]] = {}
    while joined < len(prompts) or core.has_unfinished_requests():
        if steps % 4 == 0:
            for number in range(joined, min(joined + 4, len(prompts))):
                live.append(str(number))
                core.add_request(live[-1], asked[number], parameters[number].clone())
                joined += 1
        if aborts and steps % 29 == 28 and live:
            core.abort_request([live.pop(chance.randrange(len(live)))])
        if between is not None and steps % 11 == 10:
            between(core)
        for output in core.step():
            if output.finished and output.request_id in live:
                live.remove(output.request_id)
                found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    return found


def drafts(report: dict[str, Any]) -> tuple[int, int]:
    books = report["requests"].values()
    return sum(book[1] for book in books), sum(book[2] for book in books)


def drafts_from(source: str, report: dict[str, Any]) -> tuple[int, int]:
    place = NAMES.index(source)
    columns = (report["steps"][f"{kind}_per_source"] for kind in ("drafted", "accepted"))
    drafted, accepted = (sum(row[place] for row in column if row) for column in columns)
    return drafted, accepted


def spied(patch: pytest.MonkeyPatch, owner: Any, *names: str) -> Counter[str]:
    counts: Counter[str] = Counter()

    def spy(name: str, method: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return method(*arguments, **options)

        return call

    for name in names:
        patch.setattr(owner, name, spy(name, getattr(owner, name)))
    return counts


def failing(owner: Any, name: str, at: int) -> list[None]:
    """Make a method fail in its call number `at`; return a list that gets an entry in each call."""
    method, calls = getattr(owner, name), []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == at:
            raise RuntimeError("broken on purpose")
        return method(*arguments, **options)

    setattr(owner, name, call)
    return calls


def runner_of(engine: Any) -> Any:
    return core_of(engine).model_executor.driver_worker.worker.model_runner


def proposer_of(engine: Any) -> Any:
    from sam_rollout.integrations.vllm.drafting.proposer import PROPOSER_ATTRIBUTE

    runner = runner_of(engine)
    return getattr(runner, PROPOSER_ATTRIBUTE, runner.drafter)


def session_of(engine: Any) -> Any:
    return proposer_of(engine).session


def core_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core


def counted(engine: Any, name: str) -> int:
    return sum(one.value for one in engine.get_metrics() if one.name == f"vllm:{name}")
