"""--dry-run as it is typed, with verl's own checks, without anything of the cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 280

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def dry_run(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "recipes.dapo_qwen3.main", "--dry-run", *overrides],
        cwd=folder,
        env={**environment, "MODEL_PATH": "/nowhere/model", "TRAIN_FILE": "/nowhere/data.parquet"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_nothing_but_the_configuration_is_needed(tmp_path):
    done = dry_run(tmp_path, "experiment=article_235b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("Dry run: the configuration is sound")
    assert list(tmp_path.iterdir()) == [], "a dry run leaves nothing behind"


def test_what_verl_refuses_ends_with_one_line(tmp_path):
    done = dry_run(tmp_path, "experiment=article_32b", "actor_rollout_ref.actor.loss_agg_mode=mean")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        "Configuration error: verl refuses it: Invalid loss_agg_mode: mean"
    )
    assert "Traceback" not in done.stderr
