"""What is checked before a run, and how our groups become verl's and vLLM's fields."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from datetime import datetime
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from recipes.dapo_qwen3.main import REPOSITORY
from sam_rollout.automaton import static, static_file
from sam_rollout.config import ConfigError, SamConfig
from sam_rollout.integrations.verl import launch
from sam_rollout.integrations.verl.launch import (
    check,
    control_assignment,
    export_environment,
    translate,
)
from sam_rollout.integrations.vllm.settings import PROPOSER_CLASS
from sam_rollout.telemetry.control import ControlAssignment
from sam_rollout.telemetry.records import RunFolder, RunInfo
from tests.unit.test_configs import plain_shell  # noqa: F401 - a fixture for every test

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
GROUPED = ("sam.sources.siblings.enabled=true", "sam.sources.siblings.routing=grouped")


@cache
def chosen(*groups: str) -> DictConfig:
    with initialize_config_dir(str(REPOSITORY / "configs"), version_base="1.3"):
        return compose("dapo_qwen3", overrides=["experiment=tiny_cpu", *groups])


def _is_choice(key: str) -> bool:
    return "." not in key and key != "run_dir"


def composed(*overrides: str) -> DictConfig:
    """The configuration of a command line; group choices ("sam=off") are composed by Hydra once."""
    groups = tuple(text for text in overrides if _is_choice(text.partition("=")[0]))
    config = deepcopy(chosen(*groups))
    for override in OverridesParser.create().parse_overrides(
        [text for text in overrides if text not in groups]
    ):
        OmegaConf.update(
            config, override.key_or_group, override.value(), force_add=override.is_add()
        )
    return config


BAD = {
    # what is wrong: overrides, field, value and what is allowed as the error words them
    "k below 1": (["sam.max_draft_tokens=0"], "sam.max_draft_tokens", "0", "1..32"),
    "k above 32": (["sam.max_draft_tokens=33"], "sam.max_draft_tokens", "33", "1..32"),
    "k of the wrong type": (
        ["sam.max_draft_tokens=many"],
        "sam.max_draft_tokens",
        "'many'",
        "must be an integer",
    ),
    "negative threshold": (
        ["sam.gate.threshold=-1"],
        "sam.gate.threshold",
        "-1",
        "must be at least 0",
    ),
    "unknown gate": (["sam.gate.kind=cost"], "sam.gate.kind", "'cost'", "'threshold'"),
    "schedule without steps": (
        ["sam.gate.kind=schedule"],
        "sam.gate.schedule",
        "{}",
        "must map running requests",
    ),
    "schedule above k": (
        ["+sam.gate.schedule={4: 8}"],
        "sam.gate.schedule.4",
        "8",
        "must be at most sam.max_draft_tokens = 3",
    ),
    "unknown policy": (["sam.draft_policy=auto"], "sam.draft_policy", "'auto'", "'fixed'"),
    "unknown source": (
        ["+sam.sources.owm.enabled=true"],
        "sam.sources.owm",
        "{'enabled': True}",
        "did you mean 'own'?",
    ),
    "corpus without a file": (
        ["sam.sources.corpus.enabled=true"],
        "sam.sources.corpus.path",
        "''",
        "must name a corpus file",
    ),
    "corpus that is not there": (
        ["sam.sources.corpus.enabled=true", "sam.sources.corpus.path=/nowhere/a.sam"],
        "sam.sources.corpus.path",
        "'/nowhere/a.sam'",
        "no such file; build one with: sam-rollout corpus build",
    ),
    "no source": (
        ["sam.sources.own.enabled=false"],
        "sam.sources",
        "'enabled': False",
        "at least one source must be enabled",
    ),
    "misspelt key": (
        ["+sam.gate.treshold=3"],
        "sam.gate.treshold",
        "3",
        "did you mean 'threshold'?",
    ),
    "misspelt telemetry": (
        ["+rollout_telemetry.record_trace=true"],
        "rollout_telemetry.record_trace",
        "True",
        "did you mean 'record_traces'?",
    ),
    "control beyond all": (
        ["rollout_telemetry.control_share=1.5"],
        "rollout_telemetry.control_share",
        "1.5",
        "must be 0..1",
    ),
    "control of prompts one by one": (
        ["rollout_telemetry.control_unit=prompts"],
        "rollout_telemetry.control_unit",
        "'prompts'",
        "'groups', 'replicas'",
    ),
    "control of the only replica": (
        ["rollout_telemetry.control_share=0.5", "rollout_telemetry.control_unit=replicas"],
        "rollout_telemetry.control_unit",
        "'replicas'",
        "needs at least 2 rollout replicas, this run has 1; use 'groups'",
    ),
    "control of replicas that are refilled": (
        [
            "rollout_telemetry.control_share=0.5",
            "rollout_telemetry.control_unit=replicas",
            "dynamic_sampling.kind=refill",
            "trainer.n_gpus_per_node=2",
        ],
        "rollout_telemetry.control_unit",
        "'replicas'",
        "cannot be compared with dynamic_sampling.kind = 'refill'",
    ),
    "progress somewhere else": (
        ["rollout_telemetry.progress=log"],
        "rollout_telemetry.progress",
        "'log'",
        "'auto', 'on', 'off'",
    ),
    "k no engine step can score": (
        ["sam.max_draft_tokens=4", f"{ROLLOUT}.max_num_batched_tokens=4"],
        "sam.max_draft_tokens",
        "4",
        "must be less than max_num_batched_tokens = 4",
    ),
    "no room for drafts": (
        [f"{ROLLOUT}.max_model_len=1152"],
        f"{ROLLOUT}.max_model_len",
        "1152",
        "must be at least 1157",
    ),
    "length left to the engine": (
        [f"{ROLLOUT}.max_model_len=null"],
        f"{ROLLOUT}.max_model_len",
        "None",
        "must be set to an integer",
    ),
    "legacy trainer": (["trainer.use_v1=false"], "trainer.use_v1", "False", "must be True"),
    "trainer without telemetry": (
        ["trainer.v1.trainer_mode=sync"],
        "trainer.v1.trainer_mode",
        "'sync'",
        "must be 'sam_sync'",
    ),
    "rollout without telemetry": (
        [f"{ROLLOUT}.name=vllm", "sam=off"],
        f"{ROLLOUT}.name",
        "'vllm'",
        "must be 'sam_vllm'",
    ),
    "no statistics": (
        [f"{ROLLOUT}.disable_log_stats=true"],
        f"{ROLLOUT}.disable_log_stats",
        "True",
        "must be False",
    ),
    "rollouts from a cache": (
        ["skip.rollout_tq.enable=true"],
        "skip.rollout_tq.enable",
        "True",
        "must be False",
    ),
    "another drafter beside ours": (
        [f"+{ENGINE}.speculative_config={{method:ngram,num_speculative_tokens:3}}"],
        f"{ENGINE}.speculative_config",
        "'ngram'",
        "must not be set with sam.enabled=true",
    ),
    "our channel taken": (
        [f"+{ENGINE}.additional_config={{sam_rollout:{{sam:1}}}}"],
        f"{ENGINE}.additional_config.sam_rollout",
        "{'sam': 1}",
        "filled from sam, rollout_sampler",
    ),
    "unknown routing": (
        ["sam.sources.siblings.routing=together"],
        "sam.sources.siblings.routing",
        "'together'",
        "'spread', 'grouped'",
    ),
    "two routers": (
        [*GROUPED, f"{ROLLOUT}.router_config_path=mine.yaml"],
        f"{ROLLOUT}.router_config_path",
        "'mine.yaml'",
        "must be None (sam.sources.siblings.routing = 'grouped' chooses the server)",
    ),
    "servers by hash and by group": (
        [*GROUPED, f"{ROLLOUT}.full_determinism=true"],
        f"{ROLLOUT}.full_determinism",
        "True",
        "must be False",
    ),
    "unknown sampler": (
        ["rollout_sampler.kind=gumbel"],
        "rollout_sampler.kind",
        "'gumbel'",
        "'stock', 'vectorised', 'coupled'",
    ),
    "unknown sampling": (
        ["dynamic_sampling.kind=batches"],
        "dynamic_sampling.kind",
        "'batches'",
        "'rounds', 'refill', 'none'",
    ),
    "rounds of nothing": (
        ["dynamic_sampling.gen_batch_size=0"],
        "dynamic_sampling.gen_batch_size",
        "0",
        "must be at least 1",
    ),
    "no filter, larger rounds": (
        ["dynamic_sampling=none", "dynamic_sampling.gen_batch_size=24"],
        "dynamic_sampling.gen_batch_size",
        "24",
        "must equal data.train_batch_size",
    ),
}


@pytest.mark.parametrize(("overrides", "field", "value", "allowed"), BAD.values(), ids=BAD)
def test_a_wrong_value_is_named_with_what_is_allowed(overrides, field, value, allowed):
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides))
    error = caught.value
    assert error.field == field
    assert value in repr(error.value)
    assert allowed in error.allowed
    assert str(error).startswith(f"{field} = ") and "\n" not in str(error)


@pytest.mark.parametrize(
    "overrides",
    [
        ["sam=off", f"+{ENGINE}.speculative_config={{method:ngram,num_speculative_tokens:3}}"],
        ["sam=off", f"{ROLLOUT}.max_model_len=1152"],
        ["sam.gate.threshold=0"],
        ["dynamic_sampling=none", "dynamic_sampling.gen_batch_size=${data.train_batch_size}"],
        [f"+{ENGINE}.additional_config={{other:1}}"],
        [GROUPED[1], f"{ROLLOUT}.router_config_path=mine.yaml"],
    ],
    ids=[
        "other drafter when off",
        "no room needed when off",
        "never drafts",
        "no filter",
        "others",
        "a router of others without siblings",
    ],
)
def test_what_is_allowed_passes_in_silence(overrides, capsys):
    check(composed(*overrides))
    assert capsys.readouterr().out == ""


def test_drafts_that_will_be_cut_short_are_noted(capsys):
    check(composed("sam.gate.threshold=64", f"{ROLLOUT}.max_num_batched_tokens=128"))
    (note,) = capsys.readouterr().out.splitlines()
    assert note.startswith("Note: 64 requests may draft at once")


def run_main(*overrides: str, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "recipes.dapo_qwen3.main", "experiment=tiny_cpu"]
        + [f"run_dir={folder}", *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_ends_with_one_line(tmp_path):
    done = run_main("sam.max_draft_tokens=0", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.splitlines() == [
        "Configuration error: sam.max_draft_tokens = 0: must be 1..32"
    ]
    assert done.stdout == ""


def test_a_missing_data_file_is_named_at_once(tmp_path):
    done = run_main("data.train_files=nowhere.parquet", folder=tmp_path)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert "data.train_files = 'nowhere.parquet': there is no such file" in line
    assert "prepare_data" in line


def test_a_key_hydra_does_not_know_is_named(tmp_path):
    """Hydra refuses it before we see it; its message has to be enough."""
    done = run_main("sam.treshold=3", folder=tmp_path)
    assert done.returncode != 0
    assert "Could not override 'sam.treshold'" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 10


def translated(*overrides: str):
    config = composed(*overrides)
    check(config)
    translate(config)
    return config


def test_drafting_is_switched_on_in_the_engine():
    config = translated("sam.max_draft_tokens=4", "rollout_telemetry.record_traces=true")
    engine = OmegaConf.to_container(OmegaConf.select(config, ENGINE))
    assert engine["speculative_config"] == {
        "method": "custom_class",
        "model": PROPOSER_CLASS,
        "num_speculative_tokens": 4,
    }
    ours = engine["additional_config"]["sam_rollout"]
    assert SamConfig.from_mapping(ours["sam"]) == SamConfig.from_mapping(
        OmegaConf.to_container(config.sam)
    )
    assert ours["rollout_sampler"] == {"kind": "coupled"}
    assert ours["telemetry"] == {"record_traces": True}
    assert "control" not in ours


def test_what_the_engine_does_not_need_does_not_make_it_compile_anew():
    others = (
        "rollout_telemetry.progress=on", "rollout_telemetry.curve_every=7",
        "rollout_telemetry.tail_threshold=3", f"{ROLLOUT}.seed=7",
    )  # fmt: skip
    plain, changed = (
        OmegaConf.to_container(OmegaConf.select(translated(*overrides), ENGINE))
        for overrides in ((), others)
    )
    assert plain["additional_config"] == changed["additional_config"]


def test_a_control_is_assigned_under_the_rollouts_seed():
    overrides = ("rollout_telemetry.control_share=0.25", f"{ROLLOUT}.seed=7")
    config = translated(*overrides)
    ours = OmegaConf.to_container(OmegaConf.select(config, ENGINE))["additional_config"]
    made = ControlAssignment(**ours["sam_rollout"]["control"])
    assert made == ControlAssignment(share=0.25, unit="groups", seed=7, replicas=1)


def test_without_drafts_there_is_no_control(capsys):
    overrides = ("sam=off", "rollout_telemetry.control_share=0.25")
    config = translated(*overrides)
    assert control_assignment(config).share == 0
    assert "no control without drafts" in capsys.readouterr().out


def test_a_schedule_reaches_the_engine_and_survives_json():
    config = translated("sam.gate.kind=schedule", "+sam.gate.schedule={16: 1, 4: 3}")
    engine = OmegaConf.to_container(OmegaConf.select(config, ENGINE))
    ours = json.loads(json.dumps(engine["additional_config"]))["sam_rollout"]
    gate = SamConfig.from_mapping(ours["sam"]).gate
    assert (str(gate), gate.schedule_by_rows()) == ("schedule 3 up to 4, 1 up to 16", {4: 3, 16: 1})


def test_the_baseline_differs_by_the_drafter_alone():
    def flat(config) -> dict:
        return {path: value for path, value in _leaves(OmegaConf.to_container(config))}

    on, off = flat(translated()), flat(translated("sam=off"))
    differing = {path for path in on.keys() | off.keys() if on.get(path) != off.get(path)}
    inside = f"{ENGINE}.additional_config.sam_rollout.sam.enabled"
    speculative = {path for path in differing if path.startswith(f"{ENGINE}.speculative_config.")}
    assert len(speculative) == 3
    assert differing - speculative == {"sam.enabled", inside}


def _leaves(node, path: str = ""):
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def test_the_history_lies_in_the_run_folder_unless_it_has_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history = ["sam.sources.history.enabled=true"]
    config = translated(*history, "run_dir=outputs/mine")
    assert config.sam.sources.history.path == str(tmp_path / "outputs" / "mine" / "sam" / "history")
    ours = OmegaConf.select(config, ENGINE).additional_config.sam_rollout.sam
    assert ours.sources.history.path == config.sam.sources.history.path
    config = translated(*history, "sam.sources.history.path=kept")
    assert config.sam.sources.history.path == str(tmp_path / "kept")
    # A path that differs from run to run would make vLLM compile again.
    assert translated("run_dir=outputs/mine").sam.sources.history.path == ""


def test_the_path_of_a_corpus_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    static_file.save(static.build(static.join([[1, 2]])), Path("a.sam"), documents=1)
    config = translated("sam.sources.corpus.enabled=true", "sam.sources.corpus.path=a.sam")
    assert config.sam.sources.corpus.path == str(tmp_path / "a.sam")


def test_siblings_are_routed_only_where_they_are_drafted_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rollout = translated(*GROUPED, "run_dir=outputs/mine").actor_rollout_ref.rollout
    path = tmp_path / "outputs" / "mine" / "sam" / "routing.yaml"
    assert rollout.router_config_path == str(path)
    for overrides in [(*GROUPED, "sam=off"), GROUPED[:1], GROUPED[1:]]:
        assert translated(*overrides).actor_rollout_ref.rollout.router_config_path is None


def test_engine_arguments_of_others_stay():
    config = translated(f"+{ENGINE}.additional_config={{other:1}}", f"+{ENGINE}.block_size=64")
    engine = OmegaConf.select(config, ENGINE)
    assert engine.additional_config.other == 1 and engine.block_size == 64
    baseline = translated("sam=off", f"+{ENGINE}.speculative_config={{method:ngram}}")
    assert OmegaConf.select(baseline, ENGINE).speculative_config == {"method": "ngram"}


@pytest.mark.parametrize(
    ("overrides", "sampler", "metric"),
    [
        (["dynamic_sampling=rounds"], "RoundsReplayBuffer", "acc"),
        (["dynamic_sampling=refill"], "RefillReplayBuffer", "acc"),
        (
            ["dynamic_sampling=none", "dynamic_sampling.gen_batch_size=${data.train_batch_size}"],
            "RoundsReplayBuffer",
            None,
        ),
    ],
    ids=["rounds", "refill", "none"],
)
def test_dynamic_sampling_becomes_a_replay_buffer(overrides, sampler, metric):
    config = translated(*overrides, "algorithm.filter_groups.max_inflight_gen_batches=2")
    chosen = config.trainer.v1.sampler
    assert chosen.custom_sampler.path == "pkg://sam_rollout.integrations.verl.sampler"
    assert chosen.custom_sampler.name == sampler
    assert chosen.sampler_kwargs == {
        "filter_metric": metric,
        "train_batch_size": config.data.train_batch_size,
        "gen_batch_size": config.dynamic_sampling.gen_batch_size,
        "max_rounds": config.dynamic_sampling.max_rounds,
        "max_inflight_gen_batches": 2,
        "poll_interval_s": 0.1,
    }
    assert config.algorithm.filter_groups.enable is (metric is not None)


def test_nothing_is_left_to_resolve_in_other_processes():
    """Ray's processes do not know our resolvers."""
    text = OmegaConf.to_yaml(translated())
    assert "${repo:" not in text and "${data." not in text


def exported(
    shell: dict[str, str], *overrides: str, run_dir: str = "run"
) -> tuple[dict[str, str], dict[str, str]]:
    """(variables of this process, variables of Ray's processes) after exporting."""
    config = composed(*overrides)
    config.run_dir = run_dir
    bare = {name: os.environ[name] for name in ("PATH", "HOME", "VERL_CONFIG_DIR")}
    with patch.dict(os.environ, {**bare, **shell}, clear=True):
        export_environment(config)
        here = dict(os.environ)
    return here, dict(config.ray_kwargs.ray_init.runtime_env.env_vars)


def test_every_node_gets_the_devices_variables(tmp_path):
    here, workers = exported({}, run_dir=f"{tmp_path}/run")
    for name, value in {
        "VERL_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "2",
        "VERL_USE_EXTERNAL_MODULES": "sam_rollout.integrations.verl.plugin",
        "TENSORBOARD_DIR": f"{tmp_path}/run/tensorboard",
        "WANDB_DIR": f"{tmp_path}/run",
        "VERL_FILE_LOGGER_PATH": f"{tmp_path}/run/metrics.jsonl",
    }.items():
        assert here[name] == workers[name] == value
    assert set(composed().environment) <= set(workers)


def test_the_shell_wins():
    here, workers = exported({"OMP_NUM_THREADS": "7", "WANDB_DIR": "elsewhere"})
    assert here["OMP_NUM_THREADS"] == workers["OMP_NUM_THREADS"] == "7"
    assert workers["WANDB_DIR"] == "elsewhere"


def test_modules_named_in_the_shell_are_kept():
    _, workers = exported({"VERL_USE_EXTERNAL_MODULES": "theirs"})
    assert workers["VERL_USE_EXTERNAL_MODULES"] == "theirs,sam_rollout.integrations.verl.plugin"


def test_variables_named_in_the_configuration_reach_the_nodes():
    runtime = "ray_kwargs.ray_init.runtime_env"
    _, workers = exported({}, "+environment.MY_VARIABLE=3", f"+{runtime}.env_vars.OTHER=x")
    assert workers["MY_VARIABLE"] == "3" and workers["OTHER"] == "x"
    assert workers["VERL_PLATFORM"] == "cpu"


def test_a_shell_that_overrules_the_experiment_is_named(monkeypatch, capsys):
    """The published image for Ascend sets TASK_QUEUE_ENABLE=1, eager mode wants 2."""
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    for experiment in ("article_32b_graph", "article_32b"):
        check(chosen(f"experiment={experiment}"))
    assert capsys.readouterr().out == (
        "Note: TASK_QUEUE_ENABLE=1 is set in the shell and counts; the experiment says 2 "
        "(unset TASK_QUEUE_ENABLE to have that)\n"
    )


def test_the_run_folder_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = composed()
    config.run_dir = "runs/one"
    with patch.dict(os.environ):
        export_environment(config)
    assert config.run_dir == f"{tmp_path}/runs/one"
    assert config.trainer.default_local_dir == f"{tmp_path}/runs/one/checkpoints"


def test_every_kind_of_sampling_has_its_class():
    """The launcher must not import verl, so it names classes of a module that does."""
    sampler = Path(launch.__file__).with_name("sampler.py").read_text()
    for name in launch.SAMPLER_CLASSES.values():
        assert f"class {name}(" in sampler


@pytest.fixture
def baseline(tmp_path) -> Path:
    config = OmegaConf.to_container(translated("sam=off"), resolve=True)
    folder = RunFolder(tmp_path / "base")
    folder.write_start(RunInfo("sam=off", config, {}, {}, {}, "2026-07-01T00:00:00+00:00"))
    folder.append_train_step(1, {"sam/engine/rollout_s": 10.0})
    return folder.path


def test_a_baseline_is_read_and_held_against_the_run(baseline, capsys, monkeypatch):
    monkeypatch.chdir(baseline.parent)
    config = translated("compare.baseline_run=base")
    assert capsys.readouterr().out == ""
    assert config.compare.baseline_run == str(baseline)
    check(composed(f"compare.baseline_run={baseline}", "data.seed=2"))
    assert capsys.readouterr().out == (
        f"Note: compare.baseline_run={baseline} is not the same training but for the drafts: "
        "data.seed: 1 in the baseline, 2 here\n"
    )


def test_a_baseline_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^compare\.baseline_run = .*must be the folder of a"):
        check(composed(f"compare.baseline_run={tmp_path}"))


def left_by(run_dir: Path, started_at: str, *overrides: str, folder: str = "") -> None:
    """Write down a start as a run with these overrides does it, there or once in `folder`."""
    config = translated(*overrides, f"run_dir={folder or run_dir}")
    info = RunInfo("a run", OmegaConf.to_container(config, resolve=True), {}, {}, {}, started_at)
    RunFolder(run_dir).write_start(info)


def checkpoint(folder: Path, step: int, written_at: str) -> None:
    """Leave a checkpoint as verl does."""
    (folder / f"global_step_{step}").mkdir(parents=True)
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text(str(step))
    seconds = datetime.fromisoformat(written_at).timestamp()
    os.utime(tracker, (seconds, seconds))


def at(hour: int) -> str:
    return f"2026-07-01T{hour:02}:00:00+00:00"


@pytest.fixture
def begun(tmp_path):
    """A run folder as a run with these overrides left it, and the override that names it."""

    def begin(*overrides: str) -> str:
        left_by(tmp_path / "run", at(1), *overrides)
        checkpoint(tmp_path / "run" / "checkpoints", 40, at(2))
        return f"run_dir={tmp_path}/run"

    return begin


RESUME = "trainer.resume_mode=auto"


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ("sam=off", "sam=matched", "sam.enabled: False there, True here"),
        ("sam=matched", "sam=on", "sam.gate.kind: closed there, threshold here"),
        ("sam=on", "sam=off", "sam.enabled: True there, False here"),
        ("data.seed=2", "data.seed=3", "data.seed: 2 there, 3 here"),
        ("sam.max_draft_tokens=2", "sam=on", "sam.max_draft_tokens: 2 there, 3 here"),
    ],
)
def test_another_runs_checkpoints_are_not_resumed(begun, first, second, difference):
    where = begun(first)
    with pytest.raises(ConfigError) as caught:
        check(composed(second, where, RESUME))
    assert caught.value.field == "run_dir" and f"({difference})" in caught.value.allowed
    check(composed(second, where, "trainer.resume_mode=disable"))


@pytest.mark.parametrize(
    "overrides",
    [
        ("sam=off", "sam.max_draft_tokens=2"),
        ("sam=on", "sam.sources.history.enabled=true"),
        ("sam=on", "sam.gate.kind=schedule", "+sam.gate.schedule={4: 2}"),
    ],
)
def test_a_run_is_resumed_with_its_own_settings(begun, overrides):
    where = begun(*overrides)
    check(composed(*overrides, where, RESUME))
    if "sam=off" in overrides:  # without drafts their number is nobody's
        check(composed("sam=off", where, RESUME))


def test_settings_may_change_while_there_is_no_checkpoint(tmp_path):
    """A run that ended in its first step left run.json, and nothing to go on from."""
    left_by(tmp_path, at(1), "sam=on", "sam.gate.threshold=8")
    command = ("sam=on", "sam.gate.threshold=4", f"run_dir={tmp_path}", RESUME)
    check(composed(*command))
    checkpoint(tmp_path / "checkpoints", 40, at(2))
    with pytest.raises(ConfigError, match=r"sam\.gate\.threshold: 8 there, 4 here"):
        check(composed(*command))
    (tmp_path / "checkpoints" / "global_step_40").rmdir()  # verl does not find it either
    check(composed(*command))


def test_who_wrote_the_checkpoint_decides_not_who_came_last(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    left_by(tmp_path, at(1), "sam=off")
    checkpoint(checkpoints, 40, at(2))
    left_by(tmp_path, at(3), "sam=on")  # with resume_mode=disable; it saved nothing
    with pytest.raises(ConfigError, match=r"step 40 .*sam\.enabled: False there, True here"):
        check(composed("sam=on", f"run_dir={tmp_path}", RESUME))
    check(composed("sam=off", f"run_dir={tmp_path}", RESUME))
    checkpoint(checkpoints, 10, at(4))
    check(composed("sam=on", f"run_dir={tmp_path}", RESUME))


def test_a_run_folder_may_move(tmp_path, monkeypatch):
    history = "sam.sources.history.enabled=true"
    left_by(tmp_path / "run", at(1), "sam=on", history, folder="/old/run")
    checkpoint(tmp_path / "run" / "checkpoints", 40, at(2))
    check(composed("sam=on", history, f"run_dir={tmp_path}/run", RESUME))
    monkeypatch.chdir(tmp_path)
    check(composed("sam=on", history, "run_dir=run", RESUME))
    elsewhere = "sam.sources.history.path=/elsewhere"
    with pytest.raises(ConfigError, match=r"sources\.history\.path: <run_dir>/sam/history there"):
        check(composed("sam=on", history, elsewhere, "run_dir=run", RESUME))


def test_checkpoints_of_a_run_in_another_folder_are_not_resumed(tmp_path):
    shared = f"trainer.default_local_dir={tmp_path}/checkpoints"
    left_by(tmp_path / "off", at(1), "sam=off", shared)
    checkpoint(tmp_path / "checkpoints", 40, at(2))
    check(composed("sam=off", f"run_dir={tmp_path}/off", shared, RESUME))
    command = ("sam=on", f"run_dir={tmp_path}/on", shared, RESUME)
    with pytest.raises(
        ConfigError, match=r"^trainer\.default_local_dir = .*cannot be told: no folder"
    ):
        check(composed(*command))
    left_by(tmp_path / "on", at(3), "sam=on", shared)
    with pytest.raises(ConfigError, match="is later than the checkpoint"):
        check(composed(*command))


def test_checkpoints_of_a_run_folder_that_cannot_be_read_are_not_resumed(begun, tmp_path):
    where = begun("sam=on")
    (tmp_path / "run" / "sam" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^trainer\.default_local_dir = .*cannot be told"):
        check(composed("sam=on", where, RESUME))
