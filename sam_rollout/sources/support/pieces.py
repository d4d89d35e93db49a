"""Encodes and checks pieces of responses, which engines exchange during sampling.

No engine waits for a piece, and no piece is sent twice. A lost piece only lowers acceptance.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.core.limits import Limits, unknown_tokens
from sam_rollout.sources.contract import Piece

_DTYPE = np.dtype("<i4")  # the dtype of `Piece.tokens`


class BadPieceError(ValueError):
    """A received value is not a piece, or this engine cannot read the piece."""


def to_bytes(tokens: Int32Array) -> bytes:
    """Encode tokens for `Piece.tokens`."""
    return tokens.astype(_DTYPE, copy=False).tobytes()


def whole_response(
    identity: RequestIdentity, name: str, prompt_ids: Sequence[int], response_ids: Sequence[int]
) -> Piece:
    """Make a piece that holds the end of a prompt and a whole response; `name` has to be unique."""
    from sam_rollout.automaton.recorder import CONTEXT  # this import is slow

    tokens = np.array([*prompt_ids[-CONTEXT:], *response_ids], np.int32)
    return Piece(*identity.group_key, name, 0, True, True, to_bytes(tokens))


def read_piece(raw: Any, limits: Limits) -> tuple[Piece, Int32Array]:
    """Check a piece that another engine sent; return the piece and its tokens.

    Raises:
        BadPieceError: the piece is malformed, ends beyond the maximum length of a text, has a
            token that is not in the model's vocabulary, or is whole but not of a training step.
    """
    try:
        piece = Piece(*raw)
    except TypeError as error:
        raise BadPieceError(f"not a piece: {error}") from error
    kinds = (str, int, str, str, int, bool, bool, bytes)
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
    is_kept = piece.split == TRAIN_SPLIT and 0 <= piece.step < 1 << 31
    if piece.is_whole and (piece.start or not piece.is_last or not len(tokens) or not is_kept):
        raise BadPieceError(f"no whole response of a training step: {piece[:-1]}")
    return piece, tokens
