"""Synthetic traces with a known truth: for tutorials, benchmarks, and proofs of the estimators.

Every arm drafts in every round and a stationary logger uses one of them; acceptance follows the
truncated geometric law, shifted for a whole query by its difficulty where `spread` is positive.
As a program: ``python -m metasd_bandits.traces.synthetic trace.parquet --queries 200``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from scipy.special import expit, logit

from metasd_bandits import checks
from metasd_bandits.traces.columns import BATCH_ROWS, Batch, Reader
from metasd_bandits.traces.jsonl import TraceHeader

__all__ = ["SyntheticLog", "SyntheticReader"]

_DRAWN_TOGETHER = 131_072  # rounds; part of the law, since it orders the random numbers


@dataclass(frozen=True)
class SyntheticLog:
    """The law of a synthetic trace.

    Parameters
    ----------
    alphas : tuple of float
        Each drafter's acceptance rate, in (0, 1).
    draft_length : int
        N.
    queries, rounds : int
        Queries, and rounds of each.
    reward : str
        ``be``, ``tokens`` or ``bd``; for BD each position accepts with its own probability, drawn
        from a Beta law of mean alpha and `concentration` 4, and the reward is their mean.
    logger : tuple of float, optional
        The logging policy's probabilities, one for each arm; default uniform.
    steps : tuple of float, optional
        Duration of a round with each drafter, in plain target steps; default 1.
    spread : float
        Standard deviation of a query's difficulty, added to logit(alpha) of every arm.
    full : bool
        Whether rounds carry every arm's reward, tokens and steps.
    seed : int
    """

    alphas: tuple[float, ...] = (0.3, 0.5, 0.7)
    draft_length: int = 5
    queries: int = 200
    rounds: int = 50
    reward: str = "be"
    logger: tuple[float, ...] | None = None
    steps: tuple[float, ...] | None = None
    spread: float = 0.0
    full: bool = True
    seed: int = 0

    concentration = 4.0

    def __post_init__(self) -> None:
        K = len(self.alphas)
        for alpha in self.alphas:
            checks.number("alphas", alpha, 0.0, 1.0, open_low=True, open_high=True)
        for name in ("draft_length", "queries", "rounds"):
            checks.integer(name, getattr(self, name), 1)
        checks.choice("reward", self.reward, ("be", "bd", "tokens"))
        for name in ("logger", "steps"):
            values = getattr(self, name)
            if values is not None and len(values) != K:
                raise checks.ConfigError(
                    f"{name}={checks.shown(values)} must list one value per arm ({K})"
                )
        if self.logger is not None and abs(sum(self.logger) - 1.0) > 1e-9:
            raise checks.ConfigError(f"logger={checks.shown(self.logger)} must sum to 1")
        checks.number("spread", self.spread, 0.0)

    @property
    def header(self) -> TraceHeader:
        """The header of the trace; the law itself stands in its ``meta``."""
        uniform = self.logger is None
        return TraceHeader(
            arms=tuple(f"drafter-{i}" for i in range(len(self.alphas))),
            draft_length=self.draft_length,
            policy="uniform" if uniform else "stationary",
            reward=self.reward,
            meta={"synthetic": dataclasses.asdict(self)},
        )


class SyntheticReader(Reader):
    """Draws a `SyntheticLog` batch by batch; the same law gives the same trace each time."""

    def __init__(self, law: SyntheticLog) -> None:
        self.law = law
        self.header = law.header
        self.n_rounds = law.queries * law.rounds
        self.query_names = []

    def batches(self, names: Collection[str], rows: int = BATCH_ROWS) -> Iterator[Batch]:
        law = self.law
        self.query_names = [f"q{i}" for i in range(law.queries)]
        rng = np.random.default_rng(law.seed)
        together = max(1, min(law.queries, _DRAWN_TOGETHER // law.rounds))
        for first in range(0, law.queries, together):
            chunk = self._draw(rng, first, min(law.queries, first + together))
            for start in range(0, len(chunk), rows):
                yield chunk.slice(start, start + rows)

    def _draw(self, rng: np.random.Generator, first: int, last: int) -> Batch:
        """Queries first..last, whole."""
        law, K, N = self.law, len(self.law.alphas), self.law.draft_length
        difficulty = law.spread * rng.standard_normal(last - first)
        alpha = expit(logit(np.array(law.alphas))[:, None] + np.repeat(difficulty, law.rounds))
        n = alpha.shape[1]
        if law.reward == "bd":
            c = law.concentration
            chance = rng.beta(c * alpha[:, :, None], c * (1.0 - alpha[:, :, None]), (K, n, N))
            hit = rng.random((K, n, N)) < chance
            accepted = np.cumprod(hit, axis=2, dtype=np.int64).sum(axis=2)
            divergence = chance.mean(axis=2)
        else:
            waits = np.log1p(-rng.random((K, n))) / np.log(alpha)
            accepted = np.minimum(waits, N).astype(np.int64)
            divergence = alpha
        p = np.full(K, 1.0 / K) if law.logger is None else np.array(law.logger)
        arm = np.minimum(np.searchsorted(np.cumsum(p), rng.random(n), side="right"), K - 1)
        return self._batch(first, accepted, divergence, arm, p)

    def _batch(
        self,
        first: int,
        accepted: NDArray[np.int64],
        divergence: NDArray[np.float64],
        arm: NDArray[np.int64],
        p: NDArray[np.float64],
    ) -> Batch:
        law, N = self.law, self.law.draft_length
        K, n = accepted.shape
        each, zero = np.arange(n), np.zeros(n)
        rewards = {"be": accepted / N, "bd": divergence, "tokens": (accepted + 1) / (N + 1)}
        steps = np.ones(K) if law.steps is None else np.array(law.steps, dtype=float)
        used = accepted[arm, each]
        batch = Batch(first + each // law.rounds)
        batch.columns = {
            "arm": arm,
            "index": each % law.rounds,
            "drafted": np.full(n, N),
            "accepted": used,
            "emitted": used + 1,
            "block_efficiency": used / N,
            "block_divergence": divergence[arm, each],
            "reward": rewards[law.reward][arm, each],
            "propensity": p[arm],
            "draft_seconds": zero,
            "verify_seconds": zero,
            "switch_seconds": zero,
            "owed": np.zeros(n, dtype=np.int64),
            "step": steps[arm],
            "depth": np.zeros(n, dtype=np.int64),
        }
        if law.full:
            everywhere = np.ones(n, dtype=bool)
            batch.per_arm = {
                "rewards": rewards[law.reward],
                "tokens": accepted + 1,
                "steps": np.repeat(steps[:, None], n, axis=1),
            }
            batch.present = dict.fromkeys(batch.per_arm, everywhere)
        return batch


def _numbers(text: str | None) -> tuple[float, ...] | None:
    return None if text is None else tuple(float(x) for x in text.split(","))


def _command(
    path: Annotated[Path, typer.Argument(help="Where the trace goes: .parquet or .jsonl")],
    alphas: Annotated[str, typer.Option(help="Acceptance rate of each drafter")] = "0.3,0.5,0.7",
    draft_length: int = 5,
    queries: int = 200,
    rounds: Annotated[int, typer.Option(help="Rounds of each query")] = 50,
    reward: Annotated[str, typer.Option(help="be, bd or tokens")] = "be",
    logger: Annotated[str | None, typer.Option(help="Logging probabilities; uniform")] = None,
    steps: Annotated[str | None, typer.Option(help="Duration of a round by drafter")] = None,
    spread: Annotated[float, typer.Option(help="Difficulty of queries, on logit(alpha)")] = 0.0,
    full: Annotated[bool, typer.Option(help="Score every drafter in every round")] = True,
    seed: int = 0,
) -> None:
    """Write a synthetic trace whose truth is known."""
    from metasd_bandits.traces.parquet import convert

    law = SyntheticLog(
        _numbers(alphas) or (),
        draft_length,
        queries,
        rounds,
        reward,
        _numbers(logger),
        _numbers(steps),
        spread,
        full,
        seed,
    )
    print(f"{convert(SyntheticReader(law), path)} rounds in {path}")


if __name__ == "__main__":
    typer.run(_command)
