"""What speaks for a candidate token, as bins in which its chance to stand is learned.

A copied token has the length of the text's end that matched, how often it occurred, and the share
of those places that went on with this token. A drafter's token has the drafter's own probability,
its rank among the drafter's tokens, and whether what was copied agrees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import product

__all__ = ["AGAINST", "ALONE", "RANKS", "Evidence"]

RANKS = 3  # of a drafter's tokens at one place: its first, and the runners-up
ALONE, AGAINST = 0, 1  # nothing was copied there; something else was; above: it was, how surely

_LENGTHS = (2, 3, 4, 5, 7, 10)
_PLACES = (2, 4)
_SHARES = (0.34, 0.67, 1.0)
_CONFIDENCES = (0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_AGREEING = (0.3, 0.7)  # chances of what was copied
_RELATIONS = 2 + len(_AGREEING) + 1
_DEPTHS = 12
_COPIED = tuple(len(edges) + 1 for edges in (_LENGTHS, _PLACES, _SHARES))
_DRAFTED = (RANKS, len(_CONFIDENCES) + 1, _RELATIONS)


class Evidence:
    """The bins of a pool: their names, their places, and what to believe before any outcome.

    Parameters
    ----------
    drafters : sequence of str
        Names of those that draft rather than copy.

    Attributes
    ----------
    names : list of str
        ``copy/...`` of what this text repeats, ``recall/...`` of what earlier texts hold, then
        each drafter's.
    prior : dict of str to (mean, strength)
    """

    def __init__(self, drafters: Sequence[str]) -> None:
        self.names, means = list[str](), list[float]()
        for where in ("copy", "recall"):
            for bins in product(*map(range, _COPIED)):
                self.names.append(f"{where}/{'.'.join(map(str, bins))}")
                means.append(_copied_mean(*bins))
        self._first_drafter = len(self.names)
        for name in drafters:
            for bins in product(*map(range, _DRAFTED)):
                self.names.append(f"{name}/{'.'.join(map(str, bins))}")
                means.append(_drafted_mean(*bins))
        self._first_depth = len(self.names)
        for name in drafters:
            self.names += [f"{name}/depth/{depth}" for depth in range(_DEPTHS)]
            means += [0.6] * _DEPTHS
        self.prior = {name: (mean, 4.0) for name, mean in zip(self.names, means, strict=True)}

    def copied(self, recalled: bool, length: int, places: int, share: float) -> int:
        """The bin of a token that followed a match.

        Parameters
        ----------
        recalled : bool
            Whether only earlier texts have it.
        length : int
            Tokens of the longest match that went on with it, at least 1.
        places, share
            How many places matched, and the share of them that went on with it.
        """
        key = int(recalled)
        for edges, value in ((_LENGTHS, length), (_PLACES, places), (_SHARES, share)):
            key = key * (len(edges) + 1) + bisect_right(edges, value)
        return key

    def drafted(self, drafter: int, rank: int, confidence: float, relation: int) -> int:
        """The bin of a token that a drafter gave probability `confidence` and this rank."""
        key = (drafter * RANKS + rank) * (len(_CONFIDENCES) + 1)
        key += bisect_right(_CONFIDENCES, confidence)
        return self._first_drafter + key * _RELATIONS + relation

    def at_depth(self, drafter: int, depth: int) -> int:
        """The bin of a drafter's first tokens at a depth, from 0, whatever speaks for them."""
        return self._first_depth + drafter * _DEPTHS + min(depth, _DEPTHS - 1)

    @staticmethod
    def agreeing(chance: float) -> int:
        """The relation of a drafter's token to the same token copied with this chance."""
        return 2 + bisect_right(_AGREEING, chance)


def _copied_mean(length: int, places: int, share: int) -> float:
    return (0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)[length] * (0.15, 0.45, 0.75, 1.0)[share]


def _drafted_mean(rank: int, confidence: int, relation: int) -> float:
    edges = (0.0, *_CONFIDENCES, 1.0)
    own = (edges[confidence] + edges[confidence + 1]) / 2
    if relation == ALONE:
        return own
    if relation == AGAINST:
        return 0.8 * own
    return 1.0 - (1.0 - own) * (1.0 - (0.15, 0.5, 0.85)[relation - 2])
