"""Tokenizers as a corpus needs them: token ids of texts, and which tokenizer it was."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any


class CorpusTokenizer:
    """A tokenizer of transformers'.

    Args:
        name: folder or hub name, as for ``AutoTokenizer.from_pretrained``.
        trust_remote_code: Let the folder's own code make the tokenizer.

    Raises:
        OSError, ValueError: There is no tokenizer under that name.
    """

    def __init__(self, name: str, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        self.fingerprint = fingerprint(self._tokenizer)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        # Texts longer than the model's context are no mistake here: verbose=False.
        return self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def fingerprint(tokenizer: Any) -> str:
    """Hash a vocabulary (tokens with their ids, added ones included) to 16 hexadecimal digits."""
    vocabulary = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.blake2b(repr(vocabulary).encode(), digest_size=8).hexdigest()
