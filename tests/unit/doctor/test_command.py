import json
import socket

import pytest
from typer.testing import CliRunner

from sam_rollout.cli import app
from sam_rollout.doctor import examination
from sam_rollout.doctor.printed_checks import fail, ok, warn


@pytest.fixture
def doctor(monkeypatch):
    def run(lines, *options):
        monkeypatch.setattr(examination, "checks_of", lambda device: [("group", lambda _: lines)])
        return CliRunner().invoke(app, ["doctor", *map(str, options)])

    return run


@pytest.mark.parametrize(
    ("line", "status"), [(ok("a", "b"), 0), (warn("a", "b", "c"), 0), (fail("a", "b", "c"), 1)]
)
def test_only_failures_fail(doctor, line, status):
    result = doctor([line], "--device", "cpu")
    assert result.exit_code == status
    assert "... group" in result.stderr and "..." not in result.stdout


def test_the_report_of_no_run_is_a_line(doctor, tmp_path):
    result = doctor([ok("a", "b")], "--report", tmp_path / "r", "--run", tmp_path / "nowhere")
    assert result.exit_code == 2 and "sam-rollout: " in result.stderr
    assert "Traceback" not in result.output
    assert doctor([ok("a", "b")], "--report", tmp_path / "r").exit_code == 0
    assert "ok    a: b" in (tmp_path / "r").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "tpu"], "ascend_910c, cuda, cpu"),
        (["--address", "auto"], "--cluster"),
        (["--run", "x"], "--report"),
    ],
)
def test_wrong_usage_is_status_2(doctor, options, said):
    result = doctor([ok("a", "b")], *options)
    assert result.exit_code == 2
    assert said in result.stderr and result.stdout == ""


@pytest.mark.parametrize("words", [["--experiment", "tiny_gpu"], ["experiment=tiny_gpu"]])
def test_an_unknown_experiment_is_a_failure_that_names_the_known(doctor, words):
    pytest.importorskip("verl")
    result = doctor([ok("a", "b")], *words)
    assert result.exit_code == 1
    assert "experiment = 'tiny_gpu': unknown option" in result.stdout
    assert "tiny_cpu" in result.stdout and "ok    a: b" in result.stdout


def test_a_cluster_that_is_not_there_is_a_failure(doctor):
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    result = doctor([ok("a", "b")], "--cluster", "--address", address, "--json")
    assert result.exit_code == 1
    (finding,) = json.loads(result.stdout)["findings"]
    assert f"no connection to {address}: ConnectionRefusedError" in finding["found"]
