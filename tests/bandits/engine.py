"""A compiled run of one policy over given rewards. A template for `metasd_bandits.specialise`."""

import numpy as np
from numba import njit

from metasd_bandits.policies.ucb import probabilities, select, update  # bound by specialise
from metasd_bandits.state import view
from metasd_bandits.stream import uniform


@njit(cache=True)
def decisions(buffer, stream, rewards, costs, delay):
    """Arms and propensities chosen where feedback comes `delay` rounds late.

    ``rewards`` (T, K) holds what each arm would have earned in each round, ``costs`` (K,) what
    its rounds take.
    """
    s = view(buffer)
    T = rewards.shape[0]
    arms, chances = np.zeros(T, np.int64), np.zeros(T)
    for t in range(T):
        probabilities(s)
        chance = s.score.copy()
        arms[t] = select(s, stream)
        chances[t] = chance[arms[t]]
        if t >= delay:
            past = t - delay
            arm = arms[past]
            update(s, arm, rewards[past, arm], costs[arm], chances[past])
    return arms, chances


@njit(cache=True)
def regrets(fresh, streams, means, T):
    """Pseudo-regret after T pulls of arms that pay 0 or 1, one run for each pair of streams."""
    out = np.zeros(streams.shape[0])
    for run in range(streams.shape[0]):
        s = view(fresh.copy())
        for _ in range(T):
            arm = select(s, streams[run, 0])
            reward = 1.0 if uniform(streams[run, 1]) < means[arm] else 0.0
            update(s, arm, reward, 1.0, np.nan)
            out[run] += means.max() - means[arm]
    return out
