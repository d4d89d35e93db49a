"""Suffix automata of finished texts: built once, packed, matched by any number of requests.

A static automaton is that of a text that has ended, in packed arrays. It needs about half the
memory of the online one in `kernels.py`. In addition it knows, for every state, a place in the text
that continues as the state's strings do most often.

Documents are joined by a token that no request can contain. Matches therefore never reach across
two documents, and the token between them is never drafted.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from sam_rollout.automaton import static_build
from sam_rollout.automaton.interface import Int32Array
from sam_rollout.automaton.static_build import SEPARATOR

__all__ = ["ARRAYS", "SEPARATOR", "StaticAutomaton", "build", "join"]

# First size of the edge table: 0.7-1.1 branching edges a token, at most four fifths full.
_EDGE_SLOTS_PER_TOKEN = 1.2
MAX_TOKENS = 1 << 28  # states and edge slots, up to two and a half a token, are counted in int32

# Columns of the header that kernels read, int64[HEADER_WIDTH]: sizes, then addresses.
TOKENS = 0
STATES = 1
EDGES = 2
VOCABULARY = 3
TEXT = 4
LINK = 5
GOES_ON = 6
EDGE_START = 7
CLONE_LENGTH = 8
EDGE_TOKEN = 9
EDGE_TARGET = 10
HEADER_WIDTH = 11


@dataclasses.dataclass(frozen=True)
class StaticAutomaton:
    """The automaton of a finished text of n tokens, with c clones and e branching edges.

    State i <= n is the prefix of length i, whose edge to i + 1 is implicit; states n + 1 ... n + c
    are the clones. Matching checks every index that it follows, so that arrays from a damaged file
    yield useless drafts at worst.

    Attributes:
        text: int32[n + 1], the documents, each followed by `SEPARATOR`; the last entry is one, too.
        link: int32[n + 1 + c], suffix links.
        goes_on: int32[n + 1 + c], a position of the text: what begins there is the most frequent
            continuation of the state's strings, token by token, the latest among equals. 0 where
            nothing but the end of documents follows.
        edge_start: int32[n + 2 + c], edges of state s are edge_start[s] ... edge_start[s + 1] - 1.
        clone_length: int32[c], length of each clone's longest string.
        edge_token, edge_target: int32[e], sorted by token within a state.
        vocabulary: drafted tokens are below it.
    """

    text: Int32Array
    link: Int32Array
    goes_on: Int32Array
    edge_start: Int32Array
    clone_length: Int32Array
    edge_token: Int32Array
    edge_target: Int32Array
    vocabulary: int = SEPARATOR

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit each other: indices are only checked against their sizes.

        Raises:
            TypeError: an array is not int32, or not contiguous.
            ValueError: lengths that contradict each other.
        """
        for name in ARRAYS:
            array = getattr(self, name)
            if array.dtype != np.int32 or array.ndim != 1 or not array.flags.c_contiguous:
                raise TypeError(f"{name} must be int32[n] and contiguous")
        states = len(self.text) + len(self.clone_length)
        if not (
            len(self.text) > 0
            and len(self.link) == len(self.goes_on) == len(self.edge_start) - 1 == states
            and len(self.edge_token) == len(self.edge_target)
        ):
            raise ValueError("the arrays of the automaton do not fit each other")

    @property
    def tokens(self) -> int:
        """Tokens of the text, separators included."""
        return len(self.text) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(self, name).nbytes for name in ARRAYS)

    def header(self) -> npt.NDArray[np.int64]:
        """Sizes and addresses for the kernels; valid while the automaton lives."""
        header = np.empty(HEADER_WIDTH, np.int64)
        header[[TOKENS, STATES, EDGES, VOCABULARY]] = (
            self.tokens, len(self.link), len(self.edge_token), self.vocabulary,
        )  # fmt: skip
        for column, name in zip(range(TEXT, HEADER_WIDTH), ARRAYS, strict=True):
            header[column] = getattr(self, name).ctypes.data
        return header


# In the order of the header's columns, and of a saved file.
ARRAYS = ("text", "link", "goes_on", "edge_start", "clone_length", "edge_token", "edge_target")


def join(documents: Iterable[npt.ArrayLike]) -> Int32Array:
    """Documents as one text, each followed by the separator. int32[n].

    Raises:
        ValueError: a token id is negative or not below `SEPARATOR`.
    """
    parts = []
    for document in documents:
        tokens = np.asarray(document)
        if len(tokens) == 0:
            continue
        if tokens.min() < 0 or tokens.max() >= SEPARATOR:
            raise ValueError(f"token ids must lie in [0, {SEPARATOR})")
        parts += [tokens.astype(np.int32, copy=False), np.full(1, SEPARATOR, np.int32)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def build(text: Int32Array, vocabulary: int = SEPARATOR) -> StaticAutomaton:
    """The automaton of a joined text (`join`), whose tokens are below `vocabulary`.

    Takes longer per token in longer texts, and temporarily about 110 bytes per token. The GIL is
    released nearly all the time.

    Raises:
        ValueError: the text is too long for states and edges to be counted in int32.
    """
    static_build.warm_up()
    tokens = len(text)
    if tokens > MAX_TOKENS:
        raise ValueError(f"{tokens} tokens: an automaton holds {MAX_TOKENS}")
    text = np.append(text, np.int32(SEPARATOR))
    # Room for the largest possible number of clones: untouched pages cost nothing.
    link = np.zeros(2 * tokens + 1, np.int32)
    clone_length = np.zeros(tokens, np.int32)
    edges, progress = _read(text, link, clone_length)
    clones = int(progress[static_build.CLONES])
    link, clone_length = link[: tokens + 1 + clones].copy(), clone_length[:clones].copy()
    edge_start = np.zeros(len(link) + 1, np.int32)
    edge_token, edge_target = np.empty((2, int(progress[static_build.EDGES])), np.int32)
    static_build.pack_edges(edges, edge_start, edge_token, edge_target)
    del edges
    goes_on = np.zeros(len(link), np.int32)
    static_build.find_continuations(text, link, clone_length, edge_start, edge_target, goes_on)
    return StaticAutomaton(
        text, link, goes_on, edge_start, clone_length, edge_token, edge_target, vocabulary
    )


def _read(
    text: Int32Array, link: Int32Array, clone_length: Int32Array
) -> tuple[Int32Array, npt.NDArray[np.int64]]:
    """Construct the automaton; return its table of edges, and how much of everything there is."""
    first_edge = np.zeros(len(link), np.int32)
    progress = np.zeros(static_build.PROGRESS_WIDTH, np.int64)
    edges = _edge_table(int(len(text) * _EDGE_SLOTS_PER_TOKEN) + 8)
    while not static_build.read_text(text, link, clone_length, edges, first_edge, progress):
        larger = _edge_table(len(edges) * 3 // 2)
        static_build.move_edges(edges, larger, first_edge)
        edges = larger
    return edges, progress


def _edge_table(slots: int) -> Int32Array:
    return np.zeros((slots, static_build.EDGE_WIDTH), np.int32)
