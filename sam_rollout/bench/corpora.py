"""Real texts that every Python has: sources of its standard library, and its manual.

They depend on the interpreter's version, which a record names. Tokens are words, cut where a
model's tokenizer would about cut them; ids count tokens in order of appearance.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import numpy as np

from sam_rollout.bench.traces import Trace

# Long modules of different kinds.
MODULES = (
    "argparse", "ast", "calendar", "configparser", "datetime", "_pydecimal", "difflib", "doctest",
    "inspect", "mailbox", "pickle", "statistics", "tarfile", "typing", "zipfile",
)  # fmt: skip
PROMPT_TOKENS = 200
# Spaces go with what follows, digits stand alone, long words come in pieces of up to six letters.
_TOKEN = re.compile(r" ?[A-Za-z]{1,6}| ?\d| ?[^\sA-Za-z\d]{1,3}|\n *|[^\S\n]+")


def tokenize(texts: list[str]) -> list[np.ndarray]:
    """Token ids of each text with one vocabulary for all, int32[tokens] each."""
    ids: dict[str, int] = {}
    return [
        np.array([ids.setdefault(piece, len(ids)) for piece in _TOKEN.findall(text)], np.int32)
        for text in texts
    ]


def source_code(length: int) -> list[Trace]:
    """Modules of the standard library, the first `length` tokens of each."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES]
    pairs = zip(MODULES, tokenize(texts), strict=True)
    return [_trace(name, tokens[:length]) for name, tokens in pairs]


def prose(length: int) -> list[Trace]:
    """The manual that `help()` shows, cut into pieces of `length` tokens."""
    from pydoc_data.topics import topics

    (tokens,) = tokenize(["\n".join(topics[name] for name in sorted(topics))])
    pieces = [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
    return [_trace(f"manual-{i}", piece) for i, piece in enumerate(pieces[: len(MODULES)])]


def _trace(name: str, tokens: np.ndarray) -> Trace:
    return Trace(name, 0, tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS:])
