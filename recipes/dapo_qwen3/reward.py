"""Computes the recipe's reward: +1 for a right final answer, -1 for anything else, as in DAPO.

verl calls `compute_score` for every response, from threads of an event loop. The settings
``reward.custom_reward_function.path=.../reward.py`` and ``reward.reward_manager.name=dapo`` select
this function. It first compares the last ``\\boxed{}`` of the response with the ground truth as
text. If the texts differ and the answer can be written in several ways, math-verify compares the
answers symbolically in a worker process, which is killed if it takes too long.
"""

import importlib
import logging
import multiprocessing
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

#: Keys of `compute_score`'s result by which groups of responses may be filtered. If a reward file
#: declares `FIGURES`, a run with dynamic sampling checks, at its start, that
#: `algorithm.filter_groups.metric` is one of these keys, or "reward" (verl's name of the reward).
FIGURES = ("acc", "score")
#: Data sources whose answers can be written in one way only.
EXACT_SOURCES = frozenset({"synthetic_math"})
#: Number of characters at the end of a response that are searched for the answer.
TAIL_CHARACTERS = 1000
#: Answers with more than this many characters are not compared symbolically.
MAX_SYMBOLIC_CHARACTERS = 200
#: After this number of seconds a symbolic comparison is ended, and the answers count as different.
SYMBOLIC_TIMEOUT = 10.0
#: The worker process gets this number of seconds to start and to import.
START_TIMEOUT = 120.0

_BOX = "\\boxed{"
_ANSWER_LINE = re.compile(r"answer\**\s*:\**\s*(\S[^\n]*)", re.IGNORECASE)
_SPACING = re.compile(r"\\[,;:!]|\\ |\\q?quad\b|~|\s+")
_WRAPPED = re.compile(r"^\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}$")
_THOUSANDS = re.compile(r"^[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_PLAIN_NUMBER = re.compile(r"^[+-]?(?:\d+(?:\.\d*)?|\.\d+)$")
_REWRITES = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\left": "", "\\right": "", "{,}": ","}

_log = logging.getLogger(__name__)
_worker: ProcessPoolExecutor | None = None
_worker_lock = threading.Lock()


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
    """Return the text after the last ``Answer:`` near the end of ``text``, or "".

    The prompts of DAPO's data sets ask for such a line and do not mention ``\\boxed{}``.
    """
    lines = _ANSWER_LINE.findall(text[-TAIL_CHARACTERS:])
    return lines[-1].strip(" *") if lines else ""


def normalise(answer: str) -> str:
    """Return ``answer`` without notation that does not matter, such as spacing and wrappers."""
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
    number = format(Decimal(text), "f")
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return "0" if number == "-0" else number


def _verify_in_worker(truth: str, answer: str) -> bool:
    """Compare two LaTeX answers symbolically (runs in a worker process)."""
    from math_verify import parse, verify

    # math-verify's timeouts are off (None), because they use SIGALRM, which fails outside a main
    # thread and cannot stop C code. Instead, the caller kills this process after a limited time.
    parsed = [parse(f"${text}$", parsing_timeout=None) for text in (truth, answer)]
    return bool(all(parsed)) and verify(*parsed, timeout_seconds=None)


def _importable(name: str) -> Callable[..., bool]:
    """Return the function ``name`` from a module that a spawned process can import, too.

    verl may load this file by its path, but other processes cannot import such a module.
    """
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.append(root)
    return getattr(importlib.import_module("recipes.dapo_qwen3.reward"), name)


def _ready_worker() -> ProcessPoolExecutor:
    """Return the worker, with its imports done; the first call starts it and takes seconds."""
    global _worker
    if _worker is None:
        # Forking a process that runs threads can deadlock.
        spawning = multiprocessing.get_context("spawn")
        _worker = ProcessPoolExecutor(max_workers=1, mp_context=spawning)
        _worker.submit(_importable("_verify_in_worker"), "1", "1").result(timeout=START_TIMEOUT)
    return _worker


def _end_worker() -> None:
    """End a worker that is stuck or broken."""
    global _worker
    ended, _worker = _worker, None
    if ended is not None:
        processes = list((getattr(ended, "_processes", None) or {}).values())
        ended.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


def symbolically_equal(truth: str, answer: str, timeout: float = SYMBOLIC_TIMEOUT) -> bool:
    """Return whether two LaTeX answers mean the same, or ``False`` after ``timeout`` seconds.

    Any thread may call this function, which never raises. One comparison runs at a time; its time
    limit does not include the wait for other comparisons.
    """
    if not answer or max(len(truth), len(answer)) > MAX_SYMBOLIC_CHARACTERS:
        return False
    with _worker_lock:
        try:
            comparison = _ready_worker().submit(_importable("_verify_in_worker"), truth, answer)
            return bool(comparison.result(timeout=timeout))
        except (TimeoutError, BrokenExecutor):
            _end_worker()
        except Exception as error:
            _log.debug("no symbolic comparison of %r with %r: %s", answer, truth, error)
    return False


def _is_right(data_source: str, prediction: str, truth: str) -> bool:
    expected, given = normalise(truth), normalise(prediction)
    if not given or expected == given:
        return bool(given)
    both_numbers = bool(_PLAIN_NUMBER.match(expected) and _PLAIN_NUMBER.match(given))
    if both_numbers or data_source in EXACT_SOURCES:
        return False
    return symbolically_equal(expected, given)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Score one response; the result has the form that verl's ``dapo`` reward manager expects.

    The result has ``score`` (+1.0 or -1.0, the reward), ``acc`` (1.0 or 0.0, logged) and ``pred``
    (the answer found, or ""; logged). Unknown keyword arguments are ignored. No error is raised.
    """
    response = str(solution_str or "")
    prediction = last_boxed(response)
    if not prediction and data_source not in EXACT_SOURCES:
        prediction = last_answer_line(response)
    right = _is_right(str(data_source), prediction, str(ground_truth))
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": prediction}
