import shutil

import pytest

from recipes.dapo_qwen3 import dry_run
from recipes.dapo_qwen3.main import FOLDER
from sam_rollout.config import ConfigError
from sam_rollout.integrations.verl.checks import RUN_CHECKS
from sam_rollout.integrations.verl.layouts import check_layout
from sam_rollout.integrations.verl.run_config import read_run_config
from sam_rollout.integrations.vllm.hybrids import WITHOUT_DRAFTS
from tests.unit.test_configs import CONFIGS, composed

HEAD = FOLDER / "tiny_qwen3_eagle3"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


@pytest.fixture(autouse=True)
def without_verl(monkeypatch):
    """Skip verl's own checks, whose imports take half a minute."""
    monkeypatch.setattr(dry_run, "ALL_CHECKS", RUN_CHECKS)


def planned(*overrides: str):
    config = composed(*overrides)
    sam = read_run_config(config).sam
    return config, sam, dry_run.memory_plan(config, sam, check_layout(config))


def plan_of(capsys, *overrides: str) -> str:
    dry_run.show_plan(composed(*overrides))
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_plan_without_warnings(name, capsys):
    text = plan_of(capsys, f"experiment={name}")
    assert "Warning:" not in text
    assert text.splitlines()[-1].startswith("Dry run: the configuration is sound")


@pytest.mark.parametrize(
    ("method", "memory"), [("eagle3", "memory estimated"), ("draft_model", "memory unknown")]
)
def test_a_drafter_on_another_machine_is_planned_for(method, memory, capsys):
    drafter = f"sam.sources.model={{enabled:true,method:{method},path:/elsewhere/head}}"
    text = plan_of(capsys, "experiment=article_32b", "sam=on", drafter)
    assert "not on this machine: sam.sources.model.path" in text
    assert memory in text


HYBRID = ("states of linear attention", "sampler stock", WITHOUT_DRAFTS)


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (
            ["experiment=article_235b"],
            [
                "8 node(s) x 16 = 128 (die, 64 GiB, npu)",
                "235B parameters, 22.2B active",
                "tensor 4, pipeline 4 (layers 23, 24, 24, 23), context 4, expert 32, data 2",
                "1 replica(s) x 32 engine(s), tensor 4, expert 128; eager",
                "128 prompts x 16 = 2048",
                "up to 64 responses",
                "64: 1 wave(s)",
                "kind = threshold, threshold = 8",
                "HCCL_EXEC_TIMEOUT 7200",
                "VERL_USE_EXTERNAL_MODULES sam_rollout.integrations.verl.plugin",
            ],
        ),
        (
            ["experiment=article_32b_graph"],
            ["graphs of 16, 32, 64, 128, 256, 512 tokens; at 4 a request they hold 128 of 128"],
        ),
        (
            ["experiment=qwen3_5_27b_cuda", "sam=on"],
            ["26.9B parameters", "16 shards, sequence parallel 8", "tensor 4;", *HYBRID],
        ),
        (
            ["experiment=qwen3_5_35b_a3b_910c", "sam=on"],
            ["34.7B parameters, 3.", "context 4, expert 8, data 2", "tensor 8, expert 8;", *HYBRID],
        ),
    ],
)
def test_a_plan_has_the_facts_of_its_experiment(overrides, facts, capsys):
    text = " ".join(plan_of(capsys, *overrides).split())
    for fact in facts:
        assert fact in text, fact


@pytest.mark.parametrize(
    ("experiment", "drafter"),
    [
        ("qwen3_235b_910c", "eagle3 RedHatAI/Qwen3-235B-A22B-speculator.eagle3"),
        ("qwen3_8b_cuda", "eagle3 RedHatAI/Qwen3-8B-speculator.eagle3"),
        ("tiny_cpu", f"eagle3 {HEAD}"),
    ],
)
def test_a_model_that_drafts_is_part_of_the_plan(experiment, drafter, capsys):
    text = plan_of(capsys, f"experiment={experiment}", "sam=joined")
    row = f"{drafter}: up to 3 tokens a step; memory estimated"
    assert "".join(row.split()) in "".join(text.split()), "a long path is folded anywhere"
    assert "Warning:" not in text
    on, joined = (planned(f"experiment={experiment}", f"sam={sam}")[2] for sam in ("on", "joined"))
    assert joined.rollout["weights of the drafting model"] > 0
    assert 0 < joined.kv_tokens < on.kv_tokens


def test_a_folder_of_the_command_line_is_the_one_that_is_planned(tmp_path, capsys):
    shutil.copytree(HEAD, tmp_path / "head")
    tiny = ("experiment=tiny_cpu", "sam=joined", f"draft_model_path={tmp_path / 'head'}")
    assert f"{tmp_path}/head:upto3tokens" in "".join(plan_of(capsys, *tiny).split())
    with pytest.raises(
        ConfigError, match=r"^sam\.sources\.model\.path = .*hidden_size = 128, not 5120"
    ):
        plan_of(capsys, "experiment=qwen3_32b_910c", *tiny[1:])


def test_weights_that_do_not_fit_are_refused():
    alone = [f"actor_rollout_ref.rollout.{axis}_parallel_size=1" for axis in ("data", "expert")]
    with pytest.raises(ConfigError) as caught:
        dry_run.show_plan(composed("experiment=article_235b", *alone))
    assert caught.value.field == "hardware.memory_gib" and caught.value.value == 64
    assert "expert_parallel_size" in caught.value.allowed


def test_a_gate_too_wide_for_the_memory_is_warned_of(capsys):
    text = plan_of(
        capsys,
        "experiment=article_32b",
        "sam.gate.threshold=1024",
        "sam.max_draft_tokens=8",
        "actor_rollout_ref.rollout.max_num_seqs=1024",
        "actor_rollout_ref.rollout.max_model_len=37120",
    )
    assert "Warning: verifying drafts may need" in text


@pytest.mark.parametrize(
    ("experiment", "overrides", "requests"),
    [
        ("tiny_cpu", ["sam=on"], 64),
        ("article_32b", [], 8),
        ("article_32b", ["sam=on", "sam.pad_drafts=always"], 128),
        ("article_32b_graph", ["sam=matched"], 128),
        ("article_32b_graph", ["sam=off"], 0),
    ],
)
def test_what_may_draft_or_is_filled_up_is_verified(experiment, overrides, requests):
    config, sam, plan = planned(f"experiment={experiment}", *overrides)
    assert dry_run.verified_requests(config, sam) == requests
    k, vocabulary = config.sam.max_draft_tokens, config.model_shape.vocab
    rows = config.actor_rollout_ref.rollout.max_num_seqs
    beyond = max(0, requests * (1 + k) - rows) * vocabulary
    assert plan.verification >= 3 * 4 * beyond and (plan.verification > 0) == (beyond > 0)
