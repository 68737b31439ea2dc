"""Joint arms: one drafter under several draft lengths, so that the bandit learns the pair."""

from __future__ import annotations

from collections.abc import Sequence

from metasd_bandits import checks
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.sampling import Sampling

__all__ = ["Capped", "joint_arms"]


class Capped(Drafter):
    """A drafter that is asked for at most `length` tokens; its state stays the drafter's own.

    Several may share one drafter: the router starts it and tells it of commits once.

    Parameters
    ----------
    drafter : Drafter
    length : int
        At least 1. The arm's name is the drafter's with ``@length``.
    """

    def __init__(self, drafter: Drafter, length: int) -> None:
        self._drafter = drafter
        self.length = checks.integer("draft_length", length, 1)
        self.name = f"{drafter.name}@{length}"
        self.needs_features = drafter.needs_features

    def asked(self, n: int) -> list[tuple[Drafter, int]]:
        return self._drafter.asked(min(n, self.length))

    def most_tokens(self, n: int) -> int:
        return self._drafter.most_tokens(min(n, self.length))

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        return self._drafter.propose(tokens, min(n, self.length), sampling)


def joint_arms(drafters: Sequence[Drafter], lengths: Sequence[int]) -> list[Drafter]:
    """An arm for every pair of drafter and length ("no draft" has but one).

    Raises
    ------
    ConfigError
        If there are no lengths, or two are the same.
    """
    if not lengths or len(set(lengths)) < len(lengths):
        raise checks.ConfigError(
            f"draft_length={list(lengths)!r}: give one length, or several different ones"
        )
    return [
        arm
        for drafter in drafters
        for arm in ([drafter] if drafter.name == "none" else [Capped(drafter, n) for n in lengths])
    ]
