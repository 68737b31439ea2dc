"""Random numbers keyed by (seed, row, position): a row never depends on its neighbours."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum

__all__ = ["Purpose", "lane_seed", "row_seed", "uniform"]


class Purpose(IntEnum):
    """What a number at a position is for; each has a stream of its own."""

    DRAFT = 0
    ACCEPT = 1
    SAMPLE = 2


def uniform(
    seed: int, row: int, position: int, purpose: Purpose, block: int = 0, sibling: int = 0
) -> float:
    """A double in [0, 1) that depends on nothing but its key.

    The first 53 bits of BLAKE2b over the key: the same on every machine and in every order of
    evaluation. About a microsecond.

    Parameters
    ----------
    seed, row, position : int
        The query's seed, its row in a batch, the place in the sequence.
    purpose : Purpose
    block : int
        Where the position may be visited in more than one round: where this round's block began.
    sibling : int
        In a draft tree, where several nodes stand at one position: which of them.
    """
    key = struct.pack("<QQQQB", seed & (2**64 - 1), row, position, block, purpose)
    if sibling:  # a chain's keys are shorter, so no tree shares them
        key += struct.pack("<Q", sibling)
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def row_seed(seed: int, row: int) -> int:
    """The seed of a row of a batch: the row can be decoded again alone with it.

    62 bits of BLAKE2b over (seed, row).
    """
    key = struct.pack("<QQ", seed & (2**64 - 1), row)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 2


def lane_seed(seed: int, row: int, key: Sequence[int]) -> int:
    """The seed of a lane: numbers under it are independent of the row's own and of other lanes'."""
    text = struct.pack(f"<QQ{len(key)}q", seed & (2**64 - 1), row, *key)
    digest = hashlib.blake2b(text, digest_size=8, person=b"metasd-lane").digest()
    return int.from_bytes(digest, "little") >> 1
