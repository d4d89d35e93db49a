import platform

import pytest

from sam_rollout.doctor import Question, cann

QUESTION = Question("ascend_910c")
VARIABLES = (*cann.HOME_VARIABLES, "ASCEND_OPP_PATH", "ATB_HOME_PATH", "LD_LIBRARY_PATH")


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A toolkit as its set_env.sh leaves it; returns the function that writes its version file."""
    home = tmp_path / "cann"
    folder = home / f"{platform.machine()}-linux"
    (home / "lib64").mkdir(parents=True)
    folder.mkdir()
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(home))
    monkeypatch.setenv("ASCEND_OPP_PATH", str(home / "opp"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/usr/lib:{home}/lib64")
    monkeypatch.setenv("ATB_HOME_PATH", str(home))
    return lambda text: (folder / "ascend_toolkit_install.info").write_text(text)


def found() -> list[tuple[str, str]]:
    lines = [*cann.check_environment(QUESTION), *cann.check_version(QUESTION)]
    return [(line.status, line.found) for line in lines]


def test_nothing_sourced_fails_clearly():
    statuses, said = zip(*found(), strict=True)
    assert statuses == ("fail",) * 3
    assert "ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME are not set" in said[0]


def test_a_sourced_toolkit_is_found(toolkit):
    toolkit("package_name=Ascend-cann-toolkit\nversion=9.1.0\narch=aarch64\n")
    statuses, said = zip(*found(), strict=True)
    assert statuses == ("ok",) * 3 and said[-1] == "9.1.0"


@pytest.mark.parametrize(
    ("name", "value", "which", "said"),
    [
        ("LD_LIBRARY_PATH", "/usr/lib", 0, "or ASCEND_OPP_PATH lacks it"),
        ("ASCEND_TOOLKIT_HOME", "/gone/cann", 0, "does not exist"),
        ("ATB_HOME_PATH", "/gone/atb", 1, "does not exist"),
    ],
)
def test_half_a_toolkit_was_not_sourced(toolkit, monkeypatch, name, value, which, said):
    monkeypatch.setenv(name, value)
    status, text = found()[which]
    assert status == "fail" and text.endswith(said)


@pytest.mark.parametrize(
    ("text", "status"),
    [("version=8.5.0\n", "fail"), ("version=9.0.0\n", "warn"), ("", "warn"), (None, "warn")],
)
def test_other_versions_and_none(toolkit, text, status):
    if text is not None:
        toolkit(text)
    (line,) = cann.check_version(QUESTION)
    assert line.status == status
