"""One policy's kernels as the live decoder calls them: on the buffer, two arguments, compiled."""

from numba import njit

from metasd_bandits.policies.ucb import probabilities, select, update  # bound by specialise
from metasd_bandits.state import view


@njit(cache=True)
def select_on(buffer, stream):
    return select(view(buffer), stream)


@njit(cache=True)
def update_on(buffer, arm, reward, cost, propensity):
    update(view(buffer), arm, reward, cost, propensity)


@njit(cache=True)
def probabilities_on(buffer):
    probabilities(view(buffer))
