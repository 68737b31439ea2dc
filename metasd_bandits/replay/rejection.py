"""Rejection replay: a policy judged on logged rounds that it would have chosen as well.

Only the used arm's reward was logged, by a randomised logger that does not learn: the policy
decides, and its decision waits for a logged round with that arm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import rel_entr
from scipy.stats import binom

from metasd_bandits import checks
from metasd_bandits.intervals import ReplayError, UnitSums
from metasd_bandits.policy import Policy
from metasd_bandits.replay.full import (
    UNTIMED,
    Progress,
    Scope,
    Source,
    check_options,
    check_rewards,
    in_order,
    scoped,
)
from metasd_bandits.replay.players import make_player
from metasd_bandits.replay.results import ReplayResult, summed_up
from metasd_bandits.replay.tally import Tally
from metasd_bandits.traces.columns import Reader, open_trace

__all__ = ["rejection_replay"]


def rejection_replay(
    source: Source,
    policy: str | Policy,
    *,
    scope: Scope = "query",
    seeds: Sequence[int] = (0,),
    tokens: int | None = None,
    floor: float | None = None,
    level: float = 0.95,
    progress: Progress | None = None,
) -> ReplayResult:
    """Play a policy on a log of used arms only, keeping the rounds on which both agree.

    The policy decides, and its decision waits for a logged round with that arm; rounds in
    between are passed over. Under a uniform logger every match counts. Under a logger with
    recorded propensities p a match counts with probability floor / p, which makes acceptance
    equally likely for all arms. The answer is for a shorter run: the share `floor` of the rounds is
    kept, one in K under a uniform logger.

    Parameters
    ----------
    source, policy, scope, seeds, tokens, level, progress
        As in `full_replay`.
    floor : float, optional
        A lower bound on the logger's propensities of all arms, in (0, 1]; default: the least
        that the log shows (a used arm's, or an equal share of what it left to the others).

    Raises
    ------
    ReplayError
        If propensities are missing or 1 (a deterministic logger), lie below `floor`, an arm was
        never logged or, over some stretch of rounds, too rarely for `floor`, or the number of
        rounds kept is not what `floor` promises.

    Notes
    -----
    Source: Li, Chu, Langford and Wang (2011), "Unbiased offline evaluation of contextual-bandit-
    based news article recommendation algorithms"; acceptance by propensity is the same argument
    after thinning the log to a uniform one.
    """
    reader, policy = open_trace(source), scoped(policy, scope)
    options = check_options(seeds, tokens, level)
    K = len(reader.header.arms)
    floor = _logger_floor(reader, floor)
    players = [make_player(policy, K, seed) for seed in options.seeds]
    tallies = [Tally(K, tokens) for _ in options.seeds]
    coins = [np.random.default_rng([seed, 1]) for seed in options.seeds]
    unknown: dict[str, str] = {}
    if not reader.header.draft_length:
        unknown["tokens"] = "this log holds no tokens (it was imported)"
    fields = ("arm", "reward", "propensity", "emitted", "step")
    for batch, starts in in_order(reader, fields, policy, progress):
        check_rewards(batch["reward"])
        timed = bool((np.isfinite(batch["step"]) & (batch["step"] > 0.0)).all())
        if not timed:
            unknown["steps"] = UNTIMED
        costs = batch["step"] if timed else np.ones(1)
        chance = floor / batch["propensity"]
        for player, tally, rng in zip(players, tallies, coins, strict=True):
            keep = rng.random(len(batch)) < chance
            taken = player.match(starts, batch["arm"], batch["reward"], costs, keep)
            tally.add_logged(batch, taken)
    for tally in tallies:
        _check_kept(tally.accepted, tally.rounds, floor)
    return summed_up(policy, "rejection", options, tallies, unknown)


def _logger_floor(reader: Reader, floor: float | None) -> float:
    """The least propensity, once the log is known to support rejection replay."""
    K = len(reader.header.arms)
    least, seen, done = math.inf, np.zeros(K, dtype=np.int64), 0
    uses = UnitSums(K + 1, most=512)
    for batch in reader.batches(("arm", "propensity", "reward")):
        p = batch["propensity"]
        if np.isnan(p).any():
            raise ReplayError(
                "the log lacks propensities, so nobody can tell how likely each arm was; log with "
                "a policy that tells its probabilities"
            )
        if ((p <= 0.0) | (p > 1.0)).any():
            raise ReplayError(f"the log holds a propensity of {p[(p <= 0.0) | (p > 1.0)][0]}")
        if np.isnan(batch["reward"]).any():
            raise ReplayError("the log holds a reward of nan")
        room = float((1.0 - p.max()) / (K - 1)) if K > 1 else 1.0  # for the least of the others
        least = min(least, float(p.min()), room if room < p.min() * (1.0 - 1e-9) else math.inf)
        if len(seen) > 1 and (p > 1.0 - 1e-9).any():
            raise ReplayError(
                f"{(p > 1.0 - 1e-9).mean():.0%} of the first rounds have propensity 1: a "
                "deterministic logger gave the other arms no chance, so their rewards are unknown"
            )
        seen += np.bincount(batch["arm"], minlength=K)
        each = (np.where(batch["arm"] == a, 1.0 / p, 0.0) for a in range(K))
        uses.add(np.arange(done, done + len(p)), 1.0, *each)
        done += len(p)
    if not seen.sum():
        raise ReplayError("the trace holds no rounds")
    if not seen.all():
        never = [arm for arm, n in zip(reader.header.arms, seen, strict=True) if n == 0]
        raise ReplayError(
            f"arm {', '.join(map(repr, never))} was never logged; a policy that chose it would "
            "wait for ever"
        )
    if floor is None:
        _check_support(uses.sums, least, reader.header.arms)
        return least
    floor = checks.number("floor", floor, 0.0, 1.0, open_low=True)
    if floor > least:
        raise ReplayError(
            f"floor={floor} is above the least propensity in the log, {least}; lower it"
        )
    _check_support(uses.sums, floor, reader.header.arms)
    return floor


def _check_support(sums: NDArray[np.float64], floor: float, arms: Sequence[str]) -> None:
    """Refuse a log in which some arm was used too rarely, in any stretch, for the floor to hold.

    [a = i] / p has mean 1 in every round that gives arm i a chance and is at most 1 / floor, so
    over m rounds P(mean <= x) <= exp(-m KL(floor x || floor)) (Hoeffding 1963, theorem 1, for
    martingales). All stretches of blocks are tried; one log in 10^6 is refused by chance at most.
    """
    total = np.vstack([np.zeros(sums.shape[1]), np.cumsum(sums, axis=0)])
    U, K = len(sums), sums.shape[1] - 1
    limit = math.log(1e6 * K * U * (U + 1) / 2.0)
    for width in range(U, 0, -1):
        window = total[width:] - total[:-width]
        rounds, used = window[:, :1], window[:, 1:]
        x = np.minimum(floor * used / rounds, floor)
        evidence = rounds * (rel_entr(x, floor) + rel_entr(1.0 - x, 1.0 - floor))
        if evidence.max() > limit:
            place, arm = np.unravel_index(int(np.argmax(evidence)), evidence.shape)
            first, n = int(total[place, 0]), int(rounds[place, 0])
            raise ReplayError(
                f"rounds {first} to {first + n - 1} use arm {arms[int(arm)]!r} so rarely that the "
                f"logger cannot have given it a probability of {floor:.3g} in each; where an arm "
                "had no chance the log cannot judge a policy that wants it: replay the part of "
                "the log that supports all arms, or use full replay"
            )


def _check_kept(kept: int, rounds: int, floor: float) -> None:
    """Each round is kept with probability `floor`, whatever the policy wants: a binomial law."""
    if min(binom.cdf(kept, rounds, floor), binom.sf(kept - 1, rounds, floor)) < 1e-9:
        raise ReplayError(
            f"{kept} of {rounds} rounds were kept, and a logger that gave every arm at least "
            f"{floor:.3g} lets about {floor * rounds:.0f} through: its propensities are not those "
            "in the log, or arms had no chance in part of it"
        )
