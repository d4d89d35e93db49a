"""Whether the shell overrules variables that the experiment sets for its processes."""

import os
from collections.abc import Iterator

from sam_rollout.doctor.line import Line, ok, skip, warn
from sam_rollout.doctor.question import Question

WHAT = "of the run"


def check_variables(question: Question) -> Iterator[Line]:
    """Compare the shell, which wins, with the experiment: images set variables, too."""
    if not question.config:
        yield skip(WHAT, "not looked at without --experiment")
        return
    if question.cluster:
        yield skip(WHAT, "those of the head's shell count: ask there without --cluster")
        return
    wanted = question.variables
    other = [name for name in wanted if os.environ.get(name, wanted[name]) != wanted[name]]
    for name in other:
        found = f"{os.environ[name]} in this shell, which counts; the experiment says"
        yield warn(name, f"{found} {wanted[name]}", f"unset {name}, unless it is meant so")
    if not other:
        yield ok(WHAT, "the shell overrules none")
