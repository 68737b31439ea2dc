"""Policies whose arithmetic is compiled once and run everywhere: live, simulated, replayed."""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.compiled.interpreted import JIT_OFF
from metasd_bandits.compiled.kernel import Kernels
from metasd_bandits.compiled.live import LiveKernels
from metasd_bandits.compiled.state import State, named_views, new_buffer
from metasd_bandits.compiled.stream import make_stream
from metasd_bandits.policy import Decision, Policy

__all__ = ["CompiledPolicy"]

_LARGEST = sys.float_info.max  # an int may be larger, and is below infinity too


class CompiledPolicy(Policy):
    """Base of every built-in policy; a frozen dataclass whose fields are its hyperparameters.

    The subclass declares ``compiled``, a `metasd_bandits.compiled.kernel.Kernels`: functions
    decorated with `metasd_bandits.compiled.kernel.kernel` that decide and learn. From a policy's
    equation `metasd_bandits.compiled.rules.index_rule` or `sampling_rule` makes them. A subclass
    inherits them; ``compiled = UCB.compiled._replace(update=mine)`` changes one.

    ``s`` is a `metasd_bandits.compiled.state.State`. Per-arm rows and other memory beyond the
    shared ones are declared by `rows` and `memory`.

    Attributes
    ----------
    compiled : Kernels
        The policy's functions.
    rows : int
        Rows of K numbers that the policy keeps beside the shared ones. They must be sums of
        evidence (halving them halves what is known) or scratch: `forget` scales them.
    optimistic : tuple of int
        Those rows in which an arm added later starts at the best present value, not at zero.
    restarts : bool
        True for schedules (halving, commit): they start anew with every query and every change
        of the arms, whatever the scope.
    """

    _buffer: NDArray[np.float64]
    _stream: NDArray[np.uint64]
    _masked: bool
    _live: LiveKernels
    compiled: ClassVar[Kernels]
    rows: ClassVar[int] = 0
    optimistic: ClassVar[tuple[int, ...]] = ()
    restarts: ClassVar[bool] = False

    @classmethod
    def kernels(cls) -> dict[str, Callable[..., Any]]:
        """The compiled functions of the class, by name.

        Raises
        ------
        TypeError
            If the class declares none, or one of them is no kernel.
        """
        made = getattr(cls, "compiled", None)
        if not isinstance(made, Kernels):
            raise TypeError(
                f"{cls.__name__}.compiled is {made!r}; declare the policy's kernels in its class, "
                "as in compiled = index_rule(index, learn_mean)"
            )
        for name, function in made.given().items():
            if not (JIT_OFF or isinstance(function, Dispatcher)):
                raise TypeError(
                    f"{cls.__name__}.compiled.{name} is {function!r}; decorate that function with "
                    "@metasd_bandits.compiled.kernel.kernel"
                )
        return made.given()

    def theta(self) -> tuple[float, ...]:
        """The hyperparameters as the kernels read them, in the order of the fields."""
        return tuple(float(getattr(self, f.name)) for f in dataclasses.fields(self))  # type: ignore[arg-type]

    def memory(self, n_arms: int) -> int:
        """Float64 places this policy keeps beside the arms' rows; bounded for any horizon."""
        return 0

    def prepare(self, s: State) -> None:
        """Write starting values other than zero into a fresh state."""

    def fresh_buffer(self, n_arms: int) -> NDArray[np.float64]:
        """A buffer for `n_arms` unplayed arms, as `reset` takes it and a simulator may too."""
        checks.integer("n_arms", n_arms, 1)
        buffer = new_buffer(n_arms, self.theta(), self.rows, self.memory(n_arms))
        self.prepare(named_views(buffer))
        return buffer

    def reset(self, n_arms: int, seed: int | None = None) -> None:
        buffer = self.fresh_buffer(n_arms)
        self._reseed(seed)
        self._keep(_buffer=buffer, _masked=False, _live=_live_kernels(type(self)))

    def _reseed(self, seed: int | None) -> None:
        if seed is not None:
            checks.integer("seed", seed, 0)
        if seed is not None or not hasattr(self, "_stream"):
            self._keep(_stream=make_stream(seed or 0))

    def _keep(self, **state: Any) -> None:
        """Running state sits beside the frozen fields, out of their reach."""
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def select(self, available: Sequence[bool] | NDArray[np.bool_] | None = None) -> int:
        if available is not None or self._masked:
            self._mask(available)
        return self._live.select(self._buffer, self._stream)

    def decide(self, available: Sequence[bool] | NDArray[np.bool_] | None = None) -> Decision:
        if not self._live.tells_propensity:
            return super().decide(available)
        if available is not None or self._masked:
            self._mask(available)
        return Decision._make(self._live.decide(self._buffer, self._stream))

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
            raise ValueError(
                f"reward={checks.shown(reward)} is outside [0, 1]; nothing was learned from it"
            )
        if type(arm) is not int:
            arm = operator.index(arm)
        if not 0 <= arm < self._buffer[0]:
            raise ValueError(f"arm={checks.shown(arm)} is not in [0, {int(self._buffer[0])})")
        if not 0.0 < cost <= _LARGEST:
            raise ValueError(f"cost={checks.shown(cost)} is not positive and finite")
        if propensity == propensity and not 0.0 < propensity <= 1.0:
            raise ValueError(f"propensity={checks.shown(propensity)} is outside (0, 1]")
        if rewards is not None:
            every = self._checked(rewards)
            if self._live.full_information:
                self._live.update_all(self._buffer, arm, every, cost, propensity)
                return
        self._live.update(self._buffer, arm, reward, cost, propensity)

    def update_many(
        self,
        arms: Sequence[int],
        rewards: Sequence[float],
        *,
        costs: Sequence[float] | None = None,
        propensities: Sequence[float] | None = None,
    ) -> None:
        """As `Policy.update_many`, in one call of the compiled kernel."""
        n = len(arms)
        every = (
            np.array([operator.index(arm) for arm in arms], dtype=np.int64),
            _floats(rewards),
            np.ones(n) if costs is None else _floats(costs),
            np.full(n, np.nan) if propensities is None else _floats(propensities),
        )
        if any(values.shape != (n,) for values in every):
            raise ValueError(f"update_many was given {n} arms; give as many of everything else")
        a, r, c, p = every
        fine = (a >= 0) & (a < self.n_arms) & (r >= 0) & (r <= 1) & (c > 0) & (c < math.inf)
        fine &= np.isnan(p) | ((p > 0) & (p <= 1))
        if not fine.all():
            t = int(fine.argmin())
            raise ValueError(
                f"round {t} of {n} (arm={a[t]}, reward={r[t]}, cost={c[t]}, propensity={p[t]}) is "
                f"out of range: arms lie in [0, {self.n_arms}), rewards in [0, 1], costs are "
                "positive and finite, propensities in (0, 1]; nothing was learned"
            )
        self._live.update_many(self._buffer, a, r, c, p)

    def _checked(self, rewards: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        every = _floats(rewards)
        if every.shape != (self.n_arms,):
            raise ValueError(f"rewards has shape {every.shape}; give one for each arm")
        if not ((every >= 0.0) & (every <= 1.0)).all():
            raise ValueError(f"rewards={every} leave [0, 1]; nothing was learned from them")
        return every

    def probabilities(
        self, available: Sequence[bool] | NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        if available is not None or self._masked:
            self._mask(available)
        self._live.probabilities(self._buffer)
        return self._views.score.copy()

    def _mask(self, available: Sequence[bool] | NDArray[np.bool_] | None) -> None:
        row = self._views.available
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
    def _views(self) -> State:
        return named_views(self._buffer)

    @property
    def n_arms(self) -> int:
        """K, as of the last reset."""
        return int(self._buffer[0])

    @property
    def means(self) -> NDArray[np.float64]:
        """Mean reward of each arm (NaN for an arm never tried), shape (K,)."""
        s = self._views
        return np.where(s.pulls > 0, s.mean, np.nan)

    @property
    def pulls(self) -> NDArray[np.int64]:
        """Completed pulls of each arm, shape (K,)."""
        return self._views.pulls.astype(np.int64)

    def forget(self, keep: float, seed: int | None = None) -> None:
        checks.number("keep", keep, 0.0, 1.0)
        fresh = self.fresh_buffer(self.n_arms)
        self._reseed(seed)
        if keep > 0.0 and not self.restarts:
            old, new = self._views, named_views(fresh)
            for field in ("clock", "pulls", "total", "rows"):
                getattr(new, field)[:] = keep * getattr(old, field)
            new.mean[:] = old.mean
            self.carry_memory(old, new, list(range(self.n_arms)), keep)
        self._keep(_buffer=fresh, _masked=False)

    def rearrange(self, arms: Sequence[int | None]) -> None:
        for i in arms:
            if i is not None:
                checks.integer("arms", i, 0, self.n_arms - 1)
        fresh = self.fresh_buffer(len(arms))
        if not self.restarts:
            old, new = self._views, named_views(fresh)
            new.clock[:] = old.clock
            for j in self.optimistic:
                new.rows[j] = old.rows[j].max()
            kept = [(j, i) for j, i in enumerate(arms) if i is not None]
            for j, i in kept:
                for field in ("pulls", "pending", "mean", "total", "chance"):
                    getattr(new, field)[j] = getattr(old, field)[i]
                new.rows[:, j] = old.rows[:, i]
            self.carry_memory(old, new, arms, 1.0)
        self._keep(_buffer=fresh, _masked=False)

    def carry_memory(self, old: State, new: State, arms: Sequence[int | None], keep: float) -> None:
        """Take ``old.memory`` over into ``new.memory`` when arms change or a query begins.

        ``arms[j]`` is the former place of arm j, None for a new one. A policy whose memory holds
        evidence overrides it; the default starts the memory anew.
        """

    def state_dict(self) -> dict[str, Any]:
        buffer = self._buffer.copy()
        named_views(buffer).score[:] = 0.0  # scratch, and the only place an infinity may stand
        return {
            "policy": self.name,
            "hyperparameters": dataclasses.asdict(self),  # type: ignore[call-overload]
            "buffer": buffer.tolist(),
            "stream": self._stream.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise ValueError(f"a state is a dict, as state_dict() gives it, not {type(state)}")
        mine = {"policy": self.name, "hyperparameters": dataclasses.asdict(self)}  # type: ignore[call-overload]
        theirs = {key: state.get(key) for key in mine}
        if theirs != mine:
            raise ValueError(f"this state is of {theirs}; it cannot be loaded into {mine}")
        buffer = _saved_array(state, "buffer", np.float64)
        stream = _saved_array(state, "stream", np.uint64)
        self._check_buffer(buffer)
        if stream.shape != (4,) or not stream.any():
            raise ValueError(
                f"this state is damaged: its stream {stream.tolist()} must be 4 integers in "
                "[0, 2**64), not all of them 0"
            )
        self._keep(
            _buffer=buffer,
            _stream=stream,
            _masked=True,  # the next decision sets the mask anew
            _live=_live_kernels(type(self)),
        )

    def _check_buffer(self, buffer: NDArray[np.float64]) -> None:
        """Refuse a saved buffer that no run of this policy leaves behind."""
        n_arms = buffer[0] if buffer.ndim == 1 and buffer.size else math.nan
        if not (n_arms >= 1 and n_arms == math.floor(n_arms) and n_arms <= buffer.size):
            raise ValueError("this state is damaged: its buffer does not begin with its arms")
        fresh = self.fresh_buffer(int(n_arms))
        kept = 3 + len(self.theta())  # the layout and the hyperparameters
        if fresh.shape != buffer.shape or (fresh[:kept] != buffer[:kept]).any():
            raise ValueError(
                f"this state is damaged: its buffer has {buffer.size} numbers or another layout; "
                f"{self.name!r} with {int(n_arms)} arms keeps {fresh.size}"
            )
        s = named_views(buffer)
        counts = (s.clock, s.pulls, s.pending, s.total)
        if not (
            np.isfinite(buffer).all()
            and all((values >= 0.0).all() for values in counts)
            and ((s.mean >= 0.0) & (s.mean <= 1.0)).all()
            and ((s.chance >= 0.0) & (s.chance <= 1.0)).all()
            and np.isin(s.available, (0.0, 1.0)).all()
        ):
            raise ValueError(
                "this state is damaged: counts must be finite and at least 0, means and "
                "propensities in [0, 1], flags 0 or 1"
            )

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: arrays copied, machine code left behind."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_live"}
        return {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in kept.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._keep(**state)
        if hasattr(self, "_buffer"):
            self._keep(_live=_live_kernels(type(self)))


def _saved_array(state: dict[str, Any], key: str, dtype: Any) -> NDArray[Any]:
    """A list of a saved state as an array; ValueError says what is missing or impossible."""
    if not isinstance(state.get(key), (list, tuple, np.ndarray)):
        raise ValueError(f"this state is damaged: it lacks the list {key!r}")
    try:
        values = [float(x) if dtype is np.float64 else operator.index(x) for x in state[key]]
        return np.array(values, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"this state is damaged: its {key} cannot be read ({error})") from None


def _floats(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    try:
        return np.array(values, dtype=np.float64, order="C")
    except OverflowError:
        raise ValueError("an integer given is beyond every float; nothing was learned") from None


@cache
def _live_kernels(policy_class: type[CompiledPolicy]) -> LiveKernels:
    return LiveKernels(policy_class.kernels())
