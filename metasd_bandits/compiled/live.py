"""The compiled functions behind one policy class's Python methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from numba import float64, int64, uint64

from metasd_bandits.compiled import live_template
from metasd_bandits.compiled.interpreted import JIT_OFF
from metasd_bandits.compiled.specialise import specialise

__all__ = ["LiveKernels"]

_BUFFER = float64[::1]
_STREAM = uint64[::1]
_ARMS = int64[::1]


class LiveKernels:
    """Machine-code entry points, each compiled (or fetched from the cache) at its first use.

    Numba's dispatcher looks at the type of every argument at every call, which takes longer than
    a decision. The types are known here, so the one compiled version is called directly; its
    unboxing still refuses an argument of another type.
    """

    def __init__(self, kernels: dict[str, Callable[..., Any]]) -> None:
        self._module = specialise(live_template, **kernels)
        self.tells_propensity = "propensity" in kernels
        self.full_information = "update_all" in kernels

    @cached_property
    def select(self) -> Callable[..., int]:
        return _entry(self._module.select_on, _BUFFER, _STREAM)

    @cached_property
    def decide(self) -> Callable[..., tuple[int, float]]:
        return _entry(self._module.decide_on, _BUFFER, _STREAM)

    @cached_property
    def update(self) -> Callable[..., None]:
        return _entry(self._module.update_on, _BUFFER, int64, float64, float64, float64)

    @cached_property
    def update_many(self) -> Callable[..., None]:
        return _entry(self._module.update_many_on, _BUFFER, _ARMS, _BUFFER, _BUFFER, _BUFFER)

    @cached_property
    def update_all(self) -> Callable[..., None]:
        return _entry(self._module.update_all_on, _BUFFER, int64, _BUFFER, float64, float64)

    @cached_property
    def probabilities(self) -> Callable[..., None]:
        return _entry(self._module.probabilities_on, _BUFFER)


def _entry(function: Any, *signature: Any) -> Callable[..., Any]:
    if JIT_OFF:
        return function
    function.compile(signature)
    return function.overloads[signature].entry_point
