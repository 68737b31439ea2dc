"""The pictures of ``metasd-replay plot``, and the numbers in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks, plotting
from metasd_bandits.replay.coverage import interval_coverage
from metasd_bandits.replay.curves import Curve, Curves, replay_curves
from metasd_bandits.replay.summary import summarize
from metasd_bandits.traces.columns import Reader

__all__ = ["draw"]

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


def draw(
    reader: Reader,
    path: Path,
    kind: str,
    policies: Sequence[str],
    scope: str,
    seeds: int,
    logs: int,
    queries: int,
    progress: Callable[[int], None] | None,
) -> dict[str, Any]:
    """Draw one picture into `path` and return its numbers, ready for JSON."""
    arms = reader.header.arms
    with plotting.style():
        if kind == "support":
            summary = summarize(reader)
            figure = plotting.plot_support(arms, summary.pulls, summary.propensity)
            numbers: dict[str, Any] = summary.as_dict(arms)
        elif kind == "coverage":
            target = policies[0] if policies else "uniform"
            covered = interval_coverage(
                reader, target, levels=LEVELS, n_logs=logs, queries=queries, progress=progress
            )
            figure = plotting.plot_coverage(np.array(LEVELS), covered, logs)
            numbers = {"levels": LEVELS, "covered": {m: c.tolist() for m, c in covered.items()}}
        else:
            checks.choice("scope", scope, ("query", "carried"))
            curves = []
            for policy in policies:
                c = replay_curves(
                    reader,
                    f"fixed:arm={arms.index(policy)}" if policy in arms else policy,
                    scope=cast(Literal["query", "carried"], scope),
                    seeds=range(seeds),
                )
                curves.append(replace(c, policy=policy))
            function = {
                "reward": plotting.plot_reward,
                "regret": plotting.plot_regret,
                "shares": plotting.plot_shares,
            }[kind]
            figure = function(curves, arms)
            numbers = {"policies": [_numbers(c, kind, arms) for c in curves]}
        plotting.save_figure(figure, path)
    return numbers


def _numbers(c: Curves, kind: str, arms: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {"policy": c.policy, "rounds": c.rounds.tolist()}
    if kind == "shares":
        return {**values, "shares": dict(zip(arms, c.shares.T.tolist(), strict=True))}
    curve: Curve = getattr(c, kind)
    return {
        **values,
        **{end: _or_none(getattr(curve, end)) for end in ("mean", "low", "high")},
    }


def _or_none(values: NDArray[np.float64]) -> list[float | None]:
    return [x if math.isfinite(x) else None for x in values.tolist()]
