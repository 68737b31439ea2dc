r"""Whom to ask, and how far to let it draft: as long as the tokens are worth the time.

Speed in the long run is :math:`E[\text{tokens}] / E[\text{time}]` over rounds, a ratio of sums, not
the mean of ratios. Let rho be the largest that any rule reaches. A rule reaches it if and only if
it maximises in every round

.. math:: E[\text{tokens}] - \rho \, E[\text{time}]

given what the round shows (Dinkelbach 1967; docs/theory.md, theorem 5). So rho is the price of a
second in tokens: a drafter is asked, and a chain goes on, exactly while the tokens it is expected
to add exceed rho times its seconds. `Rate` estimates rho by the speed reached so far, which
Dinkelbach's iteration does too: the best rule for a price reaches at least that price.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from metasd_bandits import checks

__all__ = ["Rate", "best_rate", "draft_length", "marginal_gain", "whom_to_ask"]


class Rate:
    """Tokens per second, learned while decoding: the ratio of two sums that fade with age.

    Parameters
    ----------
    start : float
        The rate before anything was seen, positive (plain decoding's, say).
    keep : float, default 0.99
        What a round counts for a round later, in (0, 1].
    strength : float, default 4.0
        How many seconds `start` is worth in rounds: it weighs like so many rounds of 1 / start
        seconds. Positive.

    Examples
    --------
    >>> rate = Rate(start=50.0, keep=0.9)
    >>> for _ in range(100):
    ...     rate.observe(tokens=3, seconds=0.03)
    >>> round(rate.value, 2)
    100.0
    """

    def __init__(self, start: float, keep: float = 0.99, strength: float = 4.0) -> None:
        self.start = checks.number("start", start, 0.0, open_low=True)
        self.keep = checks.number("keep", keep, 0.0, 1.0, open_low=True)
        self._tokens = checks.number("strength", strength, 0.0, open_low=True)
        self._seconds = self._tokens / self.start

    @property
    def value(self) -> float:
        """Tokens per second, positive."""
        return self._tokens / self._seconds

    def observe(self, tokens: float, seconds: float) -> None:
        """Learn from a round: what it emitted, at least 1, and how long it took, above 0."""
        n = checks.number("tokens", tokens, 1.0)
        s = checks.number("seconds", seconds, 0.0, open_low=True)
        self._tokens = self.keep * self._tokens + n
        self._seconds = self.keep * self._seconds + s

    def state_dict(self) -> dict[str, Any]:
        """The sums, as JSON holds them."""
        return {"tokens": self._tokens, "seconds": self._seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._tokens = checks.number("tokens", state["tokens"], 0.0, open_low=True)
        self._seconds = checks.number("seconds", state["seconds"], 0.0, open_low=True)


def marginal_gain(held: Sequence[float], offered: Sequence[float], budget: int) -> float:
    """What further candidates add to a block: the `budget` likeliest of all, less those without.

    Parameters
    ----------
    held, offered : sequence of float
        Probabilities to stand (`metasd_bandits.blocks.allocation.path_chances`), of the
        candidates at hand and of those that a drafter is expected to bring.
    budget : int
        Nodes of a block, at least 0.

    Examples
    --------
    >>> round(marginal_gain([0.9, 0.5], [0.6, 0.2], budget=2), 6)
    0.1
    """
    checks.integer("budget", budget, 0)
    without = sum(heapq.nlargest(budget, held))
    return sum(heapq.nlargest(budget, [*held, *offered])) - without


def whom_to_ask(
    held: Sequence[float],
    offers: Sequence[Sequence[float]],
    seconds: Sequence[float],
    budget: int,
    rate: float,
) -> list[int]:
    """The drafters to ask, in order: each the one of largest net gain, while it is positive.

    One drafter is asked exactly where that is optimal. Of several, each one asked raises the
    objective, and the set is at least as good as the best of them alone.

    Parameters
    ----------
    held : sequence of float
        Probabilities to stand of the candidates at hand (what is free: lookups).
    offers : sequence of sequence of float
        For each drafter those of the nodes that it is expected to bring.
    seconds : sequence of float
        What asking each takes, at least 0, its tokens' verification included where that grows.
    budget : int
    rate : float
        Tokens per second (`Rate.value`), at least 0.

    Examples
    --------
    >>> whom_to_ask([0.2], [[0.8, 0.5], [0.7, 0.4]], [0.004, 0.001], budget=5, rate=100.0)
    [1, 0]
    >>> whom_to_ask([0.95, 0.9, 0.9, 0.85, 0.8], [[0.8, 0.5]], [0.004], budget=5, rate=100.0)
    []
    """
    if len(offers) != len(seconds):
        raise checks.ConfigError(f"{len(offers)} offers but {len(seconds)} times; give as many")
    times = [checks.number("seconds", s, 0.0) for s in seconds]
    checks.number("rate", rate, 0.0)
    asked: list[int] = []
    block = list(held)
    while len(asked) < len(offers):
        nets = {
            i: marginal_gain(block, offer, budget) - rate * times[i]
            for i, offer in enumerate(offers)
            if i not in asked
        }
        best = max(nets, key=nets.__getitem__)
        if nets[best] <= 0.0:
            break
        asked.append(best)
        block += offers[best]
    return asked


def draft_length(chances: Sequence[float], seconds: float, rate: float) -> int:
    """How many tokens of a chain are worth drafting one after another.

    Parameters
    ----------
    chances : sequence of float
        That each token stands given those before it, in [0, 1].
    seconds : float
        One token's time to draft (and to verify, where that grows), at least 0.
    rate : float
        Tokens per second, at least 0.

    Examples
    --------
    >>> draft_length([0.9, 0.8, 0.3, 0.9], seconds=0.004, rate=100.0)
    2
    """
    price = checks.number("rate", rate, 0.0) * checks.number("seconds", seconds, 0.0)
    stands = np.cumprod([checks.number("chances", c, 0.0, 1.0) for c in chances])
    return int((stands > price).sum())


def best_rate(
    gains: Sequence[float], seconds: Sequence[float], tokens: float = 1.0, time: float = 1.0
) -> tuple[list[int], float]:
    r"""The set that maximises (tokens + its gains) / (time + its seconds), and that rate.

    For gains that add up and do not depend on the round; items are taken by falling gain per
    second while that exceeds the rate reached (ours, docs/theory.md, theorem 5).

    Examples
    --------
    >>> best_rate([0.5, 0.3, 0.1], [0.1, 0.3, 0.2])
    ([0], 1.3636363636363635)
    """
    g = [checks.number("gains", x, 0.0) for x in gains]
    s = [checks.number("seconds", x, 0.0) for x in seconds]
    n = checks.number("tokens", tokens, 0.0)
    T = checks.number("time", time, 0.0, open_low=True)
    chosen: list[int] = []
    for i in sorted(range(len(g)), key=lambda i: g[i] / s[i] if s[i] else np.inf, reverse=True):
        if g[i] * T <= n * s[i]:
            break
        chosen.append(i)
        n, T = n + g[i], T + s[i]
    return sorted(chosen), n / T
