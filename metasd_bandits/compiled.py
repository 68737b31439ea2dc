"""Policies whose arithmetic is compiled once and run everywhere: live, simulated, replayed."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.policy import Policy
from metasd_bandits.specialise import specialise
from metasd_bandits.state import new_buffer, view
from metasd_bandits.stream import make_stream

__all__ = ["CompiledPolicy"]


class CompiledPolicy(Policy):
    """Base of every built-in policy; a frozen dataclass whose fields are its hyperparameters.

    The subclass's module holds three functions decorated with ``@njit(cache=True)``:

    - ``select(s, stream) -> arm``: decide and book the pull (`metasd_bandits.state.pick_max` or
      `pick_by_probability` do the booking);
    - ``update(s, arm, reward, cost, propensity)``: land a reward (`metasd_bandits.state.record`
      does the shared part);
    - ``probabilities(s)``: fill ``s.score`` with the probabilities of the next decision.

    ``s`` is a `metasd_bandits.state.State`. Per-arm rows and other memory beyond the shared
    ones are declared by `rows` and `memory`.
    """

    _buffer: NDArray[np.float64]
    _stream: NDArray[np.uint64]
    _masked: bool
    _live: ModuleType
    rows: ClassVar[int] = 0

    @classmethod
    def kernels(cls) -> dict[str, Callable[..., Any]]:
        """The three compiled functions of the class's module, by name."""
        module = sys.modules[cls.__module__]
        return {name: getattr(module, name) for name in ("select", "update", "probabilities")}

    def theta(self) -> tuple[float, ...]:
        """The hyperparameters as the kernels read them, in the order of the fields."""
        return tuple(float(getattr(self, f.name)) for f in dataclasses.fields(self))  # type: ignore[arg-type]

    def memory(self, n_arms: int) -> int:
        """Float64 places this policy keeps beside the arms' rows; bounded for any horizon."""
        return 0

    def prepare(self, buffer: NDArray[np.float64]) -> None:
        """Write starting values other than zero into a fresh buffer."""

    def fresh_buffer(self, n_arms: int) -> NDArray[np.float64]:
        """A buffer for `n_arms` unplayed arms, as `reset` takes it and a simulator may too."""
        checks.integer("n_arms", n_arms, 1)
        buffer = new_buffer(n_arms, self.theta(), self.rows, self.memory(n_arms))
        self.prepare(buffer)
        return buffer

    def reset(self, n_arms: int, seed: int | None = None) -> None:
        buffer = self.fresh_buffer(n_arms)
        if seed is not None:
            checks.integer("seed", seed, 0)
        if seed is not None or not hasattr(self, "_stream"):
            self._keep(_stream=make_stream(seed or 0))
        self._keep(_buffer=buffer, _masked=False, _live=_live_module(type(self)))

    def _keep(self, **state: Any) -> None:
        """Running state sits beside the frozen fields, out of their reach."""
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def select(self, available: Sequence[bool] | NDArray[np.bool_] | None = None) -> int:
        if available is not None or self._masked:
            self._mask(available)
        return self._live.select_on(self._buffer, self._stream)

    def update(
        self,
        arm: int,
        reward: float,
        *,
        cost: float = 1.0,
        propensity: float = math.nan,
        rewards: Sequence[float] | NDArray[np.float64] | None = None,
    ) -> None:
        if not 0.0 <= reward <= 1.0:
            raise ValueError(f"reward={reward!r} is outside [0, 1]; nothing was learned from it")
        if not 0 <= arm < self._buffer[0]:
            raise ValueError(f"arm={arm!r} is not in [0, {int(self._buffer[0])})")
        if not 0.0 < cost < math.inf:
            raise ValueError(f"cost={cost!r} is not positive and finite")
        if propensity == propensity and not 0.0 < propensity <= 1.0:
            raise ValueError(f"propensity={propensity!r} is outside (0, 1]")
        self._live.update_on(self._buffer, arm, reward, cost, propensity)

    def probabilities(
        self, available: Sequence[bool] | NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        if available is not None or self._masked:
            self._mask(available)
        self._live.probabilities_on(self._buffer)
        return view.py_func(self._buffer).score.copy()

    def _mask(self, available: Sequence[bool] | NDArray[np.bool_] | None) -> None:
        row = view.py_func(self._buffer).available
        if available is None:
            row[:] = 1.0
            self._keep(_masked=False)
            return
        mask = np.asarray(available, dtype=bool)
        if mask.shape != row.shape:
            raise ValueError(
                f"available has shape {mask.shape}; give one flag for each arm {row.shape}"
            )
        if not mask.any():
            raise ValueError("no arm is available; leave at least one unmasked")
        row[:] = mask
        self._keep(_masked=True)

    @property
    def n_arms(self) -> int:
        """K, as of the last reset."""
        return int(self._buffer[0])

    @property
    def means(self) -> NDArray[np.float64]:
        """Mean reward of each arm (NaN for an arm never tried), shape (K,)."""
        s = view.py_func(self._buffer)
        return np.where(s.pulls > 0, s.mean, np.nan)

    @property
    def pulls(self) -> NDArray[np.int64]:
        """Completed pulls of each arm, shape (K,)."""
        return view.py_func(self._buffer).pulls.astype(np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": self.name,
            "hyperparameters": dataclasses.asdict(self),  # type: ignore[call-overload]
            "buffer": self._buffer.copy(),
            "stream": self._stream.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = {"policy": self.name, "hyperparameters": dataclasses.asdict(self)}  # type: ignore[call-overload]
        theirs = {key: state.get(key) for key in mine}
        if theirs != mine:
            raise ValueError(f"this state is of {theirs}; it cannot be loaded into {mine}")
        self._keep(
            _buffer=np.array(state["buffer"], dtype=np.float64),
            _stream=np.array(state["stream"], dtype=np.uint64),
            _masked=True,  # the next decision sets the mask anew
            _live=_live_module(type(self)),
        )


@cache
def _live_module(policy_class: type[CompiledPolicy]) -> ModuleType:
    from metasd_bandits import live  # the template itself imports a policy

    return specialise(live, **policy_class.kernels())
