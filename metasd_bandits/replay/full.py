"""Replay: what another policy would have earned on the rounds of a trace.

`full_replay`
    Every arm's reward was logged: play the policy, look up what it would have got. Exact.
`rejection_replay`
    Only the used arm's reward was logged, by a randomised logger that does not learn: the policy
    decides, and waits for a logged round with its arm (Li et al. 2011, arXiv 1003.5956).

A *stationary* policy can also be judged without playing it: `metasd_bandits.replay.estimators`. Both
functions treat the rounds of a query as exchangeable: a policy that emits fewer tokens would
have drafted from other positions of the text than the log did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.carried import Carried
from metasd_bandits.intervals import (
    ReplayError,
)
from metasd_bandits.policy import Policy
from metasd_bandits.registry import make_policy
from metasd_bandits.replay.players import make_player
from metasd_bandits.replay.results import Options, ReplayResult, summed_up
from metasd_bandits.replay.tally import Tally
from metasd_bandits.traces.columns import Batch, Reader, ahead, open_trace
from metasd_bandits.traces.jsonl import Trace

__all__ = ["decisions", "full_replay", "tokens_of"]

Source = str | Path | Trace | Reader
Scope = Literal["query", "carried"]
Progress = Callable[[int], None]
UNTIMED = "the log does not tell what rounds cost (step is missing)"
_FULL = ("rewards", "tokens", "steps")


def full_replay(
    source: Source,
    policy: str | Policy,
    *,
    scope: Scope = "query",
    seeds: Sequence[int] = (0,),
    tokens: int | None = None,
    level: float = 0.95,
    progress: Progress | None = None,
) -> ReplayResult:
    """Play a policy on a full-information trace: the exact counterfactual, round by round.

    The decisions are those that the live policy would take on the same rewards with the same
    seed. An arm whose reward is NaN in a round is masked for it.

    Parameters
    ----------
    source : path, Trace or Reader
    policy : str or Policy
        As `make_policy` reads it; an object is copied, not changed.
    scope : {"query", "carried"}
        Forget at the start of each query, or never. A `metasd_bandits.carried.Carried` policy
        follows its own rule at the start of each query.
    seeds : sequence of int
        One run for each; all share one pass over the trace.
    tokens : int, optional
        B; asks for the rounds (and steps) each query needs to emit B tokens.
    level : float
        Coverage of the intervals. They resample queries (with 2 to 9: Student's over queries),
        or blocks of rounds of a single one; they are NaN for a policy that learns across queries.
    progress : callable, optional
        Told the number of rounds after each batch.

    Raises
    ------
    ReplayError
        If a round lacks the rewards of every arm, or queries interleave under scope "query".
    """
    reader, policy = open_trace(source), scoped(policy, scope)
    options = check_options(seeds, tokens, level)
    K = len(reader.header.arms)
    players = [make_player(policy, K, seed) for seed in options.seeds]
    tallies = [Tally(K, tokens) for _ in players]
    unknown: dict[str, str] = {}
    for batch, starts in in_order(reader, _FULL, policy, progress):
        rewards, costs = _full_rewards(batch), _costs(batch, K)
        emitted, steps = tokens_of(batch, reader), batch.full("steps")
        if emitted is None:
            unknown["tokens"] = "the log does not tell every arm's tokens"
        if steps is None:
            unknown["steps"] = UNTIMED
        for player, tally in zip(players, tallies, strict=True):
            arms = player.play(starts, rewards, costs)
            tally.add_full(batch.query, arms, rewards, emitted, steps)
    if not tallies[0].rounds:
        raise ReplayError("the trace holds no rounds")
    return summed_up(policy, "full", options, tallies, unknown)


def decisions(
    source: Source, policy: str | Policy, *, scope: Scope = "query", seed: int = 0
) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
    """The arms a policy takes in full replay, batch by batch: (batch, (n,) arms).

    The batches carry rewards, tokens and steps of every arm. Raises as `full_replay` does.
    """
    reader, policy = open_trace(source), scoped(policy, scope)
    K = len(reader.header.arms)
    player = make_player(policy, K, checks.integer("seed", seed, 0))
    for batch, starts in in_order(reader, _FULL, policy, None):
        yield batch, player.play(starts, _full_rewards(batch), _costs(batch, K))


def tokens_of(batch: Batch, reader: Reader) -> NDArray[Any] | None:
    """Every arm's tokens in each round, (K, n): logged, or told by the reward itself.

    A full block's reward gives them away under ``be`` (N r + 1) and ``tokens`` ((N + 1) r).
    """
    logged, rewards = batch.full("tokens"), batch.full("rewards")
    if logged is not None or rewards is None:
        return logged
    N = reader.header.draft_length
    if reader.header.reward == "be":
        return np.nan_to_num(np.rint(rewards * N) + 1.0)
    if reader.header.reward == "tokens":
        return np.nan_to_num(np.rint(rewards * (N + 1)))
    return None


def scoped(policy: str | Policy, scope: str) -> Policy:
    """The policy under its scope, as the decoder wraps it."""
    policy = make_policy(policy)
    checks.choice("scope", scope, ("query", "carried"))
    if scope == "carried" and not isinstance(policy, Carried):
        return Carried(policy)
    return policy


def check_options(seeds: Sequence[int], tokens: int | None, level: float) -> Options:
    """What was asked for, once it makes sense."""
    if not len(seeds):
        raise checks.ConfigError("seeds is empty; give at least one seed")
    if tokens is not None:
        checks.integer("tokens", tokens, 1)
    level = checks.number("level", level, 0.0, 1.0, open_low=True, open_high=True)
    return Options(tuple(checks.integer("seed", s, 0) for s in seeds), tokens, level)


def in_order(
    reader: Reader, fields: Sequence[str], policy: Policy, progress: Progress | None
) -> Iterator[tuple[Batch, NDArray[np.bool_]]]:
    """Batches, each with a flag at the first round of every query."""
    last = largest = -1
    for batch in ahead(reader.batches(fields)):
        query = batch.query
        fell = query < np.concatenate(([last], query[:-1]))
        if fell.any() and not isinstance(policy, Carried):
            name = reader.query_names[query[int(np.argmax(fell))]]
            raise ReplayError(
                f"query {name!r} goes on after another began (batched decoding), so that a policy "
                "cannot be reset per query; sort the trace with metasd-replay convert "
                "--by-query, or use scope 'carried'"
            )
        before = np.maximum.accumulate(np.concatenate(([largest], query[:-1])))
        last, largest = int(query[-1]), max(largest, int(query.max()))
        yield batch, query > before
        if progress:
            progress(len(batch))


def _full_rewards(batch: Batch) -> NDArray[np.float64]:
    """Every arm's reward, (K, n), or the reason why full replay is impossible."""
    rewards = batch.full("rewards")
    if rewards is None:
        present = batch.present.get("rewards", np.zeros(len(batch), dtype=bool))
        raise ReplayError(
            f"full replay needs every arm's reward in every round, and {int((~present).sum())} of "
            f"{len(batch)} rounds read lack it; record with --shadow, or use rejection replay or "
            "estimation, which need the used arm's reward only"
        )
    check_rewards(rewards)
    if np.isnan(rewards.min()) and np.isnan(rewards).all(axis=0).any():
        raise ReplayError("in some round no arm could serve: every reward is NaN")
    return rewards


def _costs(batch: Batch, n_arms: int) -> NDArray[np.float64]:
    """What each arm's round cost, (K, n), or ones, (K, 1), where the log does not tell."""
    steps = batch.full("steps")
    if steps is None:
        return np.ones((n_arms, 1))
    if steps.min() > 0.0 and steps.max() < math.inf:
        return steps
    usable = ~np.isnan(batch.per_arm["rewards"])
    if not (np.isfinite(steps) & (steps > 0.0))[usable].all():
        raise ReplayError("the log holds a step that is not positive and finite")
    return steps


def check_rewards(rewards: NDArray[np.float64]) -> None:
    """Refuse rewards that no policy takes; NaN is the caller's business."""
    if rewards.min() >= 0.0 and rewards.max() <= 1.0:
        return
    outside = (rewards < 0.0) | (rewards > 1.0)
    if outside.any():
        raise ReplayError(
            f"the log holds a reward of {rewards[outside][0]}; policies learn from [0, 1] only"
        )
