"""Encodes and checks pieces of responses, which engines exchange during sampling.

No engine waits for a piece, and no piece is sent twice. A lost piece only lowers acceptance.
"""

from typing import Any

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.limits import Limits, unknown_tokens
from sam_rollout.sources.contract import Piece

_DTYPE = np.dtype("<i4")  # the dtype of `Piece.tokens`


class BadPieceError(ValueError):
    """A received value is not a piece, or this engine cannot read the piece."""


def to_bytes(tokens: Int32Array) -> bytes:
    """Encode tokens for `Piece.tokens`."""
    return tokens.astype(_DTYPE, copy=False).tobytes()


def read_piece(raw: Any, limits: Limits) -> tuple[Piece, Int32Array]:
    """Check a piece that another engine sent; return the piece and its tokens.

    Raises:
        BadPieceError: the piece is malformed, ends beyond the maximum length of a text, or has a
            token that is not in the model's vocabulary.
    """
    try:
        piece = Piece(*raw)
    except TypeError as error:
        raise BadPieceError(f"not a piece: {error}") from error
    kinds = (str, int, str, str, int, bool, bytes)
    for name, value, kind in zip(Piece._fields, piece, kinds, strict=True):
        if type(value) is not kind:
            raise BadPieceError(f"{name} is of type {type(value).__name__}, not {kind.__name__}")
    if len(piece.tokens) % _DTYPE.itemsize:
        raise BadPieceError(f"tokens take {len(piece.tokens)} bytes, not 4 each")
    tokens = np.frombuffer(piece.tokens, _DTYPE).astype(np.int32, copy=False)
    end = piece.start + len(tokens)
    if not 0 <= piece.start <= end <= limits.max_model_len:
        raise BadPieceError(
            f"tokens {piece.start} to {end} of a response; the engine's longest text has "
            f"{limits.max_model_len}"
        )
    if problem := unknown_tokens(tokens, limits.vocab_size):
        raise BadPieceError(problem)
    return piece, tokens
