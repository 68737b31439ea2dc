"""What one replayed run has earned so far, by query and by block of rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from metasd_bandits.columns import Batch
from metasd_bandits.intervals import UnitSums

__all__ = ["Tally"]


@njit(cache=True)
def _gather(arms, rewards, tokens, steps, out_reward, out_tokens, out_steps):
    timed = steps.shape[1] > 1
    known = tokens.shape[1] > 1
    for t in range(arms.size):
        arm = arms[t]
        out_reward[t] = rewards[arm, t]
        out_tokens[t] = tokens[arm, t if known else 0]
        out_steps[t] = steps[arm, t if timed else 0]


@njit(cache=True)
def _first_passage(query, tokens, steps, B, run, reached, rounds_to, steps_to):
    """Rounds and steps until each query has emitted B tokens, marked where it happens.

    run = [query, tokens, rounds, steps, fewest tokens of a query] carries on between batches.
    """
    for t in range(query.size):
        if query[t] != run[0]:
            if run[0] >= 0.0:
                run[4] = min(run[4], run[1])
            run[0], run[1], run[2], run[3] = query[t], 0.0, 0.0, 0.0
        before = run[1]
        run[1] += tokens[t]
        run[2] += 1.0
        run[3] += steps[t]
        crossed = before < B and run[1] >= B
        reached[t] = 1.0 if crossed else 0.0
        rounds_to[t] = run[2] if crossed else 0.0
        steps_to[t] = run[3] if crossed else 0.0


class Tally:
    """Sums of one run: rounds, reward, tokens, steps, and rounds and steps to B tokens.

    Parameters
    ----------
    n_arms : int
    tokens : int or None
        B.
    """

    def __init__(self, n_arms: int, tokens: int | None) -> None:
        self.by_query, self.by_round = UnitSums(7), UnitSums(7)
        self.pulls = np.zeros(n_arms, dtype=np.int64)
        self.rounds = self.accepted = 0
        self._query_of_last = -1
        self._B = tokens
        self._run = np.array([-1.0, 0.0, 0.0, 0.0, np.inf])
        self._interleaved = False

    @property
    def queries(self) -> int:
        """Distinct queries seen."""
        return self._query_of_last + 1

    def add_full(
        self,
        query: NDArray[np.int64],
        arms: NDArray[np.int64],
        rewards: NDArray[np.float64],
        tokens: NDArray[Any] | None,
        steps: NDArray[np.float64] | None,
    ) -> None:
        """Rounds played with `arms`; the tables are (K, n)."""
        n, K = len(arms), len(rewards)
        reward, emitted, time = np.empty(n), np.empty(n), np.empty(n)
        nothing = np.ones((K, 1))
        _gather(
            arms,
            np.ascontiguousarray(rewards),
            nothing if tokens is None else np.ascontiguousarray(tokens, dtype=np.float64),
            nothing if steps is None else np.ascontiguousarray(steps),
            reward,
            emitted,
            time,
        )
        self.rounds += n
        self._seen(query)
        self._add(query, arms, reward, emitted, time)

    def add_logged(self, batch: Batch, taken: NDArray[np.bool_]) -> None:
        """The rounds of a batch that were taken."""
        self.rounds += len(batch)
        self._seen(batch.query)
        self._add(
            batch.query[taken],
            batch["arm"][taken],
            batch["reward"][taken],
            batch["emitted"][taken].astype(np.float64),
            batch["step"][taken],
        )

    def _seen(self, query: NDArray[np.int64]) -> None:
        self._interleaved |= bool((np.diff(query, prepend=self._query_of_last) < 0).any())
        self._query_of_last = max(self._query_of_last, int(query.max()))

    def _add(
        self,
        query: NDArray[np.int64],
        arms: NDArray[np.int64],
        reward: NDArray[np.float64],
        tokens: NDArray[np.float64],
        steps: NDArray[np.float64],
    ) -> None:
        n = len(arms)
        passage: list[NDArray[np.float64] | float] = [0.0, 0.0, 0.0]
        if self._B is not None:
            reached, rounds_to, steps_to = np.empty(n), np.empty(n), np.empty(n)
            _first_passage(
                query, tokens, steps, float(self._B), self._run, reached, rounds_to, steps_to
            )
            passage = [reached, rounds_to, steps_to]
        columns = (1.0, reward, tokens, steps, *passage)
        self.by_query.add(query, *columns)
        self.by_round.add(np.arange(self.accepted, self.accepted + n), *columns)
        self.accepted += n
        self.pulls += np.bincount(arms, minlength=len(self.pulls))

    def too_short(self, tokens: int) -> str:
        """Why rounds to B tokens cannot be told, or an empty string."""
        if self._interleaved:
            return "queries interleave (batched decoding); sort them with convert --by-query"
        early = self.queries - round(float(self.by_query.sums[:, 4].sum()))
        if not early:
            return ""
        fewest = int(min(self._run[4], self._run[1]))
        return (
            f"{early} of {self.queries} queries end before {tokens} tokens; one has {fewest} only, "
            "so ask for at most that many"
        )
