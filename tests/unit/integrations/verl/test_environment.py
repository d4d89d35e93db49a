import os
from pathlib import Path
from unittest.mock import patch

from sam_rollout.integrations.verl.environment import export_environment
from sam_rollout.integrations.verl.run_config import read_run_config
from tests.settings_checks import check
from tests.unit.integrations.verl.test_checks import composed
from tests.unit.test_configs import composed as composed_anew


def exported(shell: dict[str, str], *overrides: str) -> tuple[dict[str, str], dict[str, str]]:
    """Export a run's variables; return those of this process and those of Ray's processes."""
    config = composed(*overrides)
    config.run_dir = "run"
    bare = {name: os.environ[name] for name in ("PATH", "HOME", "VERL_CONFIG_DIR")}
    with patch.dict(os.environ, {**bare, **shell}, clear=True):
        export_environment(config, read_run_config(config))
        here = dict(os.environ)
    assert config.trainer.default_local_dir == str(Path("run/checkpoints").absolute())
    return here, dict(config.ray_kwargs.ray_init.runtime_env.env_vars)


def test_every_node_gets_the_variables_of_device_and_configuration():
    runtime = "ray_kwargs.ray_init.runtime_env"
    own = ("+environment.MY_VARIABLE=3", f"+{runtime}.env_vars.OTHER=x")
    here, workers = exported({}, *own)
    run_dir = Path("run").absolute()
    for name, value in {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "sam_rollout.integrations.verl.plugin",
        "WANDB_DIR": f"{run_dir}",
        "VERL_FILE_LOGGER_PATH": f"{run_dir}/metrics.jsonl",
        "MY_VARIABLE": "3",
    }.items():
        assert here[name] == workers[name] == value
    assert workers["OTHER"] == "x" and set(composed().environment) <= set(workers)


def test_the_shell_wins_and_its_modules_are_kept():
    here, workers = exported({"OMP_NUM_THREADS": "7", "VERL_USE_EXTERNAL_MODULES": "theirs"})
    assert here["OMP_NUM_THREADS"] == workers["OMP_NUM_THREADS"] == "7"
    assert workers["VERL_USE_EXTERNAL_MODULES"] == "theirs,sam_rollout.integrations.verl.plugin"


def test_a_shell_that_overrules_the_experiment_is_named(monkeypatch, capsys):
    """The published image for Ascend sets TASK_QUEUE_ENABLE=1, but eager mode needs 2."""
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    for experiment in ("article_32b_graph", "article_32b"):
        check(composed_anew(f"experiment={experiment}"))
    assert capsys.readouterr().out == (
        "Note: TASK_QUEUE_ENABLE=1 is set in the shell and wins; the experiment says 2 "
        "(unset TASK_QUEUE_ENABLE to use that)\n"
    )
