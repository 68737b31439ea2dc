"""Exact expectations over a policy's whole decision tree, with its own kernels deciding.

Two arms with 0/1 rewards. Histories that leave the same counts behind are one state, so a run of
T pulls has about T^4 / 24 of them. A template for `metasd_bandits.compiled.specialise`.
"""

import numpy as np
from numba import njit

from metasd_bandits.compiled.borrow import borrow
from metasd_bandits.compiled.stand_ins import probabilities, update  # bound by specialise
from metasd_bandits.compiled.state import book, view


@njit(cache=True)
def expected_pulls(fresh, horizons, success):
    """Expected pulls of arm 1 by each horizon, for each row of success probabilities.

    Parameters
    ----------
    fresh : (B,) float64
        The policy's buffer before the first pull, two arms.
    horizons : (H,) int64
        Rising.
    success : (M, 2) float64

    Returns
    -------
    pulls : (M, H) float64
    clashes : int
        States that two histories reach with buffers that differ: must be 0, or the counts are
        not all that the policy remembers.
    """
    pulls = np.zeros((success.shape[0], horizons.size))
    weights, buffers = np.ones((1, success.shape[0])), fresh.copy().reshape((1, fresh.size))
    spent, lost = np.zeros(success.shape[0]), np.zeros(success.shape[0])
    h, clashes = 0, 0
    scratch = fresh.copy()
    for t in range(horizons[-1]):
        after = place(t + 1, t + 1, t + 1, 0) + 1
        next_weights = np.zeros((after, success.shape[0]))
        next_buffers = np.zeros((after, fresh.size))
        for n in range(t + 1):  # pulls and successes of arm 0, successes of arm 1
            for a in range(n + 1):
                for b in range(t - n + 1):
                    k = place(t, n, a, b)
                    if buffers[k, 0] == 0.0:
                        continue  # no history leads here
                    scratch[:] = buffers[k]
                    s = view(borrow(scratch))
                    probabilities(s)
                    chance = s.score.copy()
                    for arm in range(2):
                        if chance[arm] == 0.0:
                            continue
                        for m in range(success.shape[0]):
                            add(spent, lost, m, arm * chance[arm] * weights[k, m])
                        for r in range(2):
                            scratch[:] = buffers[k]
                            s = view(borrow(scratch))
                            book(s, arm)
                            update(s, arm, float(r), 1.0, np.nan)
                            s.score[:] = 0.0
                            j = place(t + 1, n + 1 - arm, a + r * (1 - arm), b + r * arm)
                            if next_buffers[j, 0] == 0.0:
                                next_buffers[j] = scratch
                            elif not np.all(next_buffers[j] == scratch):
                                clashes += 1
                            for m in range(success.shape[0]):
                                p = success[m, arm]
                                step = chance[arm] * (p if r == 1 else 1.0 - p)
                                next_weights[j, m] += weights[k, m] * step
        weights, buffers = next_weights, next_buffers
        if t + 1 == horizons[h]:
            pulls[:, h] = spent
            h += 1
    return pulls, clashes


@njit(cache=True)
def add(total, lost, m, term):
    """Compensated summation (Kahan): millions of small terms."""
    term -= lost[m]
    new = total[m] + term
    lost[m] = (new - total[m]) - term
    total[m] = new


@njit(cache=True)
def place(t, n, a, b):
    """Where a state stands in its level: n outermost, then a, then b (t - n + 1 values)."""
    # sum over m < n of (m + 1) (t - m + 1)
    before = n * (n + 1) // 2 * (t + 1) - (n - 1) * n * (n + 1) // 3
    return before + a * (t - n + 1) + b
