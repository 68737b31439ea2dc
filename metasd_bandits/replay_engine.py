"""One policy played over columns: the loops of full and of rejection replay, compiled.

Rounds come as batches; buffer, stream and the waiting arm carry on from one to the next.
"""

import numpy as np
from numba import njit

from metasd_bandits.policies.ucb import select, update  # bound by specialise
from metasd_bandits.state import view


@njit(cache=True)
def _restore(buffer, fresh):
    for i in range(buffer.size):  # a slice assignment here costs ten times the rest of the loop
        buffer[i] = fresh[i]


@njit(cache=True, nogil=True)
def play(fresh, buffer, stream, starts, rewards, costs, some_masked, arms):
    """Full replay: decide, look up the chosen arm's reward, learn; fills `arms`."""
    s = view(buffer)
    timed = costs.shape[1] > 1
    for t in range(arms.size):
        if starts[t]:
            _restore(buffer, fresh)
        if some_masked:
            for i in range(s.available.size):
                s.available[i] = 0.0 if np.isnan(rewards[i, t]) else 1.0
        arm = select(s, stream)
        update(s, arm, rewards[arm, t], costs[arm, t if timed else 0], np.nan)
        arms[t] = arm


@njit(cache=True, nogil=True)
def match(fresh, buffer, stream, starts, logged, rewards, costs, keep, waiting, taken):
    """Rejection replay: the decision waits for a logged round with its arm; fills `taken`.

    waiting[0] is the arm decided upon, or -1.
    """
    s = view(buffer)
    timed = costs.size > 1
    for t in range(logged.size):
        if starts[t]:
            _restore(buffer, fresh)
            waiting[0] = -1
        if waiting[0] < 0:
            waiting[0] = select(s, stream)
        taken[t] = keep[t] and logged[t] == waiting[0]
        if taken[t]:
            update(s, waiting[0], rewards[t], costs[t if timed else 0], np.nan)
            waiting[0] = -1
