"""Gives every generation request of verl an identity: step, split, prompt and sibling number.

Each response runs in its own asyncio task. The agent-loop worker stores the response's step, split
and sibling number in a context variable of this task. `IdentityClient` adds the prompt's token ids.
"""

import contextvars
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from sam_rollout.core.identity import TRAIN_SPLIT, VAL_SPLIT, RequestIdentity, group_of, key_of
from sam_rollout.integrations.verl.failures import Failure, FailureBook, cause_of, is_not_kept
from sam_rollout.integrations.verl.interruptions import tokens_by_weights
from sam_rollout.integrations.verl.registered_names import TOKENS_BY_WEIGHTS
from sam_rollout.integrations.verl.request_keys import RequestKeys
from sam_rollout.integrations.verl.rewards import UnjudgedError, check_reward


@dataclass
class _Response:
    step: int
    split: str
    sibling: int
    # Siblings share the prompt of the first turn. Prompts of later turns contain earlier answers.
    first_prompt_ids: Sequence[int] = ()
    keys: RequestKeys = field(default_factory=RequestKeys)


# Column that we add to a batch of prompts: the sibling number of each row's first response. If an
# earlier row of the step has an equal prompt, the responses of that row have the smaller numbers.
FIRST_SIBLING_COLUMN = "sam_first_sibling"
# Column that verl adds to some batches: the number of responses to each prompt.
OWN_NUMBER_COLUMN = "__rollout_n__"

_current_response: contextvars.ContextVar[_Response] = contextvars.ContextVar("sam_response")


class IdentityClient:
    """Wraps verl's ``LLMServerClient``; puts a request's identity into the sampling parameters."""

    def __init__(self, client: Any, seed: int) -> None:
        self._client = client
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        response = _current_response.get()
        response.first_prompt_ids = response.first_prompt_ids or tuple(prompt_ids)
        chain = response.keys.begin(prompt_ids)
        group, seed = group_of(response.first_prompt_ids), sampling_params.get("seed")
        given = "" if seed in (None, -1) else f"seed {seed}"  # vLLM reads -1 as no seed
        name = "/".join(filter(None, [group, chain.name, given]))
        identity = RequestIdentity(
            group=group,
            sibling=response.sibling,
            step=response.step,
            split=response.split,
            key=key_of(self._seed, response.step, name, response.sibling),
            prompt_tokens=len(prompt_ids),
        )
        extra_args = {**(sampling_params.get("extra_args") or {}), **identity.to_extra_args()}
        sampling_params = {**sampling_params, "extra_args": extra_args}
        try:
            output = await self._client.generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs
            )
        except BaseException:
            response.keys.abandon(chain)
            raise
        response.keys.end(chain, prompt_ids, output.token_ids)
        return output


class _SamAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        rollout = config.actor_rollout_ref.rollout
        client = IdentityClient(llm_client, seed=rollout.seed)
        filtering = config.algorithm.filter_groups
        self._filter_metric = filtering.metric if filtering.enable else None
        self._failures = FailureBook()
        agent_loop_tq.logger.addFilter(is_not_kept)
        super().__init__(config, client, *args, **kwargs)

    async def take_failures(self) -> list[Failure]:
        return self._failures.take()

    async def _compute_score(self, outputs: list[Any], kwargs: dict) -> None:
        try:
            await super()._compute_score(outputs, kwargs)
        except KeyError as error:
            if cause_of(error).args == ("score",):
                raise UnjudgedError(
                    "the reward gave a dict without 'score', which is needed"
                ) from error
            raise
        final = outputs[-1]
        final.extra_fields[TOKENS_BY_WEIGHTS] = list(tokens_by_weights.get().items())
        if self.reward_loop_worker_handles is None:
            return  # A reward model scores the whole batch later.
        metric = self._filter_metric if _current_response.get().split == TRAIN_SPLIT else None
        check_reward(final.reward_score, final.extra_fields.get("reward_extra_info") or {}, metric)

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any
    ) -> Any:
        split = VAL_SPLIT if trajectory["validate"] else TRAIN_SPLIT
        sibling = int(kwargs.pop(FIRST_SIBLING_COLUMN, 0)) + int(kwargs["session_id"])
        tokens_by_weights.set(Counter())
        _current_response.set(_Response(int(trajectory["step"]), split, sibling))
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            self._failures.note(error)
            raise


class SamAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent-loop manager; it also chooses the sibling numbers of responses.

    Responses to equal prompts get different sibling numbers. With the same sibling number, they
    would draw the same random numbers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(_SamAgentLoopWorker)
        # Split -> its current step, and the responses asked for in that step, counted per prompt.
        self._asked: dict[str, tuple[int, Counter[str]]] = {}

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Add the column `FIRST_SIBLING_COLUMN`, then dispatch the prompts as verl does."""
        # `prompts.get` would return a wrapper, and `bool` of a wrapper is always True.
        validate = bool(prompts["validate"]) if "validate" in prompts else False
        split, step = VAL_SPLIT if validate else TRAIN_SPLIT, int(prompts["global_steps"])
        if split not in self._asked or self._asked[split][0] != step:
            self._asked[split] = step, Counter()
        texts, asked, first = list(prompts["raw_prompt"]), self._asked[split][1], []
        rollout = self.rollout_config
        numbers: Any = rollout.val_kwargs.n if validate else rollout.n
        if OWN_NUMBER_COLUMN in prompts:
            numbers = prompts[OWN_NUMBER_COLUMN]
        if not hasattr(numbers, "__len__"):  # one number for all rows
            numbers = [numbers] * len(texts)
        for prompt, number in zip(map(repr, texts), numbers, strict=True):
            first.append(asked[prompt])
            asked[prompt] += int(number)
        prompts[FIRST_SIBLING_COLUMN] = torch.tensor(first)
        super().generate_sequences(prompts)
