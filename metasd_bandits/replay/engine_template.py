"""One policy played over columns: the loops of full and of rejection replay, compiled.

Rounds come as batches; buffer, stream and the waiting arm carry on from one to the next. The
loops allocate nothing and are compiled without Numba's reference counting (``_nrt=False``, which
the functions they call inherit): counting the views of a state in every call would take twenty
times as long as the arithmetic.
"""

from typing import Any

import numpy as np
from numba import njit

from metasd_bandits.compiled.stand_ins import select, update, update_all  # bound by specialise
from metasd_bandits.compiled.state import put, view

_LEAN: Any = {"_nrt": False, "nogil": True}


@njit(cache=True, **_LEAN)
def mask(s, rewards, t):
    """Leave out the arms without a reward; returns whether there were any."""
    broken = False
    for i in range(s.available.size):
        s.available[i] = 0.0 if np.isnan(rewards[i, t]) else 1.0
        broken |= s.available[i] == 0.0
    return broken


@njit(cache=True, **_LEAN)
def play(fresh, buffer, stream, first, last, starts, rewards, costs, some_masked, arms):
    """Full replay of rounds first..last: decide, look up the reward, learn; fills `arms`."""
    s = view(buffer)
    timed = costs.shape[1] > 1
    for t in range(first, last):
        if starts[t]:
            put(buffer, fresh)
        if some_masked:
            mask(s, rewards, t)
        arm = select(s, stream)
        update(s, arm, rewards[arm, t], costs[arm, t if timed else 0], np.nan)
        arms[t] = arm


@njit(cache=True, **_LEAN)
def play_all(fresh, buffer, stream, first, last, starts, rewards, costs, some_masked, arms, every):
    """`play` for a policy that learns from every arm's reward; `every` is scratch, (K,)."""
    s = view(buffer)
    timed = costs.shape[1] > 1
    for t in range(first, last):
        if starts[t]:
            put(buffer, fresh)
        broken = some_masked and mask(s, rewards, t)
        arm = select(s, stream)
        cost = costs[arm, t if timed else 0]
        if broken:
            update(s, arm, rewards[arm, t], cost, np.nan)
        else:
            for i in range(every.size):
                every[i] = rewards[i, t]
            update_all(s, arm, every, cost, np.nan)
        arms[t] = arm


@njit(cache=True, **_LEAN)
def match(fresh, buffer, stream, first, last, starts, logged, rewards, costs, keep, waiting, taken):
    """Rejection replay of rounds first..last: a decision waits for its arm; fills `taken`.

    waiting[0] is the arm decided upon, or -1.
    """
    s = view(buffer)
    timed = costs.size > 1
    for t in range(first, last):
        if starts[t]:
            put(buffer, fresh)
            waiting[0] = -1
        if waiting[0] < 0:
            waiting[0] = select(s, stream)
        taken[t] = keep[t] and logged[t] == waiting[0]
        if taken[t]:
            update(s, waiting[0], rewards[t], costs[t if timed else 0], np.nan)
            waiting[0] = -1
