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


def test_nothing_sourced_fails_clearly():
    lines = [*cann.check_environment(QUESTION), *cann.check_version(QUESTION)]
    assert [line.status for line in lines] == ["fail"] * 3
    assert "ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME are not set" in lines[0].found


def test_a_sourced_toolkit_is_found(toolkit):
    toolkit("package_name=Ascend-cann-toolkit\nversion=9.1.0\narch=aarch64\n")
    lines = [*cann.check_environment(QUESTION), *cann.check_version(QUESTION)]
    assert [line.status for line in lines] == ["ok"] * 3
    assert lines[-1].found == "9.1.0"


def test_a_home_without_its_libraries_was_not_sourced(toolkit, monkeypatch, about):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lib")
    assert about(cann.check_environment(QUESTION), "set_env.sh").status == "fail"


def test_folders_that_are_gone(toolkit, monkeypatch, about, tmp_path):
    for name in ("ASCEND_TOOLKIT_HOME", "ATB_HOME_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "gone"))
    lines = list(cann.check_environment(QUESTION))
    assert all(line.status == "fail" and "does not exist" in line.found for line in lines)


@pytest.mark.parametrize(
    ("text", "status"), [("version=8.5.0\n", "fail"), ("version=9.0.0\n", "warn"), ("", "warn")]
)
def test_other_versions(toolkit, text, status):
    toolkit(text)
    (line,) = cann.check_version(QUESTION)
    assert line.status == status


def test_a_toolkit_without_version_file(toolkit):
    (line,) = cann.check_version(QUESTION)
    assert line.status == "warn"
