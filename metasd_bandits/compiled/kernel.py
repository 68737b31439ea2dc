"""The decorator of every function that policies and environments are built from.

Kernels pass a state of a dozen arrays to one another. Unless they are inlined, each call copies
it and counts references to every array, which takes a hundred times as long as a decision; so
inlining is forced. They carry no ``cache=True``: what is cached on disk are the modules that
`metasd_bandits.compiled.specialise` writes, keyed by the text of every function they reach.

Compiled code calls them, so they are compiled without the entry for Python, which unpacks every
array of a state and would take longer to compile than the function itself. Called from Python, a
kernel compiles a copy of itself that has one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from numba import njit
from numba.core.registry import CPUDispatcher

from metasd_bandits.compiled.interpreted import JIT_OFF

__all__ = ["kernel"]

_OPTIONS = {
    "nopython": True,
    "forceinline": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


class _Kernel(CPUDispatcher):
    """A compiled function without an entry for Python."""

    def __call__(self, *arguments: Any) -> Any:
        return self._with_entry(*arguments)

    @cached_property
    def _with_entry(self) -> Callable[..., Any]:
        compiled: Callable[..., Any] = njit(self.py_func)
        return compiled


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` into whatever compiled code calls it."""
    return function if JIT_OFF else _Kernel(function, targetoptions=dict(_OPTIONS))
