"""What drafting and verifying take on this machine, learned while decoding."""

from __future__ import annotations

import math

__all__ = ["Steps", "VerifyTimes"]

_MEMORY = 50.0  # measurements that a mean remembers
_OUTLIER = 3.0  # times the mean; what took longer was held up by something else


class Steps:
    """Seconds of a step that is always the same: a mean that forgets."""

    def __init__(self) -> None:
        self.mean, self.n = 0.0, 0.0

    def observe(self, seconds: float) -> None:
        if self.n > 2 and seconds > _OUTLIER * self.mean:
            seconds = _OUTLIER * self.mean
        self.n = min(self.n + 1.0, _MEMORY)
        self.mean += (seconds - self.mean) / self.n


class VerifyTimes:
    """Seconds of verifying a block, as a function of its nodes.

    More nodes take no less time, so the means are smoothed to a rising function; a size that was
    never tried is believed to take no longer than the next smaller one, until it is tried.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Steps] = {}
        self._fitted: list[tuple[int, float]] = []

    def observe(self, nodes: int, seconds: float) -> None:
        """Learn from a block of so many nodes."""
        self._steps.setdefault(nodes, Steps()).observe(seconds)
        self._fitted = self._rising()

    def __call__(self, nodes: int) -> float:
        """Expected seconds; NaN before anything was measured."""
        seconds = self._fitted[0][1] if self._fitted else math.nan
        for size, fitted in self._fitted:
            if size > nodes:
                break
            seconds = fitted
        return seconds

    def _rising(self) -> list[tuple[int, float]]:
        """Pool adjacent violators, weighted by the measurements."""
        pools: list[tuple[list[int], float, float]] = []
        for size in sorted(self._steps):
            step = self._steps[size]
            sizes, mean, n = [size], step.mean, step.n
            while pools and pools[-1][1] >= mean:
                before, other, m = pools.pop()
                sizes, mean, n = before + sizes, (m * other + n * mean) / (m + n), m + n
            pools.append((sizes, mean, n))
        return [(size, mean) for sizes, mean, _ in pools for size in sizes]
