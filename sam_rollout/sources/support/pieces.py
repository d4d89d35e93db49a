"""Encodes and checks pieces of responses, which engines exchange during sampling.

No engine waits for a piece, and no piece is sent twice. A lost piece only lowers acceptance.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.identity import RequestIdentity
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
        BadPieceError: the piece is malformed, ends beyond the maximum length of a text, or has a
            token that is not in the model's vocabulary.
    """
    try:
        piece = Piece(*raw)
        tokens = np.frombuffer(piece.tokens, _DTYPE).astype(np.int32, copy=False)
        end = piece.start + len(tokens)
    except (TypeError, ValueError) as error:
        raise BadPieceError(f"not a piece: {error}") from error
    if not 0 <= piece.start <= end <= limits.max_model_len:
        raise BadPieceError(
            f"tokens {piece.start} to {end} of a response; the engine's longest text has "
            f"{limits.max_model_len}"
        )
    if problem := unknown_tokens(tokens, limits.vocab_size):
        raise BadPieceError(problem)
    return piece, tokens
