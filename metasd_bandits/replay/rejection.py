"""Rejection replay: a policy judged on logged rounds that it would have chosen as well.

Only the used arm's reward was logged, by a randomised logger that does not learn: the policy
decides, and its decision waits for a logged round with that arm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from metasd_bandits import checks
from metasd_bandits.intervals import ReplayError
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
        propensity in the log.

    Raises
    ------
    ReplayError
        If propensities are missing or 1 (a deterministic logger), lie below `floor`, or an arm
        was never logged.

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
    return summed_up(policy, "rejection", options, tallies, unknown)


def _logger_floor(reader: Reader, floor: float | None) -> float:
    """The least propensity, once the log is known to support rejection replay."""
    least, seen = math.inf, np.zeros(len(reader.header.arms), dtype=np.int64)
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
        least = min(least, float(p.min()))
        if len(seen) > 1 and (p > 1.0 - 1e-9).any():
            raise ReplayError(
                f"{(p > 1.0 - 1e-9).mean():.0%} of the first rounds have propensity 1: a "
                "deterministic logger gave the other arms no chance, so their rewards are unknown"
            )
        seen += np.bincount(batch["arm"], minlength=len(seen))
    if not seen.sum():
        raise ReplayError("the trace holds no rounds")
    if not seen.all():
        never = [arm for arm, n in zip(reader.header.arms, seen, strict=True) if n == 0]
        raise ReplayError(
            f"arm {', '.join(map(repr, never))} was never logged; a policy that chose it would "
            "wait for ever"
        )
    if floor is None:
        return least
    floor = checks.number("floor", floor, 0.0, 1.0, open_low=True)
    if floor > least:
        raise ReplayError(
            f"floor={floor} is above the least propensity in the log, {least}; lower it"
        )
    return floor
