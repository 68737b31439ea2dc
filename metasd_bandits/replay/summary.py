"""What a trace holds, and which questions it can answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metasd_bandits.intervals import ReplayError
from metasd_bandits.replay.estimators import estimate
from metasd_bandits.replay.full import Progress, Source, full_replay
from metasd_bandits.replay.rejection import rejection_replay
from metasd_bandits.traces.columns import Reader, open_trace

__all__ = ["TraceSummary", "summarize"]


@dataclass(frozen=True)
class TraceSummary:
    """A trace in numbers; arrays are by arm, shape (K,).

    Attributes
    ----------
    rounds, queries : int
    pulls : (K,) int array
    reward, tokens, step : (K,) arrays
        Means over the rounds that used the arm; NaN where it was never used or not measured.
    propensity : (2, K) array
        Least and largest logged propensity.
    missing_propensities : int
    full_information : int
        Rounds that carry every arm's reward.
    interleaved : bool
        Whether queries interleave, as in batched decoding.
    answers : dict of str to str
        ``full replay``, ``rejection replay``, ``estimation`` -> an empty string, or why not.
    """

    rounds: int
    queries: int
    pulls: NDArray[np.int64]
    reward: NDArray[np.float64]
    tokens: NDArray[np.float64]
    step: NDArray[np.float64]
    propensity: NDArray[np.float64]
    missing_propensities: int
    full_information: int
    interleaved: bool
    answers: dict[str, str]

    def as_dict(self, arms: tuple[str, ...]) -> dict[str, Any]:
        """For ``--json``."""
        by_arm = [
            {
                "arm": arm,
                "rounds": int(self.pulls[i]),
                "reward": _finite(self.reward[i]),
                "tokens per round": _finite(self.tokens[i]),
                "steps per round": _finite(self.step[i]),
                "propensity": [_finite(x) for x in self.propensity[:, i]],
            }
            for i, arm in enumerate(arms)
        ]
        return {
            "rounds": self.rounds,
            "queries": self.queries,
            "arms": by_arm,
            "missing propensities": self.missing_propensities,
            "full-information rounds": self.full_information,
            "queries interleave": self.interleaved,
            "cannot answer": {name: why for name, why in self.answers.items() if why},
            "can answer": [name for name, why in self.answers.items() if not why],
        }


def summarize(source: Source, progress: Progress | None = None) -> TraceSummary:
    """Tell what a trace holds, and try on it each question that it may answer."""
    reader = open_trace(source)
    K = len(reader.header.arms)
    pulls, sums = np.zeros(K, dtype=np.int64), np.zeros((3, K))
    propensity = np.array([np.full(K, np.inf), np.full(K, -np.inf)])
    rounds = missing = full = last = 0
    interleaved = False
    certain = 0
    for batch in reader.batches(("arm", "reward", "emitted", "step", "propensity", "rewards")):
        arm, p = batch["arm"], batch["propensity"]
        pulls += np.bincount(arm, minlength=K)
        for row, name in zip(sums, ("reward", "emitted", "step"), strict=True):
            row += np.bincount(arm, batch[name], minlength=K)
        known = ~np.isnan(p)
        np.minimum.at(propensity[0], arm[known], p[known])
        np.maximum.at(propensity[1], arm[known], p[known])
        missing += int((~known).sum())
        certain += int((p > 1.0 - 1e-9).sum())
        full += int(batch.present["rewards"].sum()) if "rewards" in batch.present else 0
        interleaved |= bool((np.diff(batch.query, prepend=last) < 0).any())
        last, rounds = int(batch.query[-1]), rounds + len(batch)
        if progress:
            progress(len(batch))
    with np.errstate(invalid="ignore"):
        reward, tokens, step = sums / pulls
    return TraceSummary(
        rounds, len(reader.query_names), pulls, reward, tokens, step,
        np.where(np.isfinite(propensity), propensity, math.nan),
        missing, full, interleaved,
        _answers(reader, rounds, pulls, missing, full, certain),
    )  # fmt: skip


def _answers(
    reader: Reader,
    rounds: int,
    pulls: NDArray[np.int64],
    missing: int,
    full: int,
    certain: int,
) -> dict[str, str]:
    if not rounds:
        return dict.fromkeys(("full replay", "rejection replay", "estimation"), "no rounds")
    lacking = f"{rounds - full} of {rounds} rounds lack the other arms' rewards"
    randomised = ""
    if missing:
        randomised = f"{missing} rounds lack a propensity"
    elif certain and len(pulls) > 1:
        randomised = f"the logger was certain of its arm in {certain} of {rounds} rounds"
    never = [a for a, n in zip(reader.header.arms, pulls, strict=True) if n == 0]
    unused = f"never used: {', '.join(never)}" if never else ""
    used = [float(n > 0) / np.count_nonzero(pulls) for n in pulls]
    return {
        "full replay": (lacking if full < rounds else "")
        or _refusal(lambda: full_replay(reader, "uniform", scope="carried")),
        "rejection replay": randomised
        or unused
        or _refusal(lambda: rejection_replay(reader, "uniform", scope="carried")),
        "estimation": randomised or _refusal(lambda: estimate(reader, used, methods=["snips"])),
    }


def _refusal(question: Callable[[], object]) -> str:
    """Why the trace cannot answer, or an empty string: the command itself is the judge."""
    try:
        question()
    except ReplayError as refused:
        return str(refused)
    return ""


def _finite(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None
