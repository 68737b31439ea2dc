"""Run a policy in an environment, or on plain arms: validation, seeding, threads, results."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numba.core.dispatcher import Dispatcher
from numba.core.errors import TypingError
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.compiled.lean import counted
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.specialise import specialise
from metasd_bandits.policy import Policy
from metasd_bandits.registry import make_policy
from sim import decoding, drafting, pulling
from sim.acceptance.base import AcceptanceModel, Place
from sim.arms import Arms
from sim.environment import Environment, check_schedule
from sim.interpreted import interpret
from sim.lengths import make_lengths
from sim.schedules import Schedule, Stationary
from sim.streams import replication_streams

__all__ = [
    "BanditRuns",
    "InterpretedWarning",
    "Rounds",
    "Runs",
    "sample_rounds",
    "simulate",
    "simulate_bandit",
]

_REWARDS = {
    "be": decoding.BE,
    "bd": decoding.BD,
    "tokens": decoding.PER_ROUND,
    "throughput": decoding.PER_TIME,
}


class InterpretedWarning(UserWarning):
    """The simulator runs interpreted because something in it is plain Python."""


@dataclass(frozen=True)
class Runs:
    """R simulated queries; row r is replication r.

    Attributes
    ----------
    rounds, tokens, switches, owed : (R,)
        Rounds needed, tokens delivered (B), switches of drafter, tokens caught up on.
    steps : (R,)
        Time, in plain decoding steps; ``tokens / steps`` is the speedup.
    reward, be, bd : (R,)
        Sums over rounds of the reward given, of block efficiency, of block divergence.
    pulls : (R, D, K)
        Rounds of each drafter in each domain.
    memories : (R, M)
        The acceptance model's memory at the end of each query.
    marks : (M,)
        Positions at which the curves were recorded.
    curve_rounds, curve_tokens, curve_steps : (R, M); curve_pulls : (R, M, K)
        Running values when a mark was reached; NaN where a query ended before.
    """

    rounds: NDArray[np.float64]
    tokens: NDArray[np.float64]
    steps: NDArray[np.float64]
    switches: NDArray[np.float64]
    owed: NDArray[np.float64]
    reward: NDArray[np.float64]
    be: NDArray[np.float64]
    bd: NDArray[np.float64]
    pulls: NDArray[np.float64]
    memories: NDArray[np.float64]
    marks: NDArray[np.int64]
    curve_rounds: NDArray[np.float64]
    curve_tokens: NDArray[np.float64]
    curve_steps: NDArray[np.float64]
    curve_pulls: NDArray[np.float64]

    @property
    def speedup(self) -> NDArray[np.float64]:
        """Tokens per plain step of each query, shape (R,)."""
        return self.tokens / self.steps

    def whole_tokens(self, draft_length: int) -> NDArray[np.float64]:
        """Tokens with the last block counted whole: rounds plus all accepted drafts, shape (R,)."""
        return self.rounds + np.rint(self.be * draft_length)


@dataclass(frozen=True)
class BanditRuns:
    """R runs of a plain bandit to its horizon.

    Attributes
    ----------
    reward : (R,)
        Sum of rewards.
    pulls : (R, D, K)
        Pulls of each arm in each domain.
    marks : (M,)
        Rounds at which the curves were recorded.
    curve_reward : (R, M); curve_pulls : (R, M, K)
        Running values after that round.
    """

    reward: NDArray[np.float64]
    pulls: NDArray[np.float64]
    marks: NDArray[np.int64]
    curve_reward: NDArray[np.float64]
    curve_pulls: NDArray[np.float64]


def simulate(
    environment: Environment,
    policy: str | Policy,
    *,
    reward: str = "be",
    replications: int = 1000,
    seed: int = 0,
    first: int = 0,
    threads: int = 1,
    marks: Sequence[int] | NDArray[np.int64] = (),
    mark_unit: str = "tokens",
) -> Runs:
    """Decode simulated queries under a policy whose statistics are reset for each query.

    Parameters
    ----------
    environment : Environment
    policy : str or Policy
        As `metasd_bandits.make_policy` reads it; a `Policy` of your own runs as well. The object
        itself is left as it is.
    reward : {"be", "bd", "tokens", "throughput"}, default "be"
        What the policy learns from (`metasd_bandits.rewards`).
    replications : int, default 1000
        Queries R, at least 1.
    seed, first : int, default 0
        Replication r takes stream ``first + r`` of `seed`: the numbers do not depend on the number
        of threads or jobs, and two policies under one seed meet the same text.
    threads : int, default 1
        Threads that share the replications (compiled runs only).
    marks : sequence of int, optional
        Positions, increasing, at which running values are recorded for curves.
    mark_unit : {"tokens", "rounds"}, default "tokens"
        What marks count.

    Returns
    -------
    Runs

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If a value is out of range or unknown.

    Warns
    -----
    InterpretedWarning
        If the policy or the acceptance model is plain Python; the message says how to compile it.
    """
    kind = _REWARDS[checks.choice("reward", reward, _REWARDS)]
    at = _check_marks(marks)
    by_tokens = checks.choice("mark_unit", mark_unit, ("rounds", "tokens")) == "tokens"
    _check_counts(replications, seed, first, threads)
    model, K, R = environment.acceptance, environment.n_arms, replications
    kernels = {"begin": model.begin, "draft": model.draft, "place": environment.schedule.place}
    player = Player(policy, K, kernels, decoding)
    streams = replication_streams(seed, first, R)
    lengths = make_lengths(environment.lengths).quantile(streams.length)
    cached, memories = np.zeros((R, K)), np.zeros((R, model.memory_size()))
    totals, pulls = np.zeros((R, 8)), np.zeros((R, model.n_domains, K))
    curves = np.full((R, at.size, 3 + K), np.nan)
    rows = (streams.policy, streams.world, lengths, cached, memories, totals, pulls, curves)
    player.play(streams.seeds, threads, (*_world(environment), kind, at, by_tokens), rows)
    return _runs(totals, pulls, memories, at, curves)


def _world(environment: Environment) -> tuple[Any, ...]:
    """The environment as the engine reads it."""
    model, N = environment.acceptance, environment.draft_length
    table = environment.schedule.table(model.n_domains)
    costs = environment.costs.table(environment.n_arms, N)
    return model.parameters(), table, costs, N


def _runs(
    totals: NDArray[np.float64],
    pulls: NDArray[np.float64],
    memories: NDArray[np.float64],
    marks: NDArray[np.int64],
    curves: NDArray[np.float64],
) -> Runs:
    """What the engine filled, by name."""
    names = ("rounds", "tokens", "steps", "switches", "owed", "reward", "be", "bd")
    return Runs(
        **dict(zip(names, totals.T, strict=True)),
        pulls=pulls,
        memories=memories,
        marks=marks,
        curve_rounds=curves[..., 0],
        curve_tokens=curves[..., 1],
        curve_steps=curves[..., 2],
        curve_pulls=curves[..., 3:],
    )


def simulate_bandit(
    arms: Arms,
    policy: str | Policy,
    *,
    horizon: int,
    schedule: Schedule | None = None,
    replications: int = 1000,
    seed: int = 0,
    first: int = 0,
    threads: int = 1,
    marks: Sequence[int] | NDArray[np.int64] = (),
) -> BanditRuns:
    """Pull plain arms `horizon` times under a policy; parameters as for `simulate`.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If a value is out of range or unknown.
    """
    checks.integer("horizon", horizon, 1, 10**12)
    at = _check_marks(marks)
    _check_counts(replications, seed, first, threads)
    schedule = schedule or Stationary()
    check_schedule(schedule, arms)
    K, R = arms.n_arms, replications
    player = Player(policy, K, {"pay": arms.pay, "place": schedule.place}, pulling)
    streams = replication_streams(seed, first, R)
    totals, pulls = np.zeros(R), np.zeros((R, arms.n_domains, K))
    curves = np.full((R, at.size, 1 + K), np.nan)
    world = (arms.parameters(), schedule.table(arms.n_domains), horizon, at)
    rows = (streams.policy, streams.world, totals, pulls, curves)
    player.play(streams.seeds, threads, world, rows)
    return BanditRuns(totals, pulls, at, curves[..., 0], curves[..., 1:])


class Rounds(NamedTuple):
    """Independent looks at one drafter's rounds, each array of shape (R,).

    Attributes
    ----------
    accepted : int64
        N_acc.
    be, bd : float64
        Block efficiency and block divergence of the same draw.
    """

    accepted: NDArray[np.int64]
    be: NDArray[np.float64]
    bd: NDArray[np.float64]


def sample_rounds(
    model: AcceptanceModel,
    arm: int,
    *,
    rounds: int,
    seed: int = 0,
    domain: int = 0,
    to: int | None = None,
    weight: float = 0.0,
    in_a_row: int = 1,
) -> Rounds:
    """Draw rounds of one drafter, without any policy.

    Parameters
    ----------
    model : AcceptanceModel
    arm : int
        The drafter, in [0, K).
    rounds : int
        R, at least 1.
    seed : int, default 0
    domain, to, weight
        The place in a schedule (`Place`).
    in_a_row : int, default 1
        Rounds of one query before the next begins: 1 gives independent rounds, R one long query.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If a value is out of range.
    """
    checks.integer("arm", arm, 0, model.n_arms - 1)
    checks.integer("rounds", rounds, 1)
    checks.integer("in_a_row", in_a_row, 1)
    checks.integer("domain", domain, 0, model.n_domains - 1)
    checks.number("weight", weight, 0.0, 1.0, open_high=True)
    kernels = {"begin": model.begin, "draft": model.draft}
    compiled = all(isinstance(kernel, Dispatcher) for kernel in kernels.values())
    engine = specialise(drafting, **kernels) if compiled else interpret(drafting, None, kernels)
    out = Rounds(np.zeros(rounds, np.int64), np.zeros(rounds), np.zeros(rounds))
    place = Place(0, domain, domain if to is None else to, weight)
    stream = replication_streams(seed, 0, 1).world[0]
    memory = np.zeros(model.memory_size())
    engine.run(
        model.parameters(), memory, arm, place, stream, in_a_row, out.accepted, out.be, out.bd
    )
    return out


class Player:
    """A policy bound into an engine: compiled where everything is, interpreted otherwise."""

    def __init__(
        self,
        policy: str | Policy,
        n_arms: int,
        kernels: dict[str, Callable[..., Any]],
        template: ModuleType,
    ) -> None:
        self.template = template
        self.policy = copy.deepcopy(make_policy(policy))
        self.policy.reset(n_arms, 0)  # refuses what does not fit, before anything runs
        self.n_arms = n_arms
        self.fresh = np.zeros(0)
        plain = [name for name, kernel in kernels.items() if not isinstance(kernel, Dispatcher)]
        self.compiled = isinstance(self.policy, CompiledPolicy) and not plain
        if isinstance(self.policy, CompiledPolicy) and self.compiled:
            self.fresh = self.policy.fresh_buffer(n_arms)
            own = self.policy.kernels()
            self.kernels = {"select": own["select"], "update": own["update"], **kernels}
            self.engine = specialise(template, **self.kernels)
            return
        self._warn(plain)
        self.engine = interpret(template, self.policy, kernels)

    def _warn(self, plain: list[str]) -> None:
        if plain:
            what, how = f"the function {plain[0]!r}", "decorate it with @numba.njit(cache=True)"
        else:
            what = f"policy {self.policy.name!r}"
            how = "derive it from metasd_bandits.compiled.policy.CompiledPolicy with njit kernels"
        warnings.warn(
            f"{what} is plain Python, so the simulator runs interpreted, hundreds of times slower; "
            f"{how}",
            InterpretedWarning,
            stacklevel=4,
        )

    def play(
        self,
        seeds: NDArray[np.uint64],
        threads: int,
        world: tuple[Any, ...],
        rows: Sequence[NDArray[Any]],
    ) -> None:
        """Run all replications, in chunks that threads share; each has a row in all of `rows`."""
        if not self.compiled:
            for r, seed in enumerate(seeds.tolist()):
                self.policy.reset(self.n_arms, seed)
                self._run(world, tuple(whole[r : r + 1] for whole in rows))
            return
        try:  # compile once, before threads compete to
            self._run(world, tuple(whole[:0] for whole in rows))
        except TypingError:  # a function that allocates needs reference counting of its own
            own = {name: counted()(_plain(kernel)) for name, kernel in self.kernels.items()}
            self.engine = specialise(self.template, **own)
        if threads == 1:
            self._run(world, tuple(rows))
            return

        def share(first: int, last: int) -> None:
            own = tuple(_apart(whole[first:last]) for whole in rows)
            self._run(world, own)
            for whole, part in zip(rows, own, strict=True):
                whole[first:last] = part

        edges = np.linspace(0, seeds.size, min(seeds.size, 8 * threads) + 1).astype(int).tolist()
        with ThreadPoolExecutor(threads) as pool:
            for chunk in [pool.submit(share, a, b) for a, b in pairwise(edges)]:
                chunk.result()

    def _run(self, world: tuple[Any, ...], rows: tuple[NDArray[Any], ...]) -> None:
        self.engine.run(len(rows[0]), self.fresh, _apart(self.fresh), world, rows)


def _apart(rows: NDArray[Any]) -> NDArray[Any]:
    """A copy with a cache line of room on either side: threads that write to one take turns."""
    room = 128 // rows.itemsize
    place = np.empty(rows.size + 2 * room, rows.dtype)
    own = place[room : room + rows.size].reshape(rows.shape)
    own[...] = rows
    return own


def _plain(kernel: Any) -> Callable[..., Any]:
    return kernel.py_func


def _check_counts(replications: int, seed: int, first: int, threads: int) -> None:
    checks.integer("replications", replications, 1)
    checks.integer("seed", seed, 0)
    checks.integer("first", first, 0)
    checks.integer("threads", threads, 1)


def _check_marks(marks: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    at = np.asarray(marks, dtype=np.int64)
    if at.ndim != 1 or (at.size and (at[0] < 1 or (np.diff(at) <= 0).any())):
        raise checks.ConfigError(
            f"marks={checks.shown(marks)} must be positions from 1 on that increase"
        )
    return at
