"""The proposer with a runner that holds nothing but a batch."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from sam_rollout.config import (
    ConfigError,
    GateConfig,
    SamConfig,
    SiblingsSourceConfig,
    SourcesConfig,
)
from sam_rollout.gating import EngineStep, GuardedGate
from sam_rollout.identity import identify
from sam_rollout.integrations.vllm.proposer import SamProposer, steps_in_lockstep
from sam_rollout.integrations.vllm.settings import engine_arguments

MAX_ROWS, MAX_LEN, BUDGET = 4, 64, 64
THRESHOLD = 2
K = 3
PERIOD = [5, 6, 7, 8]
LOGGER = "sam_rollout.integrations.vllm.proposer"


def vllm_config(config: SamConfig, engine_k: int | None = None) -> SimpleNamespace:
    arguments = engine_arguments(config)
    k = config.max_draft_tokens if engine_k is None else engine_k
    return SimpleNamespace(
        additional_config=arguments["additional_config"],
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_ROWS, max_num_batched_tokens=BUDGET),
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
    )


class Engine:
    """Calls a proposer as vLLM's model runner does."""

    def __init__(
        self,
        *,
        bound: bool = True,
        record: bool = True,
        used: bool = True,
        pad_drafts: str = "auto",
        siblings: bool = False,
        gate: GateConfig | None = None,
    ) -> None:
        config = SamConfig(
            max_draft_tokens=K,
            pad_drafts=pad_drafts,
            gate=gate or GateConfig(threshold=THRESHOLD),
            sources=SourcesConfig(siblings=SiblingsSourceConfig(enabled=siblings)),
        )
        self.proposer = SamProposer(vllm_config(config))
        self.requests: dict[str, list[int]] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        if bound:
            self.proposer.bind(self, drafts_are_used=used, record=record)

    def add(self, *names: str) -> None:
        for name in names:
            self.requests[name] = PERIOD * 2 + PERIOD[:1]

    def step(self, *names: str, sampled: int = 1) -> list[list[int]]:
        """Sample the period's next tokens for each request, then ask for drafts."""
        self.input_batch.req_ids = list(names)
        new_tokens = []
        for name in names:
            text = self.requests[name]
            tokens = [PERIOD[(len(text) + i) % len(PERIOD)] for i in range(sampled)]
            text += tokens
            new_tokens.append(tokens)
        token_ids = np.zeros((MAX_ROWS, MAX_LEN), np.int32)
        lengths = np.zeros(MAX_ROWS, np.int32)
        for row, name in enumerate(names):
            lengths[row] = len(self.requests[name])
            token_ids[row, : lengths[row]] = self.requests[name]
        return self.proposer.propose(new_tokens, lengths, token_ids, slot_mappings=None)

    def counter(self, name: str) -> float:
        return self.proposer.drain()["counters"][name]


def next_of_period(text: list[int]) -> list[int]:
    return [PERIOD[(len(text) + i) % len(PERIOD)] for i in range(K)]


def test_drafts_what_followed_before():
    engine = Engine()
    engine.add("a", "b")
    drafts = engine.step("a", "b")
    assert drafts == [next_of_period(engine.requests[name]) for name in ("a", "b")]


def test_a_closed_gate_drafts_nothing_but_keeps_reading():
    engine = Engine()
    engine.add("a", "b", "c")
    assert engine.step("a", "b", "c") == [[], [], []]
    read = sum(map(len, engine.requests.values()))
    assert engine.counter("catch_up_tokens") == read
    assert engine.step("a") == [next_of_period(engine.requests["a"])]
    assert engine.counter("catch_up_tokens") == read + 1, "only the new token is left to read"


def test_the_gates_budget_bounds_every_draft():
    engine = Engine(gate=GateConfig(kind="schedule", schedule={1: 3, 2: 1}))
    engine.add("a", "b", "c")
    assert list(map(len, engine.step("a", "b", "c"))) == [0, 0, 0]
    assert list(map(len, engine.step("a", "b"))) == [1, 1]
    assert list(map(len, engine.step("a"))) == [3]


class GateOnRecord:
    """Keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[EngineStep] = []

    def observe(self, step: EngineStep) -> None:
        self.seen.append(step._replace(drafts=step.drafts.copy(), filling=step.filling.copy()))

    def budget(self, rows: int, *, whole: bool = False) -> int:
        return K

    def counters(self) -> dict[str, float]:
        return {}


def test_the_gate_sees_what_became_of_its_drafts():
    engine = Engine()
    gate = GateOnRecord()
    engine.proposer.gate = GuardedGate(gate)
    engine.add("a", "b")
    engine.step("a", "b")
    engine.step("b", "a", sampled=2)
    engine.step("b", "a", sampled=1)
    first, second, third = gate.seen
    assert [step.same_batch for step in gate.seen] == [False, False, True]
    assert [first.drafts.tolist(), second.drafts.tolist()] == [[0, 0], [K, K]]
    assert (second.sampled.tolist(), third.sampled.tolist()) == ([2, 2], [1, 1])
    assert first.now_ns < second.now_ns < third.now_ns
    assert third.num_tokens.sum() == second.num_tokens.sum() + 2


def test_a_gate_that_fails_closes_and_the_drafter_reads_on(caplog):
    engine = Engine()
    engine.proposer.gate._gate = None
    engine.add("a")
    with caplog.at_level(logging.WARNING):
        assert [engine.step("a") for _ in range(3)] == [[[]]] * 3
    assert len(caplog.records) == 1
    counters = engine.proposer.drain()["counters"]
    assert (counters["gate/failures"], counters["failures"]) == (1, 0)
    assert counters["catch_up_tokens"] == len(engine.requests["a"])


@pytest.mark.parametrize(
    ("size", "experts", "moe", "expected"),
    [
        (1, True, True, False),
        (2, True, True, True),
        (2, False, True, True),  # experts are split over all ranks
        (2, False, False, False),  # vLLM runs engines of dense models apart
    ],
)
def test_engines_that_share_experts_are_in_lockstep(size, experts, moe, expected):
    config = vllm_config(SamConfig(gate=GateConfig(kind="auto")))
    config.parallel_config = SimpleNamespace(
        data_parallel_rank=0, data_parallel_size=size, enable_expert_parallel=experts
    )
    config.model_config.is_moe = moe
    assert steps_in_lockstep(config) is expected
    proposer = SamProposer(config)
    assert (proposer.exchange is not None) is expected
    counters = proposer.drain()["counters"]
    assert ("gate/agreed_steps" in counters) is expected


def test_a_prompt_chunk_has_no_draft():
    engine = Engine()
    engine.add("a")
    assert engine.step("a", sampled=0) == [[]]
    assert engine.counter("catch_up_tokens") == 0


def test_drafts_follow_requests_through_a_reordered_batch():
    engine = Engine()
    engine.add("a", "b")
    engine.step("a", "b")
    engine.requests["b"] += [99]
    engine.step("b", "a", sampled=2)
    # b's period is broken, and nothing it ends with now has occurred before.
    assert engine.step("b", "a")[1] == next_of_period(engine.requests["a"])
    assert engine.counter("rebuilds") == 0


def test_acceptance_is_booked_by_request():
    engine = Engine()
    engine.add("a", "b")
    engine.step("a", "b")
    engine.step("b", "a", sampled=3)
    assert engine.proposer.drain()["requests"] == {"a": (1, K, 2), "b": (1, K, 2)}


class Request(list):
    """A text, with what vLLM keeps beside it."""

    def __init__(self, prompt: list[int], extra_args: dict | None = None) -> None:
        super().__init__(prompt)
        self.prompt_token_ids = prompt
        self.sampling_params = SimpleNamespace(extra_args=extra_args)


def siblings_of(prompt: list[int], *names: str, step: int | None) -> dict[str, Request]:
    """Requests with the identity of a training step, or with none."""
    if step is None:
        return {name: Request(prompt) for name in names}
    return {
        name: Request(
            prompt,
            identify(prompt, seed=0, step=step, sibling=i, split="train").to_extra_args(),
        )
        for i, name in enumerate(names)
    }


@pytest.mark.parametrize("step", [3, None])
def test_siblings_are_known_by_their_identity_or_by_their_prompt(step):
    engine = Engine(siblings=True)
    engine.requests |= siblings_of([1, 2, 3], "a", "b", step=step)
    engine.requests["a"] += [10, 11, 12, 13, 14]
    engine.step("a")
    text = engine.requests["b"]
    text += [50, 10, 11]
    engine.input_batch.req_ids = ["b"]
    token_ids = np.zeros((MAX_ROWS, MAX_LEN), np.int32)
    token_ids[0, : len(text)] = text
    lengths = np.array([len(text), 0, 0, 0], np.int32)
    assert engine.proposer.propose([[11]], lengths, token_ids)[0] == [12, 13, 14]


def test_a_drain_ends_the_step_of_finished_siblings():
    engine = Engine(siblings=True)
    engine.requests |= siblings_of([1, 2, 3], "a", "b", step=3)
    engine.step("a", "b")
    del engine.requests["a"], engine.requests["b"]
    engine.requests |= siblings_of([4, 5, 6], "c", step=3)
    engine.step("c")
    assert engine.proposer.drafter.snapshot().to_mapping()["siblings_groups"] == 2
    assert engine.counter("siblings_groups") == 1, "c is still running"


def test_unbound_says_how_to_bind():
    engine = Engine(bound=False)
    engine.add("a")
    with pytest.raises(RuntimeError, match="sam_bind"):
        engine.step("a")


def test_a_failure_ends_drafting_and_nothing_else(caplog):
    engine = Engine()
    engine.add("a", "b")
    assert all(engine.step("a", "b"))

    def fail(*_args, **_kwargs):
        raise MemoryError("no room for automata")

    engine.proposer.drafter.step = fail
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        assert engine.step("a", "b") == [[], []]
        assert engine.step("b") == [[]]
        assert engine.step("a", "b", sampled=0) == [[], []]
    (warning,) = [record for record in caplog.records if record.name == LOGGER]
    assert "switched off" in warning.message
    assert warning.exc_info is not None, "the reason belongs into the log"
    drained = engine.proposer.drain()
    assert drained["counters"]["failures"] == 1
    assert drained["counters"]["gate/failures"] == 0
    assert "drafted_own" not in drained["counters"], "there is no drafter to ask"
    assert drained["steps"]["gate_open"] == [True]
    assert drained["requests"].keys() == {"a", "b"}
    later = engine.proposer.drain()
    assert later["counters"]["failures"] == 1
    assert later["requests"] == {}, "whoever ran when it failed is told once"


def test_drafting_goes_on_without_records(monkeypatch, caplog):
    engine = Engine()
    engine.add("a")
    engine.step("a")
    monkeypatch.setattr(engine.proposer._sampler_clock, "take_us", lambda: 1 / 0)
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        for _ in range(3):
            assert engine.step("a") == [next_of_period(engine.requests["a"])]
    (warning,) = [record for record in caplog.records if record.name == LOGGER]
    assert "drafting goes on" in warning.message and warning.exc_info is not None
    drained = engine.proposer.drain()
    assert (drained["counters"]["record_failures"], drained["counters"]["failures"]) == (1, 0)
    assert not any(drained["steps"].values())
    assert drained["requests"]["a"][0] == 3, "the ledger is kept"


def test_what_books_cost_between_two_steps_is_charged_to_neither():
    engine = Engine()
    engine.add("a")
    engine.step("a")
    engine.requests.clear()
    engine.input_batch.req_ids = []
    engine.proposer.drain()
    assert engine.proposer._booking_ns == 0


def test_a_rank_whose_drafts_are_ignored_keeps_no_state():
    engine = Engine(used=False)
    engine.add("a", "b")
    assert engine.step("a", "b") == [[], []]
    drained = engine.proposer.drain()
    assert drained["requests"] == {} and drained["steps"]["time_s"] == []
    assert {drained["counters"][name] for name in ("steps", "live_requests", "bytes")} == {0}
    assert not engine.proposer.describe()["drafts_are_used"]


def test_ended_requests_are_freed_and_preempted_ones_kept():
    engine = Engine()
    engine.add("a", "b")
    engine.step("a", "b")
    engine.step("a")
    assert engine.counter("live_requests") == 2, "b is still known to the runner"
    del engine.requests["b"]
    engine.add("c")
    engine.step("a", "c")
    assert engine.counter("live_requests") == 2, "b has ended, c has come"
    assert "b" not in engine.proposer.drain()["requests"]


def test_a_returning_request_is_not_read_again():
    engine = Engine()
    engine.add("a", "b")
    engine.step("a", "b")
    engine.step("a")
    before = engine.counter("catch_up_tokens")
    assert engine.step("a", "b")[1] == next_of_period(engine.requests["b"])
    assert engine.counter("catch_up_tokens") == before + 2


def test_without_recording_nothing_piles_up():
    engine = Engine(record=False)
    for number in range(20):
        engine.add(f"r{number}")
        engine.step(f"r{number}")
        del engine.requests[f"r{number}"]
    drained = engine.proposer.drain()
    assert drained["steps"]["time_s"] == []
    assert list(drained["requests"]) == ["r19"]
    assert drained["counters"]["live_requests"] == 1


def test_drain_hands_steps_over_once():
    engine = Engine()
    engine.add("a", "b", "c")
    engine.step("a")
    engine.step("a", "b", "c")
    steps = engine.proposer.drain()["steps"]
    assert steps["gate_open"] == [True, False]
    assert steps["time_s"] == sorted(steps["time_s"]) and min(steps["drafter_us"]) > 0
    assert not any(engine.proposer.drain()["steps"].values())


def test_steps_tell_budget_and_sources():
    engine = Engine()
    engine.add("a", "b", "c")
    engine.step("a", "b")
    engine.step("a", "b", "c", sampled=3)
    steps = engine.proposer.drain()["steps"]
    assert steps["draft_budget"] == [K, 0]
    # The third token is the drafted one, too: the engine seems to have cut the drafts short.
    assert steps["drafted_per_source"] == [[], [4, 0, 0, 0]]
    assert steps["accepted_per_source"] == [[], [4, 0, 0, 0]]
    both = zip(steps["telemetry_us"], steps["drafter_us"], strict=True)
    assert all(0 < telemetry_us < drafter_us for telemetry_us, drafter_us in both)
    engine.step("a", "b")
    engine.step("a", "b", sampled=2)
    later = engine.proposer.drain()["steps"]
    assert later["accepted_per_source"] == [[], [2, 0, 0, 0]], (
        "since the step before, not the start"
    )


def test_steps_while_the_gate_is_open_are_booked_by_request():
    engine = Engine()
    engine.add("a", "b", "c")
    engine.requests["b"] = [1, 2, 3]  # nothing to draft from
    engine.step("a", "b")
    engine.step("a", "b", "c", sampled=2)  # open for a and b, not for the c that joins
    engine.step("a", "b", "c")  # the gate was closed
    assert engine.proposer.drain()["open"] == {"a": (1, 2), "b": (1, 2), "c": (0, 0)}


def test_verified_drafts_are_counted_by_length_of_context(monkeypatch):
    monkeypatch.setattr(
        "sam_rollout.integrations.vllm.ledger.CONTEXT_EDGES", (0, 10, 14) + (99,) * 5
    )
    engine = Engine()
    engine.add("a")  # of 9 tokens
    for sampled in (1, 4, 1, 2):
        engine.step("a", sampled=sampled)
    counters = engine.proposer.drain()["counters"]
    # Drafts were made of texts of 10, 14 and 15 tokens.
    found = {name: value for name, value in counters.items() if "_context_" in name}
    assert found == {
        "verify_context_1024": 1,
        "drafted_context_1024": 3,
        "accepted_context_1024": 3,
        "verify_context_2048": 2,
        "drafted_context_2048": 6,
        "accepted_context_2048": 1,
    }


class SampledBy:
    """The part of a torch module that a clock hooks into."""

    def __init__(self) -> None:
        self.before, self.after = [], []

    def register_forward_pre_hook(self, hook):
        self.before.append(hook)
        return SimpleNamespace(remove=lambda: self.before.remove(hook))

    def register_forward_hook(self, hook, *, always_call):
        assert always_call
        self.after.append(hook)
        return SimpleNamespace(remove=lambda: self.after.remove(hook))

    def __call__(self, inside=lambda: None) -> None:
        for hook in self.before:
            hook(self)
        inside()
        for hook in self.after:
            hook(self)


def test_sampler_time_counts_nested_samplers_once(monkeypatch):
    engine = Engine()
    engine.sampler, engine.rejection_sampler = SampledBy(), SampledBy()
    engine.proposer.bind(engine, drafts_are_used=True, record=True)
    engine.proposer.bind(engine, drafts_are_used=True, record=True)  # hooks are not doubled
    engine.add("a")
    engine.step("a")
    clock = iter(range(0, 10**9, 10**6))  # a look takes a millisecond
    with monkeypatch.context() as patched:
        patched.setattr("time.perf_counter_ns", lambda: next(clock))
        engine.rejection_sampler(inside=engine.sampler)
        engine.sampler()
    engine.step("a")
    assert engine.proposer.drain()["steps"]["sampler_us"] == [0.0, 2000.0]


def control_of(prompt: list[int], name: str) -> dict[str, Request]:
    return {name: Request(prompt, {"sam_control": True})}


def test_control_requests_get_no_drafts_wherever_they_are_in_the_batch():
    engine = Engine()
    prompt = PERIOD * 2 + PERIOD[:1]
    engine.requests |= control_of(prompt, "control") | {"a": Request(list(prompt), {})}
    assert engine.step("control", "a") == [[], next_of_period(engine.requests["a"])]
    assert engine.step("a", "control") == [next_of_period(engine.requests["a"]), []]
    assert engine.step("control") == [[]], "its text is read all the same"
    drained = engine.proposer.drain()
    assert drained["requests"]["control"] == (0, 0, 0)
    assert drained["open"]["control"] == (2, 2), "the gate was open for it, too"
    del engine.requests["control"]
    assert engine.step("a") == [next_of_period(engine.requests["a"])]
    assert engine.proposer._control == set()


def test_the_gate_is_told_who_gets_no_drafts():
    engine = Engine()
    gate = GateOnRecord()
    engine.proposer.gate = GuardedGate(gate)
    prompt = PERIOD * 2 + PERIOD[:1]
    engine.requests |= control_of(prompt, "control") | {"a": Request(list(prompt), {})}
    engine.step("control", "a")
    engine.step("a")
    first, second = gate.seen
    assert first.may_draft.tolist() == [0, 1]
    assert second.may_draft == 1


def test_describe_names_class_and_configuration():
    description = Engine().proposer.describe()
    assert description["proposer"] == "sam_rollout.integrations.vllm.proposer.SamProposer"
    assert description["sam"]["max_draft_tokens"] == K
    assert description["bound"]


def test_another_k_than_the_engines_is_refused():
    with pytest.raises(ValueError, match=r"num_speculative_tokens = 4.*max_draft_tokens = 3"):
        SamProposer(vllm_config(SamConfig(max_draft_tokens=3), engine_k=4))


def test_a_bad_configuration_is_refused():
    config = vllm_config(SamConfig())
    config.additional_config["sam_rollout"]["sam"]["gate"]["threshold"] = -1
    with pytest.raises(ConfigError, match=r"sam\.gate\.threshold = -1"):
        SamProposer(config)


def test_short_and_missing_drafts_are_filled_up_gate_open_or_closed():
    engine = Engine(pad_drafts="always")
    engine.add("a", "b", "c")
    last = {name: text[-1] for name, text in engine.requests.items()}
    closed = engine.step("a", "b", "c")
    assert closed == [[engine.requests[name][-1]] * K for name in last]
    engine.requests["b"] += [99]  # has not occurred before: no draft
    open_ = engine.step("a", "b", sampled=0)
    assert open_ == [[], []], "prompts are not filled up"
    drafts = engine.step("a", "b")
    assert drafts[0] == next_of_period(engine.requests["a"])
    assert len(drafts[1]) == K


def test_filling_is_booked_apart():
    engine = Engine(pad_drafts="always")
    engine.add("a", "b", "c")
    engine.step("a", "b", "c")
    engine.step("a", "b", "c", sampled=2)  # a token of each filling is kept
    drained = engine.proposer.drain()
    assert set(drained["requests"].values()) == {(0, 0, 0)}
    assert drained["steps"]["gate_open"] == [False, False]
    assert drained["steps"]["padding"] == [(0, 0, ()), (3, 3 * K, (3, 0, 0))]
    assert drained["counters"]["padding_tokens"] == 3 * K
    assert drained["counters"]["accepted_padding_tokens"] == 3
    assert drained["counters"]["drafted_tokens"] == 0
    assert engine.proposer.describe()["padding"] == f"every step of up to {MAX_ROWS} requests"


def test_steps_keep_their_shape_after_a_failure():
    engine = Engine(pad_drafts="always")
    engine.add("a")
    engine.proposer.drafter.step = None
    for _ in range(2):
        assert engine.step("a") == [[engine.requests["a"][-1]] * K]
    assert engine.counter("failures") == 1


def test_padding_waits_for_the_graphs_of_the_runner_it_is_bound_to():
    engine = Engine()
    assert engine.proposer.describe()["padding"] == "no step"

    def dispatch(num_tokens, uniform_decode):
        return SimpleNamespace(name="FULL" if uniform_decode else "NONE"), None

    engine.cudagraph_dispatcher = SimpleNamespace(dispatch=dispatch)
    engine.proposer.bind(engine, drafts_are_used=True, record=True)
    assert engine.proposer.describe()["padding"] == f"every step of up to {MAX_ROWS} requests"


def test_the_end_of_a_step_needs_no_further_batch():
    """vLLM runs an empty step after the last request, without asking for drafts."""
    engine = Engine(siblings=True)
    engine.requests = siblings_of(PERIOD * 2 + PERIOD[:1], "a", "b", step=1)
    engine.step("a", "b")
    engine.requests.clear()
    engine.input_batch.req_ids = []
    drained = engine.proposer.drain()
    assert drained["counters"]["siblings_groups"] == 0
    assert drained["counters"]["live_requests"] == 0
    assert set(drained["requests"]) == {"a", "b"}
    assert engine.proposer.drain()["requests"] == {}, "nobody is reported twice"


def test_without_recording_a_group_ends_with_its_batch():
    engine = Engine(siblings=True, record=False)
    engine.requests = siblings_of(PERIOD * 2 + PERIOD[:1], "a", "b", step=1)
    engine.step("a", "b")
    engine.requests = siblings_of(PERIOD[:3] * 3, "c", step=2)
    engine.step("c")
    assert engine.proposer.drafter.snapshot().to_mapping()["siblings_groups"] == 1


def test_a_drafter_that_fails_at_the_end_of_a_step_is_switched_off(monkeypatch, caplog):
    engine = Engine()
    engine.add("a")
    engine.step("a")
    monkeypatch.setattr(engine.proposer.drafter, "end_step", lambda: 1 / 0)
    with caplog.at_level(logging.WARNING, LOGGER):
        assert engine.proposer.drain()["counters"] == {
            "failures": 1,
            "gate/failures": 0,
            "record_failures": 0,
        }
    assert "switched off" in caplog.text
    assert engine.step("a") == [[]]
