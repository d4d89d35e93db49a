import os
import subprocess
import sys

import pytest

from recipes.dapo_qwen3.dry_run import show_plan
from sam_rollout.config import ConfigError
from tests.unit.test_configs import composed


def test_nothing_but_the_configuration_is_needed(tmp_path):
    files = {"MODEL_PATH": "/nowhere/model", "TRAIN_FILE": "/nowhere/data.parquet"}
    command = [sys.executable, "-m", "recipes.dapo_qwen3.main", "--dry-run"]
    done = subprocess.run(
        [*command, "experiment=article_235b"],
        cwd=tmp_path, env=os.environ | files, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("Dry run: the configuration is sound")
    assert list(tmp_path.iterdir()) == [], "a dry run leaves nothing behind"


def test_what_verl_refuses_is_an_error_of_the_configuration():
    config = composed("experiment=article_32b", "actor_rollout_ref.actor.loss_agg_mode=mean")
    with pytest.raises(ConfigError, match=r"^verl refuses it: Invalid loss_agg_mode: mean$"):
        show_plan(config)
