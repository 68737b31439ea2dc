"""All that ever followed the text's last few tokens, here or in earlier queries.

Prompt lookup and suffix drafting continue one match, the latest or the longest; here every match
counts, and its continuations form a tree: where they part, each is a node, with how many places
speak for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from metasd_bandits import checks

__all__ = ["Copies", "Copy"]

_WIDTHS = (4, 2, 1)  # n-grams that are indexed
_PLACES = 32  # most places that are looked at, the latest
_CHILDREN = 3  # most different tokens behind one another, those of most places


class Copy(NamedTuple):
    """A token that followed.

    Attributes
    ----------
    parent : int
        Its parent's place among the tokens that are given, or -1.
    token : int
    recalled : bool
        Whether only earlier queries have it.
    length : int
        Tokens of the longest match it followed.
    places : int
        Places that matched.
    share : float
        Of them, those that it followed.
    """

    parent: int
    token: int
    recalled: bool
    length: int
    places: int
    share: float


class Copies:
    """An index of texts by their n-grams.

    Parameters
    ----------
    recall : bool
        Keep earlier queries.
    longest : int, default 10
        Tokens of a match beyond which it makes no difference.
    most_tokens : int, default 200,000
        Memory: beyond it everything is forgotten.
    """

    def __init__(self, recall: bool, longest: int = 10, most_tokens: int = 200_000) -> None:
        self.recall = recall
        self.longest = checks.integer("longest", longest, 1)
        self.most_tokens = checks.integer("most_tokens", most_tokens, 1)
        self._forget()

    def _forget(self) -> None:
        self._text: list[int] = []
        self._begin = 0  # of the present query
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def start(self, tokens: Sequence[int]) -> None:
        """A query begins with this prompt."""
        if not self.recall or len(self._text) > self.most_tokens:
            self._forget()
        self._text.append(-1)  # equals no token, so no match crosses it
        self._begin = len(self._text)
        self.commit(tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """The query's text is this now. What ends it is indexed once something follows."""
        for token in tokens[len(self._text) - self._begin :]:
            end = len(self._text)
            for width in _WIDTHS:
                if end - width >= 0 and end > self._begin:
                    self._ends.setdefault(tuple(self._text[end - width :]), []).append(end)
            self._text.append(token)

    def propose(self, n: int) -> Iterator[list[Copy]]:
        """What may follow, level by level, at most n deep; the consumer may stop at any level."""
        groups = {-1: self._matches()}
        born = 0
        for depth in range(n):
            level, below = list[Copy](), dict[int, list[tuple[int, int]]]()
            for parent, matches in groups.items():
                for token, followed in self._following(matches, depth):
                    below[born + len(level)] = followed
                    level.append(
                        Copy(
                            parent,
                            token,
                            all(end < self._begin for end, _ in followed),
                            max(length for _, length in followed) + depth,
                            len(matches),
                            len(followed) / len(matches),
                        )
                    )
            if not level:
                return
            yield level
            born, groups = born + len(level), below

    def _following(
        self, matches: Sequence[tuple[int, int]], depth: int
    ) -> list[tuple[int, list[tuple[int, int]]]]:
        """The tokens of most places at this depth behind the matches, and those places."""
        text = self._text
        by_token: dict[int, list[tuple[int, int]]] = {}
        for match in matches:
            place = match[0] + depth
            if place < len(text) and text[place] >= 0:
                by_token.setdefault(text[place], []).append(match)
        ordered = sorted(by_token.items(), key=lambda item: (len(item[1]), max(item[1])))
        return ordered[: -_CHILDREN - 1 : -1]

    def _matches(self) -> list[tuple[int, int]]:
        """Places where the text's end occurred before, by what stands behind, and their lengths."""
        text, end = self._text, len(self._text)
        found: dict[int, int] = {}
        for width in _WIDTHS:
            if width > end - self._begin:
                continue
            ends = self._ends.get(tuple(text[end - width :]), [])
            for place in ends[-_PLACES:]:
                found.setdefault(place, width)
            if len(found) >= _PLACES // 2:
                break
        return [(place, self._length(place, width)) for place, width in found.items()]

    def _length(self, place: int, known: int) -> int:
        """How many tokens before a place equal those at the text's end."""
        text, end, n = self._text, len(self._text), known
        while n < self.longest and place > n and text[place - n - 1] == text[end - n - 1] >= 0:
            n += 1
        return n
