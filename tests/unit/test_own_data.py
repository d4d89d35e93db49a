import re
import shlex

import pytest

from sam_rollout.integrations.verl.checks import check
from tests import settings_checks
from tests.pages import PARSER, ROOT
from tests.unit.test_configs import composed, searchpath

pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "own_data.md").read_text()
    return [token.content for token in PARSER.parse(page) if token.info == language]


@pytest.fixture
def files(tmp_path, monkeypatch):
    data, reward = blocks("python")
    monkeypatch.chdir(tmp_path)
    exec(data, {})
    (tmp_path / "my_reward.py").write_text(reward)
    return tmp_path


def test_a_run_accepts_the_pages_data_and_reward(files):
    command = shlex.split(blocks("bash")[0].replace("\\\n", " "))
    overrides = [word for word in command if re.match(r"[a-z_][\w.]*=", word)]
    assert {"data.train_files=mine.jsonl", "--check-only"} <= set(command)
    config = composed(*overrides)
    check(config)
    assert (files / config.reward.custom_reward_function.path).exists()


def test_the_pages_experiment_has_lengths_that_belong_together(tmp_path):
    (example,) = blocks("yaml")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(example)
    folders = f"hydra.searchpath=[{searchpath()},file://{tmp_path}]"
    config = composed("experiment=mine", f"run_dir={tmp_path}/run", folders)
    settings_checks.check(config)
    assert config.trainer.experiment_name == "mine"
