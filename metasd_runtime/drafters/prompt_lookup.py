"""Prompt lookup: what followed the last occurrence of the text's last few tokens (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from metasd_bandits import checks
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.sampling import Sampling

__all__ = ["PromptLookup"]


class PromptLookup(Drafter):
    """Copy the continuation of the latest earlier match of the longest n-gram.

    Parameters
    ----------
    ngram : int, default 3
        Longest suffix to look for; shorter ones are tried in turn. O(1) a token: an index maps
        each n-gram to where it last ended.
    least : int, default 1
        Shortest suffix to look for, at most `ngram`: a match of few tokens is weak evidence, and
        where another drafter stands behind (`metasd_runtime.drafters.fallback`) worse than none.
    """

    def __init__(self, ngram: int = 3, least: int = 1) -> None:
        self.ngram = checks.integer("ngram", ngram, 1)
        self.least = checks.integer("least", least, 1, self.ngram)
        lengths = [self.ngram, self.least] if least > 1 else [self.ngram] if ngram != 3 else []
        self.name = ":".join(["prompt-lookup", *map(str, lengths)])
        self._last: list[dict[tuple[int, ...], int]] = []
        self._indexed = 0

    def start(self, tokens: Sequence[int]) -> None:
        self._last = [{} for _ in range(self.ngram)]
        self._indexed = 0
        self._index(tokens)

    def commit(self, tokens: Sequence[int], features: object = None) -> None:
        self._index(tokens)

    def _index(self, tokens: Sequence[int]) -> None:
        """Note where each n-gram ends, but for those that end the text: they are the question."""
        for end in range(self._indexed + 1, len(tokens)):
            for n in range(self.least, min(self.ngram, end) + 1):
                self._last[n - 1][tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        for length in range(min(self.ngram, len(tokens)), self.least - 1, -1):
            end = self._last[length - 1].get(tuple(tokens[-length:]))
            if end is not None:
                return Draft(list(tokens[end : end + n]))
        return Draft()
