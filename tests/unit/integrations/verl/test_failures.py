import pickle

import pytest
import ray
from ray.exceptions import RayTaskError

from sam_rollout.integrations.verl import failures
from sam_rollout.integrations.verl.failures import (
    DeadPartError,
    FailureBook,
    FailureWatch,
    FilterMetricError,
    RolloutFailedError,
    describe,
    failure_of,
)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def through_ray(error: Exception) -> Exception:
    text = f'Traceback\n  File "/judge.py", line {len(str(error))}, in judge\n'
    return RayTaskError("judge()", text, error, "title", 1, "127.0.0.1").as_instanceof_cause()


def test_an_error_is_named_as_it_was_raised_in_whichever_process():
    assert describe(ValueError("two\n  lines")) == "ValueError: two lines"
    assert describe(KeyError()) == "KeyError"
    assert describe(through_ray(ValueError("no"))) == "ValueError: no"
    assert describe(through_ray(through_ray(OSError("twice")))) == "OSError: twice"
    assert describe(through_ray(RolloutFailedError("OSError: no"))) == "OSError: no"
    assert len(describe(ValueError("x" * 9999))) < 600


def test_errors_are_kept_once_a_kind():
    book = FailureBook()
    for number in range(3):
        book.note(raised(ValueError(f"response {number}")))
    book.note(raised(KeyError("score")))
    book.note(through_ray(ValueError("elsewhere")))
    assert [(failure.text, failure.count) for failure in book.failures] == [
        ("ValueError: response 0", 3),
        ("KeyError: 'score'", 1),
        ("ValueError: elsewhere", 1),
    ]
    assert "test_failures.py" in book.failures[0].trace
    assert book.count == 5
    assert len(pickle.loads(pickle.dumps(book.take()))) == 3
    assert book.count == 0


class Worker:
    def __init__(self, *answers):
        self.answers = list(answers)
        self.take_failures = self

    def remote(self):
        return self.answers.pop(0) if self.answers else []


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    def get(asked, timeout):
        for answer in asked:
            if isinstance(answer, Exception):
                raise answer
        return asked

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda asked, num_returns, timeout: (asked, []))


def test_the_first_error_of_all_workers_is_the_first(caplog):
    late, early = failure_of(raised(ValueError("late"))), failure_of(raised(KeyError("early")))
    early = failures.replace(early, first_s=late.first_s - 5)
    watch = FailureWatch([Worker([late], [late]), Worker([early])])
    watch.settle()
    assert watch.first_error() == "KeyError: 'early'"
    for _ in range(2):
        watch.log_new_kinds("training step 7")
    assert [record.message.split("\n")[0] for record in caplog.records] == [
        "training step 7: 1 responses failed with KeyError: 'early'",
        "training step 7: 1 responses failed with ValueError: late",
    ]
    watch.settle()
    assert watch.book.count == 3
    watch.begin()
    assert watch.book.count == 0


@pytest.mark.parametrize(
    "error",
    [FilterMetricError("no metric"), DeadPartError("no engine"), ray.exceptions.ActorDiedError()],
)
def test_what_the_next_response_would_meet_ends_the_run_at_once(error):
    watch = FailureWatch([Worker(), Worker([failure_of(through_ray(error))])])
    with pytest.raises(RolloutFailedError, match=r"no (metric|engine)|actor died"):
        for _ in range(3):
            watch.look()


def test_a_worker_that_died_ends_the_run_and_a_late_one_does_not(caplog):
    FailureWatch([Worker(ray.exceptions.GetTimeoutError())]).settle()
    assert "did not say within 60.0 s what failed" in caplog.text
    watch = FailureWatch([Worker(ray.exceptions.ActorDiedError())])
    with pytest.raises(DeadPartError, match="an agent-loop worker died"):
        watch.settle()
