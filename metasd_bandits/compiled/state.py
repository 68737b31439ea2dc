"""The state every built-in policy shares, and the few moves that all of them make.

A policy's whole state is one float64 buffer; kernels see it through named views (`State`), the
live decoder hands the buffer itself to compiled code (two arguments, a fraction of a
microsecond), and saving it is copying it.

Buffer: ``[K, P, R, theta (P), clock (2), available (K), pulls (K), pending (K), mean (K),
total (K), chance (K), score (K), rows (R x K), memory (the rest)]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.parts import row, table
from metasd_bandits.compiled.stream import uniform

__all__ = [
    "State",
    "book",
    "named_views",
    "new_buffer",
    "pick_by_probability",
    "pick_max",
    "put",
    "record",
    "share_max",
    "tied_share",
    "trials",
    "view",
]

_HEADER = 3
_CLOCK = 2
_SHARED_ROWS = 7
# A plain -1 has a type of its own, and what it is passed to compiles twice.
_NO_ARM: Any = np.int64(-1)


class State(NamedTuple):
    """Named views into a policy's buffer; K arms.

    Attributes
    ----------
    theta : (P,) float64
        The hyperparameters, in the order of the policy's fields.
    clock : (2,) float64
        ``clock[0]``: completed pulls t; ``clock[1]``: decisions made.
    available : (K,) float64
        1 where the arm may be chosen in this round, 0 where it is masked.
    pulls : (K,) float64
        Completed pulls n_i (rewards received).
    pending : (K,) float64
        Pulls in flight: decided, reward not yet back.
    mean : (K,) float64
        Mean reward; 1 (the optimistic end of the range) until the first reward arrives.
    total : (K,) float64
        Sum of rewards; the mean is ``total / pulls``, so that equal records tie exactly.
    chance : (K,) float64
        Propensity of the arm's last selection (1/K before it); kept by sampling policies.
    score : (K,) float64
        What the last decision compared: an index per arm, or a probability.
    rows : (R, K) float64
        What this policy alone remembers about each arm; its file names the rows.
    memory : (M,) float64
        What this policy alone remembers apart from arms; its file names the places.
    """

    theta: NDArray[np.float64]
    clock: NDArray[np.float64]
    available: NDArray[np.float64]
    pulls: NDArray[np.float64]
    pending: NDArray[np.float64]
    mean: NDArray[np.float64]
    total: NDArray[np.float64]
    chance: NDArray[np.float64]
    score: NDArray[np.float64]
    rows: NDArray[np.float64]
    memory: NDArray[np.float64]


def new_buffer(
    n_arms: int, theta: tuple[float, ...], n_rows: int = 0, n_memory: int = 0
) -> NDArray[np.float64]:
    """A fresh buffer: nothing pulled, every arm available, means at their optimistic end."""
    size = _HEADER + len(theta) + _CLOCK + (_SHARED_ROWS + n_rows) * n_arms + n_memory
    buffer = np.zeros(size)
    buffer[:_HEADER] = n_arms, len(theta), n_rows
    buffer[_HEADER : _HEADER + len(theta)] = theta
    state = named_views(buffer)
    state.available[:] = 1.0
    state.mean[:] = 1.0
    state.chance[:] = 1.0 / n_arms
    return buffer


def named_views(buffer):
    """The named views of a buffer; writing through them writes the buffer."""
    k, p, r = int(buffer[0]), int(buffer[1]), int(buffer[2])
    clock = _HEADER + p
    arms = clock + _CLOCK
    rows = arms + _SHARED_ROWS * k
    memory = rows + r * k
    return State(
        row(buffer, _HEADER, p),
        row(buffer, clock, _CLOCK),
        row(buffer, arms, k),
        row(buffer, arms + k, k),
        row(buffer, arms + 2 * k, k),
        row(buffer, arms + 3 * k, k),
        row(buffer, arms + 4 * k, k),
        row(buffer, arms + 5 * k, k),
        row(buffer, arms + 6 * k, k),
        table(buffer, rows, r, k),
        row(buffer, memory, buffer.size - memory),
    )


view = kernel(named_views)


@kernel
def put(row, values):
    """Copy values into a row; assigning the array would compile a message for unequal shapes."""
    for i in range(row.size):
        row[i] = values[i]


@kernel
def trials(s, i):
    """Pulls of arm i that are done or in flight."""
    return s.pulls[i] + s.pending[i]


@kernel
def pick_max(s, stream):
    """Book and return an available arm of the largest score; ties uniform. O(K).

    One pass of reservoir sampling: the j-th arm that ties replaces the choice with
    probability 1/j, so no draw is spent when nothing ties.
    """
    best, ties, arm = -np.inf, 0, _NO_ARM
    for i in range(s.score.size):
        if s.available[i] == 0.0:
            continue
        if ties == 0 or s.score[i] > best:
            best, ties, arm = s.score[i], 1, i
        elif s.score[i] == best:
            ties += 1
            if uniform(stream) * ties < 1.0:
                arm = i
    return book(s, arm)


@kernel
def pick_by_probability(s, stream):
    """Book and return an arm drawn from ``score``, read as probabilities that sum to 1. O(K)."""
    u = uniform(stream)
    cumulative, arm = 0.0, _NO_ARM
    for i in range(s.score.size):
        if s.available[i] == 0.0 or s.score[i] == 0.0:
            continue
        arm = i  # the last arm with weight takes what rounding left over
        cumulative += s.score[i]
        if u < cumulative:
            break
    return book(s, arm)


@kernel
def book(s, arm):
    """Count the decision and its pull in flight; return `arm`."""
    s.pending[arm] += 1.0
    s.clock[1] += 1.0
    return arm


@kernel
def tied_share(s, arm):
    """The probability with which `pick_max` chose `arm` from the scores as they stand. O(K)."""
    ties = 0
    for i in range(s.score.size):
        if s.available[i] != 0.0 and s.score[i] == s.score[arm]:
            ties += 1
    return 1.0 / ties


@kernel
def share_max(s):
    """Turn scores into the probabilities with which `pick_max` chooses."""
    best, ties = -np.inf, 0
    for i in range(s.score.size):
        if s.available[i] == 0.0:
            continue
        if ties == 0 or s.score[i] > best:
            best, ties = s.score[i], 1
        elif s.score[i] == best:
            ties += 1
    for i in range(s.score.size):
        tied = s.available[i] != 0.0 and s.score[i] == best
        s.score[i] = 1.0 / ties if tied else 0.0


@kernel
def record(s, arm, reward):
    """Land a reward: one pull fewer in flight, one more done, the mean moved. O(1)."""
    if s.pending[arm] > 0.0:
        s.pending[arm] -= 1.0
    s.clock[0] += 1.0
    s.pulls[arm] += 1.0
    s.total[arm] += reward
    s.mean[arm] = s.total[arm] / s.pulls[arm]
