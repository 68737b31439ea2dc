"""Acceptance replayed from a recorded trace: each pull draws one of the arm's own rounds.

The law is the empirical one of the arm's rounds, drawn with replacement (a bootstrap); accepted
drafts, block efficiency and block divergence of a round stay together. One uniform number a round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.stream import uniform
from metasd_bandits.traces.jsonl import Trace
from sim.acceptance.base import AcceptanceModel

__all__ = ["Recorded"]


class Parameters(NamedTuple):
    """Where each arm's rounds begin (K + 1), and accepted, r_BE, r_BD of every round."""

    starts: NDArray[np.int64]
    accepted: NDArray[np.int64]
    efficiency: NDArray[np.float64]
    divergence: NDArray[np.float64]


@kernel
def draft(model, memory, arm, place, stream):
    first = model.starts[arm]
    m = first + int(uniform(stream) * (model.starts[arm + 1] - first))
    return model.accepted[m], model.efficiency[m], model.divergence[m]


@dataclass(frozen=True, eq=False)
class Recorded(AcceptanceModel):
    """Rounds of a trace, resampled.

    Parameters
    ----------
    rounds : Trace
        What `metasd_bandits.read_trace` gives. Rounds whose block was cut short by the end of the
        text are left out where `whole` says so.
    whole : bool, default False
        Use only rounds that drafted all N tokens.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If an arm has no round left.
    """

    rounds: Trace
    whole: bool = False
    draft = staticmethod(draft)

    def __post_init__(self) -> None:
        header = self.rounds.header
        object.__setattr__(self, "draft_length", header.draft_length)
        object.__setattr__(self, "n_arms", len(header.arms))
        for name, count in zip(header.arms, self.counts(), strict=True):
            if count == 0:
                raise checks.ConfigError(
                    f"arm {name!r} has no round in the trace; record one with policy 'uniform'"
                )

    def _of(self, arm: int) -> list[Any]:
        N, rounds = self.draft_length, [r for r in self.rounds if r.arm == arm]
        return [r for r in rounds if r.positions == N] if self.whole else rounds

    def counts(self) -> list[int]:
        """Rounds that each arm can draw from."""
        return [len(self._of(arm)) for arm in range(self.n_arms)]

    def parameters(self) -> Parameters:
        per_arm = [self._of(arm) for arm in range(self.n_arms)]
        starts = np.concatenate([[0], np.cumsum([len(rounds) for rounds in per_arm])])

        def column(name: str) -> Iterable[float]:
            return (getattr(r, name) for rounds in per_arm for r in rounds)

        return Parameters(
            starts.astype(np.int64),
            np.fromiter(column("accepted"), np.int64),
            np.fromiter(column("block_efficiency"), np.float64),
            np.fromiter(column("block_divergence"), np.float64),
        )

    def tokens_per_round(self) -> NDArray[np.float64]:
        means = [np.mean([r.accepted + 1 for r in self._of(i)]) for i in range(self.n_arms)]
        return np.array([means])

    def expected_reward(self, reward: str) -> NDArray[np.float64]:
        checks.choice("reward", reward, ("be", "bd"))
        name = {"be": "block_efficiency", "bd": "block_divergence"}[reward]
        means = [np.mean([getattr(r, name) for r in self._of(i)]) for i in range(self.n_arms)]
        return np.array([means])
