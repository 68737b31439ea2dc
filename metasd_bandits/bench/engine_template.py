"""The loop that the benchmark times. A template for `metasd_bandits.compiled.specialise`."""

import numpy as np
from numba import njit

from metasd_bandits.compiled.borrow import borrow
from metasd_bandits.compiled.stand_ins import select, update  # bound by specialise
from metasd_bandits.compiled.state import view
from metasd_bandits.compiled.stream import uniform


@njit(cache=True)
def pulls(buffer, own, world, means, T):
    """Pulls of each arm after T rounds of 0/1 rewards."""
    s, own, world = view(borrow(buffer)), borrow(own), borrow(world)
    for _ in range(T):
        arm = select(s, own)
        reward = 1.0 if uniform(world) < means[arm] else 0.0
        update(s, arm, reward, 1.0, np.nan)
    return s.pulls.copy()
