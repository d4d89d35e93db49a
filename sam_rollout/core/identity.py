"""The identity of a request, which is the same in every run.

The request ids of vLLM and the uids of verl are new in every run, so they do not show which
responses of two runs belong together. An identity travels with each request in
``SamplingParams.extra_args["sam"]``.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Self

EXTRA_ARGS_KEY = "sam"
TRAIN_SPLIT = "train"
OUTSIDE_TRAINING = -1  # the step of requests that do not come from a training run
VAL_SPLIT = "val"

GroupKey = tuple[str, int, str]  # split, step, group


@dataclasses.dataclass(frozen=True)
class RequestIdentity:
    """Identity of one response."""

    group: str  # Hash of the prompt's token ids; equal for all responses to a prompt, in every run.
    sibling: int  # Number of the response among the responses to its prompt, from 0.
    step: int  # Training step that asked for the response; -1 outside training.
    split: str  # "train" or "val".
    key: int  # The key of the response's random numbers, a 63-bit integer.
    # Length of the original prompt, 0 if unknown. A request that continues an interrupted response
    # has a longer prompt.
    prompt_tokens: int = 0

    def resumed(self, tokens: int) -> int:
        """Return how many tokens at the end of a request's prompt were sampled by earlier requests.

        `tokens` is the length of this prompt. The result is 0 if `prompt_tokens` is unknown.
        """
        return max(tokens - self.prompt_tokens, 0) if self.prompt_tokens else 0

    @property
    def group_key(self) -> GroupKey:
        """Split, step and group; all responses to a prompt in the same step have the same key."""
        return self.split, self.step, self.group

    def to_extra_args(self) -> dict[str, dict[str, Any]]:
        """Return the mapping to merge into ``SamplingParams.extra_args``."""
        return {EXTRA_ARGS_KEY: dataclasses.asdict(self)}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> Self | None:
        """Return a request's identity; None for a request without identity, as in plain vLLM."""
        fields = (extra_args or {}).get(EXTRA_ARGS_KEY)
        return None if fields is None else cls(**fields)


def group_of(prompt_ids: Sequence[int]) -> str:
    """Hash a prompt's token ids to a group name of 16 hexadecimal digits."""
    # Each token takes eight bytes on every machine, so all nodes of a cluster get the same hash.
    raw = array("q", prompt_ids).tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def key_of(seed: int, step: int, group: str, sibling: int) -> int:
    """Derive the key of a response's random numbers; it is the same in all runs with this seed."""
    text = f"{seed}/{step}/{group}/{sibling}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits fit into a signed int64 tensor


def identify(
    prompt_ids: Sequence[int], *, seed: int, step: int, sibling: int, split: str
) -> RequestIdentity:
    """Build the identity of a response to ``prompt_ids``."""
    group = group_of(prompt_ids)
    return RequestIdentity(
        group=group, sibling=sibling, step=step, split=split, key=key_of(seed, step, group, sibling)
    )
