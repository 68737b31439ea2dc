"""What a replay found: estimates by quantity, and differences between two policies."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metasd_bandits.carried import Carried
from metasd_bandits.intervals import (
    ONE_QUERY,
    Bootstrap,
    Estimate,
    ReplayError,
    Statistic,
    UnitSums,
)
from metasd_bandits.policies.fixed import Fixed
from metasd_bandits.policies.uniform import Uniform
from metasd_bandits.policy import Policy
from metasd_bandits.replay.tally import (
    REACHED,
    REWARD,
    ROUNDS_TO,
    STEPS,
    STEPS_TO,
    TOKENS,
    N,
    Tally,
)

__all__ = ["Options", "ReplayResult", "difference", "learns_across", "policy_text", "summed_up"]


class Options(NamedTuple):
    """What was asked of a replay."""

    seeds: tuple[int, ...]
    tokens: int | None
    level: float


@dataclass(frozen=True)
class ReplayResult:
    """What a replayed policy earned.

    Attributes
    ----------
    policy, method, scope : str
        As they were asked for; method is ``full`` or ``rejection``, scope ``query`` or
        ``carried``.
    seeds : tuple of int
        One run for each; sums are averaged over them.
    estimates : dict of str to Estimate
        ``reward per round``, and where the log tells: ``tokens per round``, ``tokens per step``,
        ``rounds to B tokens``, ``steps to B tokens``.
    shares : (K,) array
        Fraction of rounds given to each arm.
    sums : (U, 7) array
        By unit, mean over seeds: rounds, reward, tokens, steps, queries that reached B, their
        rounds to B, their steps to B.
    unanswered : dict of str to str
        Quantities the log cannot tell, and why.
    """

    policy: str
    method: str
    scope: str
    seeds: tuple[int, ...]
    estimates: dict[str, Estimate]
    shares: NDArray[np.float64]
    sums: NDArray[np.float64]
    unanswered: dict[str, str]

    def __getitem__(self, quantity: str) -> Estimate:
        if quantity in self.unanswered:
            raise ReplayError(self.unanswered[quantity])
        return self.estimates[quantity]


def difference(a: ReplayResult, b: ReplayResult, quantity: str, seed: int = 0) -> Estimate:
    """How much more of a quantity `a` has than `b` on one trace, units resampled in pairs.

    The interval is NaN where one of the two has none.
    """
    one, other = a[quantity], b[quantity]
    if (a.method, one.unit) != (b.method, other.unit):
        raise ReplayError("a difference needs two replays of one trace by one method")
    statistic = _statistic(quantity)
    rows = max(len(a.sums), len(b.sums))
    both = np.zeros((rows, 2, len(a.sums[0])))
    both[: len(a.sums), 0], both[: len(b.sums), 1] = a.sums, b.sums

    def gap(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        pair = totals.reshape(len(totals), 2, -1)
        return statistic(pair[:, 0]) - statistic(pair[:, 1])

    flat = both.reshape(rows, -1)
    low, high = Bootstrap(flat, one.level, seed).interval(gap)
    if math.isnan(one.low + other.low):
        low = high = math.nan
    return Estimate(
        quantity, one.value - other.value, low, high, one.level, a.method, one.unit, rows,
        one.rounds, min(one.accepted, other.accepted), min(one.effective, other.effective),
    )  # fmt: skip


def _statistic(quantity: str) -> Statistic:
    top, bottom = {
        "reward per round": (REWARD, N),
        "tokens per round": (TOKENS, N),
        "tokens per step": (TOKENS, STEPS),
    }.get(quantity, (STEPS_TO if quantity.startswith("steps") else ROUNDS_TO, REACHED))

    def ratio(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return totals[:, top] / totals[:, bottom]

    return ratio


def summed_up(
    policy: Policy,
    method: str,
    options: Options,
    tallies: list[Tally],
    unknown: dict[str, str],
) -> ReplayResult:
    """The result of one run per seed; `unknown` tells why tokens or steps are not in the log."""
    scope = "query"
    if isinstance(policy, Carried):
        scope = "carried" if policy.keep == 1.0 else f"carried, keep={policy.keep:g}"
    carries = learns_across(policy)
    tokens, steps = unknown.get("tokens", ""), unknown.get("steps", "")
    asked = {
        "reward per round": "",
        "tokens per round": tokens,
        "tokens per step": tokens or steps,
    }
    if options.tokens is not None:
        short = [reason for t in tallies if (reason := t.too_short(options.tokens))]
        reason = tokens or (short[0] if short else "")
        asked[f"rounds to {options.tokens} tokens"] = reason
        asked[f"steps to {options.tokens} tokens"] = reason or steps
    by_query, by_round = (
        _mean_of([getattr(t, n) for t in tallies]) for n in ("by_query", "by_round")
    )
    unit = "query" if tallies[0].queries > 1 else "block of rounds"
    accepted = sum(t.accepted for t in tallies) / len(tallies)
    if not accepted:
        asked = dict.fromkeys(asked, "no round of the log was accepted")
    bootstraps = {"query": Bootstrap(by_query, options.level)}
    if unit != "query":
        bootstraps[unit] = Bootstrap(by_round, options.level)
    estimates = {}
    for quantity in (q for q, reason in asked.items() if not reason):
        of = "query" if " to " in quantity else unit
        sums = by_query if of == "query" else by_round
        statistic = _statistic(quantity)
        low, high = (math.nan,) * 2 if carries else bootstraps[of].interval(statistic)
        estimates[quantity] = Estimate(
            quantity,
            float(statistic(sums.sum(axis=0)[None])[0]),
            low,
            high,
            options.level,
            method,
            of,
            len(sums),
            tallies[0].rounds,
            round(accepted),
            accepted,
            notes=_notes(method, carries, of),
        )
    return ReplayResult(
        policy_text(policy),
        method,
        scope,
        options.seeds,
        estimates,
        np.mean([t.pulls / max(1, t.pulls.sum()) for t in tallies], axis=0),
        by_query if unit == "query" else by_round,
        {quantity: reason for quantity, reason in asked.items() if reason},
    )


def _mean_of(parts: list[UnitSums]) -> NDArray[np.float64]:
    rows = max(len(part.sums) for part in parts)
    total = np.zeros((rows, parts[0].sums.shape[1]))
    for part in parts:
        total[: len(part.sums)] += part.sums
    return total / len(parts)


def learns_across(policy: Policy) -> bool:
    """Whether what a policy learned in one query decides in later ones.

    Then a trace is one run of it, however many queries there are: queries are no independent
    units, and no interval follows from them.
    """
    stationary = isinstance(policy, Carried) and isinstance(policy.policy, (Fixed, Uniform))
    return isinstance(policy, Carried) and policy.keep > 0.0 and not stationary


def policy_text(policy: Policy) -> str:
    """A policy as `make_policy` reads it."""
    if isinstance(policy, Carried):
        return policy_text(policy.policy)
    if not is_dataclass(policy):
        return policy.name
    written = ",".join(f"{f.name}={getattr(policy, f.name)}" for f in fields(policy))
    return f"{policy.name}:{written}" if written else policy.name


def _notes(method: str, carries: bool, unit: str) -> tuple[str, ...]:
    notes = []
    if carries:
        notes.append(
            "no interval: the policy learns across queries, so that the trace is one run of it and "
            "does not tell how another run would differ"
        )
    elif unit != "query":
        notes.append(f"{ONE_QUERY}, not of how another run of a learning policy would differ")
    if method == "rejection":
        notes.append("the answer is for runs as long as the accepted rounds, not as the log")
    return tuple(notes)
