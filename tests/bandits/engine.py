"""A compiled run of one policy over given rewards: a template for `specialise`."""

import numpy as np
from numba import njit

from metasd_bandits.compiled.borrow import borrow
from metasd_bandits.compiled.stand_ins import probabilities, select, update  # bound by specialise
from metasd_bandits.compiled.state import view
from metasd_bandits.compiled.stream import uniform


@njit(cache=True)
def decisions(buffer, stream, rewards, costs, delay):
    """Arms and propensities chosen where feedback comes `delay` rounds late.

    ``rewards`` (T, K) holds what each arm would have earned in each round, ``costs`` (K,) what
    its rounds take.
    """
    s = view(borrow(buffer))
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
    best = means.max()
    for run in range(streams.shape[0]):
        buffer = fresh.copy()
        out[run] = regret(buffer, streams[run, 0], streams[run, 1], means, best, T)
    return out


@njit(cache=True)
def regret(buffer, own, world, means, best, T):
    s, own, world, total = view(borrow(buffer)), borrow(own), borrow(world), 0.0
    for _ in range(T):
        arm = select(s, own)
        reward = 1.0 if uniform(world) < means[arm] else 0.0
        update(s, arm, reward, 1.0, np.nan)
        total += best - means[arm]
    return total


@njit(cache=True)
def extremes(buffer, rounds, propensity):
    """Unit rewards, nearly all of them arm 3's, then zeros, each as improbable as can be."""
    s = view(borrow(buffer))
    for i in range(rounds // 2):
        update(s, i % s.score.size if i % 1000 == 0 else 3, 1.0, 1.0, propensity)
    for i in range(rounds // 2):
        update(s, i % s.score.size, 0.0, 1.0, propensity)
