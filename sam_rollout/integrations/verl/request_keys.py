"""Chooses a name for each request of a response, as a key of the request's random numbers.

A random number depends on the name and on the position in the text. Requests of a response may
share a name only if each request continues the text of the previous request.

If an agent loop runs one request at a time, its requests share one name. A request whose prompt is
shorter than the text so far gets a new name. With the old name, it would use the random numbers of
some positions again.

If an agent loop runs several requests at once, prompts determine the names. A request whose prompt
extends the text of an ended request takes that request's name, unless another request has already
taken it. Any other request gets a new name: the hash of its prompt, and the number of earlier
requests with an equal prompt.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sam_rollout.core.identity import group_of


@dataclass
class _Chain:
    """Requests with the same name; each continues the text of the previous request."""

    name: str
    text: list[int] = field(default_factory=list)  # prompt and response of the last ended request
    running: int = 0


class RequestKeys:
    """Names the requests of one response; the first name is empty.

    Call `begin` for each request, then `end`, or `abandon` if the request fails.
    """

    def __init__(self) -> None:
        self._chains: list[_Chain] = [_Chain("")]
        self._equal_prompts: Counter[str] = Counter()
        self._branches = False  # whether two requests ever ran at once

    def begin(self, prompt_ids: Sequence[int]) -> _Chain:
        """Return the chain of a new request; random numbers depend on the chain's `name`."""
        self._branches = self._branches or any(one.running for one in self._chains)
        prompt = group_of(prompt_ids)
        if self._branches:
            name = f"{prompt}/{self._equal_prompts[prompt]}"
            chain = self._extended(prompt_ids) or self._new(name)
        else:
            chain = self._chains[-1]
            if len(prompt_ids) < len(chain.text):
                chain = self._new(str(len(self._chains)))
        self._equal_prompts[prompt] += 1
        chain.running += 1
        return chain

    def end(self, chain: _Chain, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        self.abandon(chain)
        chain.text = [*prompt_ids, *token_ids]

    def abandon(self, chain: _Chain) -> None:
        chain.running -= 1

    def _new(self, name: str) -> _Chain:
        self._chains.append(_Chain(name))
        return self._chains[-1]

    def _extended(self, prompt_ids: Sequence[int]) -> _Chain | None:
        """Return the chain with the longest text that is a prefix of the prompt, or None.

        If several chains have texts of this length, the first one is returned. Chains with a
        running request are skipped, because that request samples the positions that follow the
        chain's text.
        """
        found = None
        for chain in self._chains:
            length = len(chain.text)
            if chain.running or not length or (found and length <= len(found.text)):
                continue
            # For most chains, comparing one token avoids a copy of the prompt.
            ends_alike = length <= len(prompt_ids) and prompt_ids[length - 1] == chain.text[-1]
            if ends_alike and list(prompt_ids[:length]) == chain.text:
                found = chain
        return found
