"""One spawned family of random numbers for each replication, whoever runs it and where."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metasd_bandits.compiled.stream import make_stream

__all__ = ["Streams", "replication_streams"]


class Streams(NamedTuple):
    """Random numbers of R replications.

    Attributes
    ----------
    policy, world : (R, 4) uint64
        Streams of the policy and of the environment. They are separate, so that every policy meets
        the same text (common random numbers).
    seeds : (R,) uint64
        What `policy` was made from: ``policy[r] == make_stream(int(seeds[r]))``.
    length : (R,) float64
        One uniform number each, for the output's length.
    """

    policy: NDArray[np.uint64]
    world: NDArray[np.uint64]
    seeds: NDArray[np.uint64]
    length: NDArray[np.float64]


def replication_streams(seed: int, first: int, count: int) -> Streams:
    """Streams of replications first .. first + count - 1 under `seed`.

    Replication r draws from ``SeedSequence(seed).spawn(...)[r]``: how replications are split over
    jobs, threads or machines changes no number.
    """
    made = _made(seed, first, count)
    return Streams(made.policy.copy(), made.world.copy(), made.seeds, made.length)


@lru_cache(maxsize=8)
def _made(seed: int, first: int, count: int) -> Streams:
    words = np.empty((count, 6), dtype=np.uint64)
    policy = np.empty((count, 4), dtype=np.uint64)
    for r in range(count):
        child = np.random.SeedSequence(seed, spawn_key=(first + r,))
        words[r] = child.generate_state(6, np.uint64)
        policy[r] = make_stream(int(words[r, 4]))
    uniforms = np.asarray((words[:, 5] >> np.uint64(11)) * 2.0**-53, dtype=np.float64)
    return Streams(policy, words[:, :4], words[:, 4], uniforms)
