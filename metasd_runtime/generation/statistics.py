"""What a query, or several, came to: per arm and in all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from metasd_bandits import Round

__all__ = ["ArmStatistics", "Statistics"]


@dataclass(frozen=True)
class ArmStatistics:
    """One arm's share.

    Attributes
    ----------
    name : str
    pulls, drafted, accepted, emitted : int
        Rounds, and tokens in them; of draft trees every node was drafted.
    block_efficiency, block_divergence, reward : float
        Means over the arm's rounds, in [0, 1]; 0 if it had none.
    tokens_per_round : float
        Emitted per round.
    seconds : float
        Drafting, switching and verifying.
    drafted_at, accepted_at, reached_at : tuple of int
        Rounds that drafted a token at each position of the block (each depth of a tree), that
        accepted one, and in which as many had been accepted before it.
    """

    name: str
    pulls: int
    drafted: int
    accepted: int
    emitted: int
    block_efficiency: float
    block_divergence: float
    reward: float
    tokens_per_round: float
    seconds: float
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    reached_at: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, rounds: Sequence[Round]) -> ArmStatistics:
        """Sum up rounds in which the arm was used."""
        pulls = max(len(rounds), 1)
        emitted = sum(r.emitted for r in rounds)
        positions = range(max((r.positions for r in rounds), default=0))
        return cls(
            name=name,
            pulls=len(rounds),
            drafted=sum(r.drafted for r in rounds),
            accepted=sum(r.accepted for r in rounds),
            emitted=emitted,
            block_efficiency=sum(r.block_efficiency for r in rounds) / pulls,
            block_divergence=sum(r.block_divergence for r in rounds) / pulls,
            reward=sum(r.reward for r in rounds) / pulls,
            tokens_per_round=emitted / pulls,
            seconds=sum(r.seconds for r in rounds),
            drafted_at=tuple(sum(r.positions > j for r in rounds) for j in positions),
            accepted_at=tuple(sum(r.accepted > j for r in rounds) for j in positions),
            reached_at=tuple(sum(r.positions > j <= r.accepted for r in rounds) for j in positions),
        )

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """Share of accepted tokens at each position, among the rounds that came that far.

        A mean over all positions falls as the draft grows; these rates do not. NaN where no
        round came that far.
        """
        return tuple(
            accepted / n if n else math.nan
            for accepted, n in zip(self.accepted_at, self.reached_at, strict=True)
        )


@dataclass(frozen=True)
class Statistics:
    """All rounds together.

    Attributes
    ----------
    arms : tuple of ArmStatistics
    tokens, rounds, target_forwards : int
        Emitted tokens, rounds, and the target's forwards (the prompt's included).
    seconds, prefill_seconds, draft_seconds, verify_seconds, switch_seconds, bandit_seconds : float
        Wall time of the call, and its parts.
    """

    arms: tuple[ArmStatistics, ...]
    tokens: int
    rounds: int
    target_forwards: int
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    switch_seconds: float
    bandit_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the whole call's wall time, the prompt's reading included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def overhead_seconds(self) -> float:
        """Wall time in neither prefill nor draft, switch, verification nor bandit."""
        parts = self.prefill_seconds + self.draft_seconds + self.verify_seconds
        return self.seconds - parts - self.switch_seconds - self.bandit_seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        derived = {
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_round": self.tokens_per_round,
            "overhead_seconds": self.overhead_seconds,
        }
        return {**asdict(self), **derived}

    @classmethod
    def of(
        cls,
        arms: Iterable[str],
        rounds: list[Round],
        *,
        seconds: float,
        prefill_seconds: float = 0.0,
        bandit_seconds: float = 0.0,
        target_forwards: int = 0,
    ) -> Statistics:
        """Sum up rounds."""
        return cls(
            arms=tuple(
                ArmStatistics.of(name, [r for r in rounds if r.arm == i])
                for i, name in enumerate(arms)
            ),
            tokens=sum(r.emitted for r in rounds),
            rounds=len(rounds),
            target_forwards=target_forwards,
            seconds=seconds,
            prefill_seconds=prefill_seconds,
            draft_seconds=sum(r.draft_seconds for r in rounds),
            verify_seconds=sum(r.verify_seconds for r in rounds),
            switch_seconds=sum(r.switch_seconds for r in rounds),
            bandit_seconds=bandit_seconds,
        )
