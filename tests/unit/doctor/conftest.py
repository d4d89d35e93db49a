"""Questions to ask, and the answers by what they are about."""

from collections.abc import Callable, Iterable

import pytest

from sam_rollout.doctor import Line, Question


@pytest.fixture
def question() -> Question:
    return Question("cpu")


@pytest.fixture
def about() -> Callable[[Iterable[Line], str], Line]:
    """The one line about a thing."""

    def find(lines: Iterable[Line], what: str) -> Line:
        (line,) = [line for line in lines if line.what == what]
        return line

    return find
