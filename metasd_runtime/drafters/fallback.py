"""One drafter where it has something to say, and another where it has not.

Prompt lookup drafts for nothing, but only where the text repeats itself; a trained head always
drafts something. Behind prompt lookup a head is asked for the rest alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from metasd_runtime.decoding.drafter import Draft, Drafter, after, passes
from metasd_runtime.decoding.sampling import Sampling

__all__ = ["Fallback"]


class Fallback(Drafter):
    """Draft with the first drafter; where its draft is empty, with the second.

    Their states stay their own, and several arms may share them: the router starts each and tells
    it of commits once.

    Parameters
    ----------
    first, otherwise : Drafter
        The arm's name is their two, with ``>`` between.
    """

    def __init__(self, first: Drafter, otherwise: Drafter) -> None:
        self.first, self.otherwise = first, otherwise
        self.name = f"{first.name}>{otherwise.name}"
        self.needs_features = tuple(sorted({*first.needs_features, *otherwise.needs_features}))

    def asked(self, n: int) -> list[tuple[Drafter, int]]:
        return [*self.first.asked(n), *self.otherwise.asked(n)]

    def clone(self) -> Fallback:
        """Another over the same weights."""
        return Fallback(self.first.clone(), self.otherwise.clone())

    def most_tokens(self, n: int) -> int:
        return max(self.first.most_tokens(n), self.otherwise.most_tokens(n))

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        draft = self.first.propose(tokens, n, sampling)
        if not passes(draft, sampling):
            return draft
        return after(draft, self.otherwise.propose(tokens, n, sampling))
