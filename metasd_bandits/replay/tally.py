"""What one replayed run has earned so far, by query and by block of rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from metasd_bandits.intervals import UnitSums
from metasd_bandits.traces.columns import Batch

__all__ = ["COLUMNS", "Tally"]

COLUMNS = 7
N, REWARD, TOKENS, STEPS, REACHED, ROUNDS_TO, STEPS_TO = range(COLUMNS)
_QUERY, _TOKENS, _ROUNDS, _STEPS, _FEWEST = range(5)


@njit(cache=True, nogil=True)
def _add_rounds(query, units, width, arms, rows, rewards, tokens, steps, B, run, sums, pulls):
    """Add rounds to their units; mark the round in which a query reaches B tokens.

    rewards, tokens and steps are tables whose row for round t is rows[t]; tokens and steps may
    have one column for all rounds. run = [query, tokens, rounds, steps, fewest tokens of a query]
    carries on between batches.
    """
    known, timed = tokens.shape[1] > 1, steps.shape[1] > 1
    now, out, rounds, spent = run[_QUERY], run[_TOKENS], run[_ROUNDS], run[_STEPS]
    for t in range(arms.size):
        row = rows[t]
        emitted = tokens[row, t if known else 0]
        step = steps[row, t if timed else 0]
        unit = sums[units[t] // width]
        unit[N] += 1.0
        unit[REWARD] += rewards[row, t]
        unit[TOKENS] += emitted
        unit[STEPS] += step
        pulls[arms[t]] += 1
        if query[t] != now:
            if now >= 0.0:
                run[_FEWEST] = min(run[_FEWEST], out)
            now, out, rounds, spent = query[t], 0.0, 0.0, 0.0
        before = out
        out, rounds, spent = out + emitted, rounds + 1.0, spent + step
        if before < B and out >= B:
            unit[REACHED] += 1.0
            unit[ROUNDS_TO] += rounds
            unit[STEPS_TO] += spent
    run[_QUERY], run[_TOKENS], run[_ROUNDS], run[_STEPS] = now, out, rounds, spent


add_rounds: Any = _add_rounds  # numba's stubs know dispatchers without arguments only


class Tally:
    """Sums of one run: rounds, reward, tokens, steps, and rounds and steps to B tokens.

    Parameters
    ----------
    n_arms : int
    tokens : int or None
        B.
    """

    def __init__(self, n_arms: int, tokens: int | None) -> None:
        self.by_query, self.by_round = UnitSums(COLUMNS), UnitSums(COLUMNS)
        self.pulls = np.zeros(n_arms, dtype=np.int64)
        self.rounds = self.accepted = 0
        self._query_of_last = -1
        self._interleaved = False
        self._B = float("inf") if tokens is None else float(tokens)
        self._run = np.array([-1.0, 0.0, 0.0, 0.0, np.inf])

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
        self._seen(query)
        nothing = np.ones((len(rewards), 1))
        self._add(
            query,
            arms,
            arms,
            rewards,
            nothing if tokens is None else tokens,
            nothing if steps is None else steps,
        )

    def add_logged(self, batch: Batch, taken: NDArray[np.bool_]) -> None:
        """The rounds of a batch that were taken."""
        self._seen(batch.query)
        arms = batch["arm"][taken]
        reward, tokens, steps = (batch[n][taken][None] for n in ("reward", "emitted", "step"))
        self._add(batch.query[taken], arms, np.zeros_like(arms), reward, tokens, steps)

    def _seen(self, query: NDArray[np.int64]) -> None:
        self.rounds += len(query)
        largest = int(query.max())
        falls = query[0] < self._query_of_last or (query[1:] < query[:-1]).any()
        self._interleaved |= bool(falls)
        self._query_of_last = max(self._query_of_last, largest)

    def _add(
        self,
        query: NDArray[np.int64],
        arms: NDArray[np.int64],
        rows: NDArray[np.int64],
        rewards: NDArray[np.float64],
        tokens: NDArray[Any],
        steps: NDArray[np.float64],
    ) -> None:
        n = len(arms)
        if not n:
            return
        tables = (np.ascontiguousarray(table) for table in (rewards, tokens, steps))
        rounds = (arms, rows, *tables)
        if self.queries < 2:  # with more queries nobody asks for blocks of rounds
            blocks = np.arange(self.accepted, self.accepted + n)
            sums, width = self.by_round.room_for(blocks[-1])
            aside = (self._run.copy(), sums, np.zeros_like(self.pulls))
            add_rounds(query, blocks, width, *rounds, self._B, *aside)
        sums, width = self.by_query.room_for(query.max())
        add_rounds(query, query, width, *rounds, self._B, self._run, sums, self.pulls)
        self.accepted += n

    def too_short(self, tokens: int) -> str:
        """Why rounds to B tokens cannot be told, or an empty string."""
        if self._interleaved:
            return "queries interleave (batched decoding); sort them with convert --by-query"
        early = self.queries - round(float(self.by_query.sums[:, REACHED].sum()))
        if not early:
            return ""
        fewest = int(min(self._run[_FEWEST], self._run[_TOKENS]))
        return (
            f"{early} of {self.queries} queries end before {tokens} tokens; one has {fewest} only, "
            "so ask for at most that many"
        )
