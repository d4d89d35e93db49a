"""What an engine died of. That its answer is not waited for: tests/e2e/test_dapo_run.py."""

import logging

import pytest

from sam_rollout.integrations.vllm.serving.dead_engine import (
    CAUSE_ENV,
    cause_of_death,
    keep_causes,
)


@pytest.fixture
def last_words(tmp_path, monkeypatch):
    monkeypatch.setenv(CAUSE_ENV, str(tmp_path / "cause"))
    keep_causes()
    keep_causes()

    def say(name, message, error):
        try:
            raise error
        except Exception:
            logging.getLogger(name).exception(message)

    return say


def test_the_first_of_an_engines_last_words_is_kept(last_words):
    assert "was killed" in cause_of_death()
    last_words("vllm.v1.engine.core", "Invocation of sleep method failed", ValueError("harmless"))
    assert "was killed" in cause_of_death()
    worker = "vllm.v1.executor.multiproc_executor"
    last_words(worker, "WorkerProc failed to start.", MemoryError("no room\nat all"))
    last_words("vllm.v1.engine.core", "EngineCore failed to start.", RuntimeError("see above"))
    assert cause_of_death() == "MemoryError: no room at all"


def test_without_a_file_nothing_is_kept(last_words, monkeypatch):
    monkeypatch.delenv(CAUSE_ENV)
    last_words("vllm.v1.engine.core", "EngineCore encountered a fatal error.", ValueError("no"))
    assert "was killed" in cause_of_death()
