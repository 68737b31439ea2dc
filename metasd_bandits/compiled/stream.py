"""The random stream of a policy: xoshiro256++ over four words that Numba and Python share.

A compiled kernel, the decoder's live policy and a replay must draw the same numbers, save them
mid-run and spawn one independent stream per replication. NumPy's `Generator` costs tens of
microseconds to hand to a compiled function; four words in an array cost nothing and *are* the
state to save.
"""

from __future__ import annotations

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from metasd_bandits.compiled.kernel import kernel

__all__ = ["make_stream", "uniform", "word"]

_TO_UNIT = 1.0 / 9007199254740992.0  # 2**-53


def make_stream(seed: int | np.random.SeedSequence) -> NDArray[np.uint64]:
    """Four words of state for `uniform`, shape (4,), from a seed or a spawned `SeedSequence`.

    Seeding goes through `numpy.random.SeedSequence`, so that neighbouring seeds and spawned
    children give streams that are independent for all practical purposes.
    """
    if not isinstance(seed, np.random.SeedSequence):
        seed = np.random.SeedSequence(seed)
    return np.asarray(seed.generate_state(4, np.uint64), dtype=np.uint64)


@kernel
def word(stream):
    """Next 64 random bits; advances `stream` in place.

    Source: Blackman and Vigna (2021), "Scrambled linear pseudorandom number generators",
    xoshiro256++ 1.0. O(1).
    """
    mixed, t = stream[0] + stream[3], stream[1] << uint64(17)
    result = ((mixed << uint64(23)) | (mixed >> uint64(41))) + stream[0]
    stream[2] ^= stream[0]
    stream[3] ^= stream[1]
    stream[1] ^= stream[2]
    stream[0] ^= stream[3]
    stream[2] ^= t
    stream[3] = (stream[3] << uint64(45)) | (stream[3] >> uint64(19))
    return result


@kernel
def uniform(stream):
    """Next double in [0, 1) with 53 random bits; advances `stream` in place. O(1)."""
    return (word(stream) >> uint64(11)) * _TO_UNIT
