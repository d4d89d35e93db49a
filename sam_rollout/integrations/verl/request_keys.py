"""Which random numbers each request of a response draws from.

Random numbers are keyed by a name and by position in the text. Two requests of a response may share
a name only where they draw at different positions: one goes on where the other ended.

A loop that asks one thing after the other keeps one name; a prompt that was shortened (a chat
template that drops earlier thoughts) comes to positions that were used, and begins another name. A
loop that asks for several things at once (best of n, tree search, sub-agents) has its requests
named by what they say, because the order in which they end depends on timing, and timing on drafts:

* A prompt that extends the text of a request which has ended goes on under that request's name,
  unless another request has gone on there already.
* Every other prompt begins a name: its hash, and how many equal prompts the response had before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sam_rollout.core.identity import group_of


@dataclass
class _Chain:
    """Requests under one name, each of which goes on where the one before it ended."""

    name: str
    text: list[int] = field(default_factory=list)  # of the request that ended last
    running: int = 0


class RequestKeys:
    """Names the requests of one response; the first is named as the response itself, "".

    `begin` is called when a request is made, `end` when it has its tokens, `abandon` if it fails.
    """

    def __init__(self) -> None:
        self._chains: list[_Chain] = [_Chain("")]
        self._equal_prompts: Counter[str] = Counter()
        self._running = 0
        self._shortened = 0
        self._branches = False  # whether two requests were ever under way at once

    def begin(self, prompt_ids: Sequence[int]) -> _Chain:
        """Find the chain of a request, whose `name` keys its random numbers.

        Args:
            prompt_ids: Token ids of the request's prompt, the response's text so far among them.
        """
        self._branches = self._branches or self._running > 0
        prompt = group_of(prompt_ids)
        if self._branches:
            name = f"{prompt}/{self._equal_prompts[prompt]}"
            chain = self._extended(prompt_ids) or self._new(name)
        else:
            chain = self._chains[-1]
            if len(prompt_ids) < len(chain.text):
                self._shortened += 1
                chain = self._new(str(self._shortened))
        self._equal_prompts[prompt] += 1
        self._running += 1
        chain.running += 1
        return chain

    def end(self, chain: _Chain, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Note the text of a request that has ended."""
        self.abandon(chain)
        chain.text = [*prompt_ids, *token_ids]

    def abandon(self, chain: _Chain) -> None:
        """Note that a request is not under way any more."""
        self._running -= 1
        chain.running -= 1

    def _new(self, name: str) -> _Chain:
        self._chains.append(_Chain(name))
        return self._chains[-1]

    def _extended(self, prompt_ids: Sequence[int]) -> _Chain | None:
        """Return the chain whose text a prompt extends; of several, the longest and then the first.

        A chain in which a request is under way has drawn at positions behind its text.
        """
        found = None
        for chain in self._chains:
            length = len(chain.text)
            if chain.running or not length or (found and length <= len(found.text)):
                continue
            # The last token tells most texts apart, without a copy of the prompt for each.
            ends_alike = length <= len(prompt_ids) and prompt_ids[length - 1] == chain.text[-1]
            if ends_alike and list(prompt_ids[:length]) == chain.text:
                found = chain
        return found
