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
from typing import Any, NamedTuple

from numba import njit
from numba.core.registry import CPUDispatcher

from metasd_bandits.compiled.interpreted import JIT_OFF

__all__ = ["Kernels", "kernel"]


class Kernels(NamedTuple):
    """The functions that make a policy; a class holds them as its ``compiled``.

    Attributes
    ----------
    select : ``select(s, stream) -> arm``
        Decide and book the pull (`pick_max` or `pick_by_probability` of
        `metasd_bandits.compiled.state` do the booking).
    probabilities : ``probabilities(s)``
        Fill ``s.score`` with the probabilities of the next decision.
    update : ``update(s, arm, reward, cost, propensity)``
        Land a reward (`metasd_bandits.compiled.state.record` does the shared part;
        `metasd_bandits.compiled.rules.learn_mean` does nothing else).
    propensity : ``propensity(s, arm) -> float``, optional
        The probability with which the ``select`` just made chose `arm`.
    update_all : ``update_all(s, arm, rewards, cost, propensity)``, optional
        Land a full-information round.
    """

    select: Callable[..., Any]
    probabilities: Callable[..., Any]
    update: Callable[..., Any]
    propensity: Callable[..., Any] | None = None
    update_all: Callable[..., Any] | None = None

    def given(self) -> dict[str, Callable[..., Any]]:
        """Those there are, by name."""
        return {name: kernel for name, kernel in self._asdict().items() if kernel is not None}


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
