import getpass
import json
import socket
from pathlib import Path

import pytest

from sam_rollout.doctor import bug_report
from sam_rollout.doctor.bug_report import redact
from sam_rollout.doctor.printed_checks import Finding, warn
from sam_rollout.doctor.scope import Question
from sam_rollout.telemetry.records import RunFolder, RunInfo

HOME = f"/{'home'}/ann"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("WANDB_API_KEY=0a1b2c", "WANDB_API_KEY=<secret>"),
        ("{'hf_token': 'abc def'}", "{'hf_token': <secret>}"),
        ("Authorization: Bearer abc.def", "Authorization: <secret>"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: <secret>"),
        (r"{\"WANDB_API_KEY\": \"abc\"}", r"{\"WANDB_API_KEY\": <secret>}"),
        ("password=ab,cd, step 3", "password=<secret>, step 3"),
        ("login --api-key abc", "login --api-key <secret>"),
        (f"key hf_{'a' * 34} and {'0f' * 20}", "key <secret> and <secret>"),
        ("cloning https://ann:pw@git.corp.example/x.git now", "cloning <address> now"),
        ("ip=10.1.2.3, tcp 192.168.0.1:6379", "ip=<address>, tcp <address>"),
        ("on fe80::1ff:fe23:4567:890a up", "on <address> up"),
        ("ssh ann@node-7", "ssh <address>"),
        ("node-7.rack.internal is gone", "<host> is gone"),
        (f"{HOME}/runs/a, {Path.home()}/b", "~/runs/a, ~/b"),
        ("max_draft_tokens=8 response_length:1024.0", None),
        ("hf_config_path: null, prompt_key: prompt, experts_per_token: 8", None),
        ("tests/unit/x.py::test_add 12:34:56", None),
        ("torch 2.13.0+cpu, vllm 0.31.0, CANN 9.1.0", None),
        ("/data/runs/32b_on/checkpoints", None),
    ],
)
def test_what_belongs_to_somebody_is_left_out(text, left, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    assert redact(text) == (text if left is None else left)


def test_a_home_that_is_the_root_leaves_paths_alone(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert (
        redact("/data/models/q and http://ann:pw@h.example:80/x") == "/data/models/q and <address>"
    )


def test_this_machine_its_nodes_and_its_user_are_left_out(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-42.site")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setenv("RAY_ADDRESS", "head-1:6379")
    said = redact("gpu-42.site gpu-42 head-1:6379 head-1 worker-9 ann annotated", ["worker-9"])
    assert said == "<host> <host> <host> <host> <host> <user> annotated"


@pytest.fixture
def run(tmp_path) -> Path:
    config = {"sam": {"enabled": True, "max_draft_tokens": 8}, "env": {"MY_TOKEN": "s3cret"}}
    info = RunInfo("sam=on", config, {"torch": "2.13.0"}, {}, {}, "2026-07-01T00:00:00+00:00")
    RunFolder(tmp_path / "run").write_start(info)
    lines = [f"line {n} of {HOME}/x, password=s3cret" for n in range(300)]
    (tmp_path / "run" / "log.txt").write_text("\n".join(lines))
    return tmp_path / "run"


def test_the_report_holds_versions_findings_settings_and_the_end_of_the_log(run, tmp_path):
    findings = [
        Finding("host", warn("memory", "9 GiB are free", "free some"), "node-7 10.0.0.7 a1b2c3")
    ]
    bug_report.write(tmp_path / "report.txt", Question("cpu"), findings, run)
    text = (tmp_path / "report.txt").read_text()
    for wanted in ("sam_rollout: ", "vllm_ascend: 0.23", "torch: 2.13.0", "warn  memory: 9 GiB"):
        assert wanted in text
    assert "max_draft_tokens: 8" in text and "MY_TOKEN: <secret>" in text
    assert "line 299 of ~/x" in text and "line 219 of" not in text
    for gone in ("s3cret", "node-7", "10.0.0.7", HOME, str(Path.home())):
        assert gone not in text, json.dumps(gone)
