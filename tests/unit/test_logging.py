import logging

import pytest


@pytest.fixture
def quiet_root():
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    yield
    root.setLevel(level)


def test_our_warnings_survive_a_root_logger_at_error(quiet_root, caplog):
    logging.getLogger("sam_rollout.gating.guard").warning("ours")
    logging.getLogger("some_library").warning("theirs")
    assert [record.message for record in caplog.records] == ["ours"]
