import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.structured_output import StructuredOutputManager

from sam_rollout.config import ConfigError, GateConfig, SamConfig, SourcesConfig
from sam_rollout.core.identity import identify
from sam_rollout.integrations.verl.graphs import capture_sizes, graph_mode
from sam_rollout.integrations.verl.run_config import read_run_config
from sam_rollout.integrations.vllm.drafting.proposer import RunnerRequests, SamProposer
from sam_rollout.integrations.vllm.drafting.startup_check import check_drafters
from sam_rollout.integrations.vllm.engine_settings import engine_arguments
from sam_rollout.integrations.vllm.scheduling.dp_exchange import steps_in_lockstep
from sam_rollout.sources.prompt import PromptSourceConfig
from tests.unit.session.engine import MAX_LENGTH, MAX_ROWS, START, K, next_of_period
from tests.unit.test_configs import composed


def vllm_config(config: SamConfig) -> SimpleNamespace:
    arguments = engine_arguments(config)
    return SimpleNamespace(
        additional_config=arguments["additional_config"],
        speculative_config=SimpleNamespace(num_speculative_tokens=config.max_draft_tokens),
        scheduler_config=SimpleNamespace(
            max_num_seqs=MAX_ROWS, max_num_batched_tokens=64, scheduler_cls=None
        ),
        model_config=SimpleNamespace(max_model_len=MAX_LENGTH, get_vocab_size=lambda: 1000),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )


class Request(list):
    def __init__(self, prompt: list[int], extra_args: dict | None = None) -> None:
        super().__init__(prompt)
        self.prompt_token_ids = prompt
        self.sampling_params = SimpleNamespace(extra_args=extra_args)


class Runner:
    def __init__(self, *, siblings: bool = False) -> None:
        config = SamConfig(
            max_draft_tokens=K,
            gate=GateConfig("threshold", 2),
            scheduling="sync",
            sources=SourcesConfig(prompt=PromptSourceConfig(enabled=siblings)),
        )
        self.proposer = SamProposer(vllm_config(config))
        self.requests: dict[str, Request] = {}
        self.input_batch = SimpleNamespace(req_ids=[])

    def bind(self, *, record: bool = True, used: bool = True) -> None:
        self.proposer.bind(self, drafts_are_used=used, record=record)

    def propose(self, **sampled: list[int]) -> list[list[int]]:
        self.input_batch.req_ids = list(sampled)
        token_ids = np.zeros((MAX_ROWS, MAX_LENGTH), np.int32)
        lengths = np.zeros(MAX_ROWS, np.int32)
        for row, (name, tokens) in enumerate(sampled.items()):
            text = self.requests[name]
            text += tokens
            lengths[row] = len(text)
            token_ids[row, : len(text)] = text
        return self.proposer.propose(list(sampled.values()), lengths, token_ids, slot_mappings=None)


@pytest.fixture
def runner() -> Runner:
    runner = Runner()
    runner.bind()
    runner.requests = {name: Request(START) for name in "ab"}
    return runner


def test_rows_of_the_engines_batch_become_a_step_of_the_session(runner):
    drafts = runner.propose(a=[6], b=[])
    assert drafts == [next_of_period(runner.requests["a"]), []]
    runner.requests["c"] = Request([1])
    assert runner.propose(c=[1], a=[7, 99], b=[6]) == [[], [], []], "above the threshold"
    drained = runner.proposer.drain()
    assert drained["requests"]["a"] == (1, K, 1, 1, 2)
    assert drained["steps"]["gate_open"] == [True, False]
    del runner.requests["a"], runner.requests["b"]
    runner.propose(c=[1])
    assert set(runner.proposer.drain()["requests"]) == {"a", "b", "c"}
    assert set(runner.proposer.drain()["requests"]) == {"c"}, "the others have ended"


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
    assert (SamProposer(config).exchange is not None) is expected


@pytest.mark.parametrize("step", [3, None])
def test_siblings_are_known_by_their_identity_or_by_their_prompt(step):
    runner, prompt = Runner(siblings=True), [1, 2, 3]
    runner.bind()
    for sibling, name in enumerate("ab"):
        known = None
        if step is not None:
            who = identify(prompt, seed=0, step=step, sibling=sibling, split="train")
            known = who.to_extra_args()
        runner.requests[name] = Request(prompt, known)
    runner.propose(a=[10, 11, 12, 13, 14])
    assert runner.propose(b=[50, 10, 11]) == [[12, 13, 14]]


def test_a_control_request_is_known_by_its_extra_arguments(runner):
    runner.requests["a"] = Request(START, {"sam_without_drafts": True})
    drafts = runner.propose(a=[6], b=[6])
    assert drafts == [[], next_of_period(runner.requests["b"])]


def test_an_engine_with_another_number_of_draft_tokens_is_refused():
    config = vllm_config(SamConfig(max_draft_tokens=3))
    config.speculative_config.num_speculative_tokens = 4
    with pytest.raises(ConfigError, match=r"num_speculative_tokens = 4.*max_draft_tokens = 3"):
        SamProposer(config)


@pytest.mark.parametrize("name", ["article_32b_graph", "reference_script_235b_grpo"])
def test_a_presets_graphs_hold_every_filled_up_step(name):
    preset = composed(f"experiment={name}", "sam=matched")
    sam, rollout = read_run_config(preset).sam, preset.actor_rollout_ref.rollout
    k, most, sizes = sam.max_draft_tokens, rollout.max_num_seqs, capture_sizes(preset, sam)
    config = vllm_config(SamConfig(max_draft_tokens=k, scheduling="sync"))
    config.scheduler_config.max_num_seqs = most
    config.scheduler_config.max_num_batched_tokens = rollout.max_num_batched_tokens
    config.num_speculative_tokens, config.lora_config = k, None
    mode = CUDAGraphMode[graph_mode(preset)]
    config.compilation_config = SimpleNamespace(
        cudagraph_mode=mode,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1],
        compile_sizes=[],
    )
    runner = Runner()
    runner.cudagraph_dispatcher = CudagraphDispatcher(config)
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 1 + k)
    runner.proposer = SamProposer(config)
    runner.bind(record=False)
    padding = runner.proposer.session.padding
    assert all(padding.applies(rows, gate_open=False) for rows in range(1, most + 1))


@pytest.mark.parametrize(
    ("ahead", "begins_anywhere", "drafts"),
    [(False, True, True), (False, False, False), (True, True, False)],
)
def test_a_grammar_has_no_drafts_that_it_would_not_see(ahead, begins_anywhere, drafts, monkeypatch):
    if not begins_anywhere:  # as in vLLM 0.23 and 0.24
        monkeypatch.delattr(StructuredOutputManager, "_get_constraint_start")
    asked = {
        name: SimpleNamespace(
            sampling_params=SimpleNamespace(structured_outputs=grammar, extra_args=None)
        )
        for name, grammar in (("with", object()), ("without", None))
    }
    requests = RunnerRequests(SimpleNamespace(requests=asked, use_async_scheduling=ahead))
    assert requests.takes("with", "chain") == drafts
    assert requests.takes("without", "chain")


RULES = [
    {"repetition_penalty": 1.1},
    {"presence_penalty": -0.5},
    {"frequency_penalty": 0.5},
    {"min_tokens": 3},
    {"bad_words": ["no"]},
    {"thinking_token_budget": 0},
    {"structured_outputs": StructuredOutputsParams(regex="a")},
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: next(iter(rule)))
def test_a_rule_that_reads_the_text_and_drafts_allows_no_trees(rule):
    asked = {
        name: SimpleNamespace(sampling_params=SamplingParams(**parameters))
        for name, parameters in (
            ("with", rule),
            ("without", {"allowed_token_ids": [1], "top_k": 2}),
        )
    }
    requests = RunnerRequests(SimpleNamespace(requests=asked))
    assert requests.takes("with", "chain") and requests.takes("without", "chain")
    assert not requests.takes("with", "tree") and requests.takes("without", "tree")


NO_CPU_RUNNER = "this kind of model runner verifies chains"


@pytest.mark.parametrize(
    ("shape", "changes", "reason"),
    [
        ("chain", {}, ""),
        ("tree", {"gate": GateConfig("auto")}, NO_CPU_RUNNER),
        ("auto", {"gate": GateConfig("auto")}, NO_CPU_RUNNER),
        ("tree", {"max_draft_tokens": 1}, "a tree of one token is a chain"),
        ("auto", {"gate": GateConfig("auto"), "max_draft_tokens": 1}, "a tree of one token"),
        ("auto", {}, "the gate threshold measures nothing"),
    ],
)
def test_where_trees_cannot_be_chains_are_drafted_and_the_start_goes_on(
    shape, changes, reason, caplog
):
    runner = Runner()
    asked = dataclasses.replace(runner.proposer.config, draft_shape=shape, **changes)
    runner.proposer = SamProposer(vllm_config(asked))
    runner.bind()
    drafter = runner.proposer.session.drafter
    assert drafter.shapes == ("chain",)
    assert "draws" not in [source.name for source in drafter.sources]
    line = check_drafters([{"sampler": "stock", **runner.proposer.describe()}], asked)
    assert (f"; chains, not trees: {reason}" in line) == (shape != "chain")
    warned = f"sam.draft_shape = chain: {reason}" in caplog.text
    assert warned == (shape == "tree") and len(caplog.records) == warned
