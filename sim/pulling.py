"""A plain bandit run to a horizon, as one compiled loop. A template, as `sim.decoding` is."""

import numpy as np
from numba import njit

from metasd_bandits.lean import lean
from metasd_bandits.state import put, view
from sim.acceptance.base import Place
from sim.defaults import pay, select, update  # bound by specialise
from sim.schedules import place


@lean(cache=True)
def pull(s, T, model, timetable, streams, pulls, marks, at_marks):
    """T rounds: pick an arm, get paid, learn. Returns the sum of rewards."""
    policy_stream, world_stream = streams
    here, total, mark = Place(0, 0, 0, 0.0), 0.0, 0
    for t in range(T):
        here = place(timetable, t, t, here, world_stream)
        arm = select(s, policy_stream)
        reward = pay(model, arm, here, world_stream)
        update(s, arm, reward, 1.0, np.nan)
        total += reward
        pulls[here.domain, arm] += 1.0 - here.weight
        if here.weight > 0.0:
            pulls[here.to, arm] += here.weight
        if mark < marks.size and t + 1 == marks[mark]:
            at_marks[mark, 0] = total
            for i in range(pulls.shape[1]):
                at_marks[mark, 1 + i] = 0.0
                for d in range(pulls.shape[0]):
                    at_marks[mark, 1 + i] += pulls[d, i]
            mark += 1
    return total


@njit(cache=True, nogil=True)
def run(first, last, fresh, streams, T, world, marks, totals, pulls, curves):
    """Replications first..last-1; each has its own streams, state and rows of the results."""
    model, timetable = world
    for r in range(first, last):
        s, pulled = view(fresh.copy()), pulls[r].copy()
        both = streams[0][r].copy(), streams[1][r].copy()  # as in `sim.decoding.run`
        totals[r] = pull(s, T, model, timetable, both, pulled, marks, curves[r])
        for d in range(pulls.shape[1]):
            put(pulls[r, d], pulled[d])
