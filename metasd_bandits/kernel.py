"""The decorator of every function that policies are built from.

Kernels pass a state of a dozen arrays to one another. Unless they are inlined, each call copies
it and counts references to every array, which takes a hundred times as long as a decision; so
inlining is forced. They carry no ``cache=True``: what is cached on disk are the modules that
`metasd_bandits.specialise` writes, keyed by the text of every function they reach.
"""

from __future__ import annotations

from numba import njit

__all__ = ["kernel"]

kernel = njit(forceinline=True)
