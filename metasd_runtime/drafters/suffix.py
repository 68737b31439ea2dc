"""Suffix drafting: continue the longest suffix that was ever seen, here or in earlier queries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from metasd_bandits import checks
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.sampling import Sampling

__all__ = ["Suffix", "SuffixAutomaton"]


class SuffixAutomaton:
    """All substrings of a growing text, and where each was last seen (Blumer et al. 1985).

    ``append`` is O(1) amortised; the longest suffix of the text that occurred earlier is the
    suffix link of the last state, so finding it costs nothing.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]  # behind the latest occurrence that was recorded
        self._last = 0
        self.earlier: tuple[int, int] | None = None

    def append(self, token: int) -> None:
        """Add a token; ``earlier`` becomes (length, end) of the longest suffix seen before.

        ``text[end:]`` is what followed it there; None if the token is new.
        """
        self.text.append(token)
        end = len(self.text)
        new = self._state({}, self._length[self._last] + 1, end)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state == -1 else self._split(state, token)
        self._last = new
        match = self._link[new]
        self.earlier = (self._length[match], self._end[match]) if match else None
        if match:
            self._end[match] = end

    def _state(self, edges: dict[int, int], length: int, end: int) -> int:
        self._next.append(edges)
        self._length.append(length)
        self._link.append(0)
        self._end.append(end)
        return len(self._next) - 1

    def _split(self, state: int, token: int) -> int:
        """The state that ends `token` after `state`, cut off from longer strings if it must be."""
        target = self._next[state][token]
        if self._length[target] == self._length[state] + 1:
            return target
        clone = self._state(dict(self._next[target]), self._length[state] + 1, self._end[target])
        self._link[clone] = self._link[target]
        self._link[target] = clone
        while state != -1 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone


class Suffix(Drafter):
    """Continue the longest suffix of the text that occurred before.

    It remembers every query it has seen (prompts and outputs) and an optional corpus of earlier
    outputs; matches never cross from one document into the next.

    Parameters
    ----------
    corpus : iterable of token sequences, optional
        Earlier outputs, oldest first.
    min_match : int, default 2
        Shortest suffix worth continuing, in tokens.
    max_tokens : int, default 200,000
        Memory: beyond it, the older half of the documents is forgotten.
    """

    name = "suffix"

    def __init__(
        self,
        corpus: Iterable[Sequence[int]] = (),
        min_match: int = 2,
        max_tokens: int = 200_000,
    ) -> None:
        self.min_match = checks.integer("min_match", min_match, 1)
        self.max_tokens = checks.integer("max_tokens", max_tokens, 2)
        self._documents: list[list[int]] = [list(document) for document in corpus]
        self._build()

    def _build(self) -> None:
        self._automaton = SuffixAutomaton()
        self._separators = 0
        for document in self._documents:
            self._open()
            self._extend(document)

    def _open(self) -> None:
        """Begin a document behind a separator that nothing equals, so that no match crosses it."""
        self._separators += 1
        self._automaton.append(-self._separators)

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._automaton.append(token)

    def start(self, tokens: Sequence[int]) -> None:
        if len(self._automaton.text) > self.max_tokens:
            self._documents = self._documents[(len(self._documents) + 1) // 2 :]
            self._build()
        self._documents.append([])
        self._open()
        self.commit(tokens)

    def commit(self, tokens: Sequence[int], features: object = None) -> None:
        fresh = tokens[len(self._documents[-1]) :]
        self._documents[-1].extend(fresh)
        self._extend(fresh)

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        if self._automaton.earlier is None:
            return Draft()
        length, end = self._automaton.earlier
        if length < self.min_match:
            return Draft()
        following = self._automaton.text[end : end + n]
        separator = next((i for i, token in enumerate(following) if token < 0), len(following))
        return Draft(following[:separator])
