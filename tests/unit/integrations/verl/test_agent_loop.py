import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from tensordict import NonTensorData, TensorDict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from sam_rollout.core.identity import RequestIdentity, group_of, identify
from sam_rollout.integrations.verl import agent_loop
from sam_rollout.integrations.verl.agent_loop import SamAgentLoopManager

SEED = 7
VERL_WORKER = agent_loop.AgentLoopWorkerTQ.__ray_metadata__.modified_class


class FakeClient:
    def __init__(self) -> None:
        self.calls: list[dict] = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        call = {"id": request_id, "prompt": list(prompt_ids)}
        self.calls.append(call | {"params": sampling_params, "kwargs": kwargs})
        await asyncio.sleep(0)
        return SimpleNamespace(token_ids=[1, 2])


@pytest.fixture
def client():
    return FakeClient()


@pytest.fixture
def worker(client, monkeypatch):
    async def two_turns(self, sampling_params, trajectory, **kwargs):
        prompt = list(kwargs["raw_prompt"])
        for turn in range(2):
            name = f"{kwargs['uid']}/{kwargs['session_id']}/{turn}"
            output = await self.server_manager.generate(
                name, prompt_ids=prompt, sampling_params=sampling_params, image_data=None
            )
            prompt = prompt + output.token_ids
            await asyncio.sleep(0)

    def take_client(self, config, llm_client, *args, **kwargs):
        self.server_manager = llm_client

    monkeypatch.setattr(VERL_WORKER, "__init__", take_client)
    monkeypatch.setattr(VERL_WORKER, "_run_agent_loop", two_turns)
    rollout = {"seed": SEED, "n": 8, "val_kwargs": {"n": 2}}
    algorithm = {"filter_groups": {"enable": True, "metric": "acc"}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "algorithm": algorithm})
    return agent_loop._SamAgentLoopWorker(config, client)


def run(
    worker, *, uid="u", prompt=(1, 2, 3), session=0, step=5, validate=False, params=None, **columns
):
    params = {"temperature": 1.0} if params is None else params
    trajectory = {"step": step, "validate": validate}
    row = {"uid": uid, "raw_prompt": prompt, "session_id": session, **columns}
    return worker._run_agent_loop(params, trajectory, **row)


def identities(client) -> dict[str, RequestIdentity]:
    return {
        call["id"]: RequestIdentity.from_extra_args(call["params"]["extra_args"])
        for call in client.calls
    }


@pytest.mark.parametrize(("validate", "split"), [(False, "train"), (True, "val")])
@pytest.mark.parametrize("first", [0, 24])
def test_a_request_says_who_it_is(worker, client, validate, split, first):
    columns = {agent_loop.FIRST_SIBLING_COLUMN: first} if first else {}
    asyncio.run(run(worker, session=2, validate=validate, **columns))
    expected = identify([1, 2, 3], seed=SEED, step=5, sibling=first + 2, split=split)
    assert identities(client)["u/2/0"] == replace(expected, prompt_tokens=3)


def test_later_turns_stay_in_the_first_turns_group(worker, client):
    asyncio.run(run(worker))
    first, second = client.calls
    assert second["prompt"] != first["prompt"]
    expected = replace(identities(client)["u/0/0"], prompt_tokens=5)
    assert identities(client)["u/0/1"] == expected
    assert identities(client)["u/0/1"].group == group_of([1, 2, 3])


def test_a_seed_changes_the_key_of_a_request_alone_too(worker, client):
    for seed in (None, 3, 4):
        asyncio.run(run(worker, uid=str(seed), params={"temperature": 1.0, "seed": seed}))
    keys = {name.split("/")[0]: identity.key for name, identity in identities(client).items()}
    assert len(set(keys.values())) == 3
    assert keys["None"] == identify([1, 2, 3], seed=SEED, step=5, sibling=0, split="train").key


def test_what_others_put_into_the_call_stays(worker, client):
    params = {"temperature": 1.0, "extra_args": {"other": 1}}
    asyncio.run(run(worker, params=params))
    (call, _) = client.calls
    assert call["params"]["extra_args"].keys() == {"other", "sam"}
    assert (call["params"]["temperature"], call["prompt"]) == (1.0, [1, 2, 3])
    assert call["kwargs"] == {"image_data": None}
    assert params == {"temperature": 1.0, "extra_args": {"other": 1}}


def submitted(
    prompts: list, step: int, *, validate: bool = False, numbers: list[int] | None = None
) -> TensorDict:
    rows = [{"raw_prompt": prompt} for prompt in prompts]
    if numbers is not None:
        rows = [row | {"__rollout_n__": n} for row, n in zip(rows, numbers, strict=True)]
    batch = list_of_dict_to_tensordict(rows)
    batch["global_steps"] = NonTensorData(step)
    if validate:
        batch["validate"] = NonTensorData(True)
    return batch


def test_the_manager_counts_copies_within_a_step_and_split(monkeypatch):
    numbered = []
    parent = agent_loop.AgentLoopManagerTQ
    monkeypatch.setattr(parent, "__init__", lambda self: None)
    monkeypatch.setattr(
        parent,
        "generate_sequences",
        lambda self, prompts: numbered.append(prompts[agent_loop.FIRST_SIBLING_COLUMN].tolist()),
    )
    manager = SamAgentLoopManager()
    manager.rollout_config = OmegaConf.create({"n": 8, "val_kwargs": {"n": 2}})
    one, other = ([{"role": "user", "content": text}] for text in ("1 + 1", "2 + 2"))
    manager.generate_sequences(submitted([one, other, one], step=5))
    manager.generate_sequences(submitted([one], step=5))
    manager.generate_sequences(submitted([one, other], step=5, validate=True))
    manager.generate_sequences(submitted([one, one], step=5, validate=True))
    manager.generate_sequences(submitted([one], step=6))
    manager.generate_sequences(submitted([other, other, other], step=6, numbers=[16, 4, 1]))
    assert numbered == [[0, 0, 8], [16], [0, 0], [2, 4], [0], [0, 16, 20]]


@pytest.fixture
def scoring(worker, monkeypatch):
    def score(outcome, *, validate=False, streamed=True):
        async def compute_score(self, outputs, kwargs):
            if isinstance(outcome, Exception):
                raise outcome
            outputs[-1].reward_score = outcome.get("score")
            outputs[-1].extra_fields = {"reward_extra_info": outcome}

        async def run_agent_loop(self, sampling_params, trajectory, **kwargs):
            await self._compute_score([SimpleNamespace(reward_score=None, extra_fields={})], {})

        monkeypatch.setattr(VERL_WORKER, "_compute_score", compute_score)
        monkeypatch.setattr(VERL_WORKER, "_run_agent_loop", run_agent_loop)
        worker.reward_loop_worker_handles = ["a handle"] if streamed else None

        async def settled():
            return await asyncio.gather(run(worker, validate=validate), return_exceptions=True)

        (error,) = asyncio.run(settled())
        noted = asyncio.run(worker.take_failures())
        assert [failure.count for failure in noted] == [1] * (error is not None)
        return noted[0] if noted else None

    return score


def test_a_reward_that_fails_is_noted(scoring):
    failure = scoring(ValueError("no judge"))
    assert (failure.text, failure.fatal) == ("ValueError: no judge", False)
    assert scoring({"score": 1.0, "acc": 0.0}) is None


def test_a_reward_that_cannot_be_used_fails_its_response(scoring):
    assert "score = None" in scoring({"acc": 1.0}).text
    assert "metric = 'acc': the reward gave None" in scoring({"score": 1.0, "acc": None}).text
    assert "a dict without 'score'" in scoring(KeyError("score")).text
    assert scoring(KeyError("other")).text == "KeyError: 'other'"


def test_a_filter_metric_that_no_reward_gives_is_found_at_the_first_response(scoring):
    failure = scoring({"score": 1.0, "pred": "4"})
    assert (
        failure.fatal and "the reward does not return it; it returns: pred, score" in failure.text
    )
    assert scoring({"score": 1.0, "pred": "4"}, validate=True) is None, "not filtered"
    assert scoring({}, streamed=False) is None, "a reward model comes later"
