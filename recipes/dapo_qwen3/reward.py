"""The reward of the recipe: +1 for a right final answer, -1 for anything else, as in DAPO.

Why it exists: verl calls a reward function for every response, from threads of an event loop
(``reward.custom_reward_function.path=.../reward.py``, ``reward.reward_manager.name=dapo``). A slow
or raising reward stalls or kills training. So the last ``\\boxed{}`` of the response, or the line
that says ``Answer:``, is compared with the ground truth as text and as a number, in microseconds.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

#: The figures that `compute_score` returns and that groups may be filtered by. A reward file that
#: says so has `algorithm.filter_groups.metric` checked before a run starts.
FIGURES = ("acc", "score")
#: Sources whose answers have exactly one way of being written.
EXACT_SOURCES = frozenset({"synthetic_math"})
#: Only so many characters at the end of a response are searched for the answer.
TAIL_CHARACTERS = 1000

_BOX = "\\boxed{"
_ANSWER_LINE = re.compile(r"answer\**\s*:\**\s*(\S[^\n]*)", re.IGNORECASE)
_SPACING = re.compile(r"\\[,;:!]|\\ |\\q?quad\b|~|\s+")
_WRAPPED = re.compile(r"^\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}$")
_THOUSANDS = re.compile(r"^[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_PLAIN_NUMBER = re.compile(r"^[+-]?(?:\d+(?:\.\d*)?|\.\d+)$")
_FRACTION = re.compile(r"^([+-]?)(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+))$")
_UNIT = re.compile(r"(?:\^\{?\\circ\}?|\\?%|\\text\{[^{}]*\})$")
_REWRITES = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\left": "",
    "\\right": "",
    "{,}": ",",
    "\\$": "",
}


def last_boxed(text: str) -> str:
    """Return the content of the last complete ``\\boxed{}`` near the end of ``text``, or ""."""
    tail = text[-TAIL_CHARACTERS:]
    start = tail.rfind(_BOX)
    while start >= 0:
        depth = 1
        for position in range(start + len(_BOX), len(tail)):
            depth += {"{": 1, "}": -1}.get(tail[position], 0)
            if depth == 0:
                return tail[start + len(_BOX) : position]
        start = tail.rfind(_BOX, 0, start)
    return ""


def last_answer_line(text: str) -> str:
    """Return what follows the last ``Answer:`` near the end of ``text``, or "".

    The prompts of DAPO's data sets ask for such a line and do not mention a box.
    """
    lines = _ANSWER_LINE.findall(text[-TAIL_CHARACTERS:])
    return lines[-1].strip(" *") if lines else ""


def normalise(answer: str) -> str:
    """Return ``answer`` without differences in writing that never matter; numbers in plain form."""
    text = answer.rstrip(" .").strip(" $").rstrip(".")
    for old, new in _REWRITES.items():
        text = text.replace(old, new)
    text = _SPACING.sub("", text)
    wrapped = _WRAPPED.match(text)
    text = wrapped.group(1) if wrapped else text
    if _THOUSANDS.match(text):
        text = text.replace(",", "")
    return _plain_number(text) if _PLAIN_NUMBER.match(text) else text


def _plain_number(text: str) -> str:
    """Return a decimal number without plus sign, leading zeros or trailing zeros."""
    try:
        number = format(Decimal(text), "f")
    except InvalidOperation:
        return text
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return "0" if number == "-0" else number


def _value(answer: str) -> Fraction | None:
    """Return the number that an answer such as ``x=\\frac{1}{2}`` or ``90^\\circ`` stands for."""
    text = normalise(_UNIT.sub("", normalise(answer.rpartition("=")[2])))
    fraction = _FRACTION.match(text)
    try:
        if fraction:
            sign, *parts = (part for part in fraction.groups() if part is not None)
            return Fraction(f"{sign}{'/'.join(parts)}")
        return Fraction(text) if _PLAIN_NUMBER.match(text) else None
    except (ValueError, ZeroDivisionError):
        return None


def _is_right(data_source: str, prediction: str, truth: str) -> bool:
    expected, given = normalise(truth), normalise(prediction)
    if not given or expected == given:
        return bool(given)
    if data_source in EXACT_SOURCES:
        return False
    value = _value(truth)
    return value is not None and _value(prediction) == value


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Score one response, in the form verl's ``dapo`` reward manager expects.

    Returns ``score`` (+1.0 or -1.0, the reward), ``acc`` (1.0 or 0.0, logged) and ``pred`` (the
    answer found, "" if none, logged). Unknown keyword arguments are ignored. Never raises.
    """
    response = str(solution_str or "")
    prediction = last_boxed(response)
    if not prediction and data_source not in EXACT_SOURCES:
        prediction = last_answer_line(response)
    right = _is_right(str(data_source), prediction, str(ground_truth))
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": prediction}
