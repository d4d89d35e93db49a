import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sam_rollout.integrations.verl import source_choice
from sam_rollout.integrations.verl.checks import settled
from sam_rollout.integrations.vllm.hybrids import WITHOUT_DRAFTS
from tests.settings_checks import check
from tests.unit.integrations.verl.test_checks import composed

RUN = "sam.sources.run"
LONGEST = (1 << 24) // 4 // 64


def sized(response_tokens: int, *overrides: str):
    room = response_tokens + 200
    return composed(
        f"data.max_response_length={response_tokens}",
        f"actor_rollout_ref.rollout.max_model_len={room}",
        *overrides,
    )


@pytest.mark.parametrize(
    ("response_tokens", "overrides", "shared"),
    [
        (LONGEST, (), True),
        (LONGEST + 1, (), False),
        (LONGEST + 1, ("trainer.n_gpus_per_node=2",), True),
        (1024, (f"{RUN}.max_bytes=15728640",), True),
        (1024, (f"{RUN}.max_bytes=15728639",), False),
        (300, (f"{RUN}.max_bytes=6000000",), False),  # even 300 tokens take the room of 512
        (LONGEST + 1, (f"{RUN}.when=always",), True),
        (1024, (f"{RUN}.enabled=false",), False),
    ],
)
def test_what_a_run_shares_follows_from_what_fits(response_tokens, overrides, shared):
    config = sized(response_tokens, *overrides)
    run = check(config)
    sources = run.sam.sources
    assert sources.run.enabled is shared and sources.prompt.enabled
    assert sources.run.when == "always" or not shared
    told = [line for line in run.decisions if line.startswith(RUN)]
    decided = "always" not in str(overrides) and "enabled" not in str(overrides)
    said = f"{RUN}.when = always: " if shared else f"{RUN}.enabled = false: "
    assert [line.startswith(said) for line in told] == [True] * decided


def test_with_a_corpus_it_is_on_whatever_fits(tmp_path):
    (tmp_path / "a.jsonl").write_text("[1, 2]")
    sources = check(sized(LONGEST + 1, f"{RUN}.corpus={tmp_path}/a.jsonl")).sam.sources
    assert (sources.run.enabled, sources.run.when) == (True, "always")


def write_prompts(folder, rows: int) -> str:
    path = folder / "train.parquet"
    pq.write_table(pa.table({"prompt": list(range(rows))}), path)
    return str(path)


@pytest.mark.parametrize(
    ("rows", "overrides", "enabled", "said"),
    [
        (100, (), True, ""),
        (100, ("trainer.total_epochs=1",), False, "no prompt comes back"),
        (100, ("trainer.total_epochs=1", "sam.texts.path=kept"), True, ""),
        # Each prompt has 8 responses of 1024 tokens, and each token takes 4 bytes.
        (2048, ("sam.texts.max_bytes=67108864",), True, ""),
        (2049, ("sam.texts.max_bytes=67108864",), False, "2049 prompts may take 0.1 GB"),
    ],
)
def test_earlier_steps_serve_where_prompts_come_back(tmp_path, rows, overrides, enabled, said):
    config = composed(f"data.train_files={write_prompts(tmp_path, rows)}", *overrides)
    run = check(config)
    assert run.sam.sources.prompt.earlier_steps is enabled
    told = [line for line in run.decisions if "earlier_steps" in line]
    assert len(told) == (not enabled) and said in "".join(told)


def test_copies_of_a_prompt_come_back_within_an_epoch(tmp_path):
    prompts = [[{"role": "user", "content": f"{number} + 1 = ?"}] for number in range(2048)]
    once = ("trainer.total_epochs=1", "sam.texts.max_bytes=67108864")
    for copies, enabled in ((1, False), (2, True)):
        path = tmp_path / f"train{copies}.parquet"
        pq.write_table(pa.table({"prompt": prompts * copies}), path)
        config = composed(f"data.train_files={path}", *once)
        assert check(config).sam.sources.prompt.earlier_steps is enabled


WIDE = pa.large_list(pa.struct([("role", pa.large_string()), ("content", pa.large_string())]))
ONE = [{"role": "user", "content": "1 + 1 = ?"}]
PICTURES = [{"role": "user", "content": [{"type": "image"}]}]


@pytest.mark.parametrize(
    ("prompts", "kind", "enabled"),
    [
        ([ONE, ONE], WIDE, True),  # polars writes this type
        ([ONE, [*ONE, *ONE]], WIDE, False),
        (["1 + 1", "1 + 1"], pa.large_string(), True),
        ([PICTURES, PICTURES], None, False),
        ([["1 + 1"], ["1 + 1"]], None, False),
        ([[{"role": "user", "content": None}]], None, False),
        ([[{"role": "user", "text": "1 + 1"}]], None, False),
    ],
)
def test_prompts_of_every_kind_are_counted_or_decide_nothing(tmp_path, prompts, kind, enabled):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": pa.array(prompts, kind)}), path)
    config = composed(f"data.train_files={path}", "trainer.total_epochs=1")
    assert check(config).sam.sources.prompt.earlier_steps is enabled


def test_files_that_cannot_be_read_decide_nothing():
    config = composed("data.train_files=hdfs://elsewhere/train.parquet")
    assert check(config).sam.sources.prompt.earlier_steps


@pytest.mark.parametrize("kind", ["coupled", "coupled_inversion", "stock", "vectorised"])
def test_draws_need_a_coupled_sampler(kind):
    run = check(composed(f"rollout_sampler.kind={kind}"))
    told = [line for line in run.decisions if line.startswith("sam.sources.draws")]
    assert run.sam.sources.draws.enabled is run.sampler.is_coupled is not bool(told)


@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, False),
        ({"text_config": {"layer_types": ["linear_attention", "full_attention"]}}, False),
        ({"layer_types": ["conv", "full_attention"]}, False),  # LFM2
        ({"hybrid_override_pattern": "M-M*"}, False),
        ({"linear_key_head_dim": 128}, False),
        ({"mamba_d_state": 16}, False),
        ({"layer_types": ["attention"] * 4, "mamba_n_heads": 48}, True),  # Granite 4 micro
        ({"layer_types": ["sliding_attention", "full_attention"]}, True),
        ({}, True),
    ],
)
def test_hybrids_run_without_drafts_and_the_run_says_so(model, drafts, monkeypatch):
    monkeypatch.setattr(source_choice, "read_config", lambda _config: model)
    run = settled(composed("sam=on"))
    assert run.sam.enabled == drafts
    assert (WITHOUT_DRAFTS in run.decisions) != drafts
    without = settled(composed("sam=off"))
    assert not without.sam.enabled and without.decisions == ()
