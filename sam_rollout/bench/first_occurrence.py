"""A suffix automaton in plain Python that drafts from first occurrences.

The drafts are those of the reference recipe in the article "SAM投机推理". The automaton is built as
in Blumer et al. (1985). This module serves for comparison only.
"""

from collections.abc import Iterable


class FirstOccurrenceAutomaton:
    """The suffix automaton of a growing text."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._first_end = [0]
        self._last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        following, link, length = self._next, self._link, self._length
        self.text.append(token)
        end = len(self.text)
        new = len(length)
        following.append({})
        length.append(end)
        self._first_end.append(end)
        link.append(0)
        state = self._last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state >= 0:
            target = following[state][token]
            if length[target] == length[state] + 1:
                link[new] = target
            else:
                link[new] = self._split(state, token, target)
        self._last = new

    def _split(self, state: int, token: int, target: int) -> int:
        clone = len(self._length)
        self._next.append(dict(self._next[target]))
        self._length.append(self._length[state] + 1)
        self._first_end.append(self._first_end[target])
        self._link.append(self._link[target])
        self._link[target] = clone
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def draft(self, k: int) -> list[int]:
        """Return up to k tokens that follow the first occurrence of the longest repeated suffix."""
        match = self._link[self._last]
        if match <= 0:
            return []
        end = self._first_end[match]
        return self.text[end : end + k]
