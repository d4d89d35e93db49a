import subprocess
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from sam_rollout.config import ARTICLE, GateConfig, SamConfig, SourcesConfig
from sam_rollout.core.hardware import cpu_model
from sam_rollout.integrations.verl import run_info
from sam_rollout.integrations.verl.run_info import collect_run_info, git_state
from sam_rollout.sources.model import ModelSourceConfig


def test_the_clusters_accelerators_are_told_by_name_and_number(monkeypatch):
    resources = {
        "CPU": 96.0, "GPU": 16.0, "accelerator_type:H100": 2.0, "memory": 1e12, "node:a": 1.0,
    }  # fmt: skip
    monkeypatch.setattr(run_info.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(run_info.ray, "cluster_resources", lambda: resources)
    nodes = [{"Alive": True}, {"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(run_info.ray, "nodes", lambda: nodes)
    host = collect_run_info(CONFIG, SamConfig()).host
    assert host["nodes"] == 2 and host["accelerators"] == {"GPU": 16.0, "H100": 2.0}
    assert host["cpu"] == cpu_model()
    monkeypatch.setattr(run_info.ray, "is_initialized", lambda: False)
    alone = collect_run_info(CONFIG, SamConfig()).host
    assert alone.keys() == {"machine", "cpu", "cpus", "memory_gib"}


CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"seed": 1}}, "data": {"seed": 2}})
JOINED = SamConfig(sources=SourcesConfig(model=ModelSourceConfig(enabled=True, path="owner/head")))


@pytest.mark.parametrize(
    ("sam", "label"),
    [
        (SamConfig(), "sam=on"),
        (replace(ARTICLE, max_draft_tokens=4, gate=GateConfig("threshold", 32)), "sam=article"),
        (replace(ARTICLE, gate=GateConfig("auto")), "sam=on"),
        (SamConfig(gate=GateConfig("closed")), "sam=matched"),
        (replace(ARTICLE, enabled=False), "sam=off"),
        (JOINED, "sam=joined"),
        (replace(JOINED, gate=GateConfig("closed")), "sam=matched"),
    ],
)
def test_a_run_is_called_after_what_it_drafts(sam, label):
    assert collect_run_info(CONFIG, sam).label == label


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git("add", "code.py")
    git("commit", "-q", "-m", "first")
    return tmp_path, git("rev-parse", "HEAD")


def test_the_checkouts_state_is_recorded(checkout):
    root, commit = checkout
    (root / "outputs").mkdir()
    (root / "outputs" / "new").write_text("untracked files change nothing\n")
    assert git_state(root) == {"commit": commit, "dirty": False}
    (root / "code.py").write_text("2\n")
    assert git_state(root) == {"commit": commit, "dirty": True}


def test_an_installed_package_has_no_state(tmp_path):
    state = git_state(tmp_path)
    assert state == {"commit": None, "dirty": None, "note": "installed package, no checkout"}
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    assert git_state(tmp_path)["note"].startswith("git failed: ")
