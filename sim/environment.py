"""An environment: acceptance model x schedule x costs x lengths."""

from __future__ import annotations

from dataclasses import dataclass, field

from metasd_bandits import checks
from sim.acceptance.base import AcceptanceModel
from sim.costs import Costs
from sim.lengths import Lengths, make_lengths
from sim.schedules import Schedule, Stationary

__all__ = ["Environment"]


@dataclass(frozen=True)
class Environment:
    """Everything that a simulated deployment is.

    Parameters
    ----------
    acceptance : AcceptanceModel
        How many drafts are accepted; it knows K, N and the number of domains.
    lengths : int or Lengths
        B, the tokens of an output: fixed, or a law.
    schedule : Schedule, default Stationary()
        Which domain a round meets.
    costs : Costs, default Costs()
        What rounds and switches cost, in plain decoding steps.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If the parts do not fit together; raised here, before anything is simulated.
    """

    acceptance: AcceptanceModel
    lengths: int | Lengths
    schedule: Schedule = field(default_factory=Stationary)
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        make_lengths(self.lengths)
        self.costs.table(self.n_arms, self.draft_length)
        check_schedule(self.schedule, self.acceptance)

    @property
    def n_arms(self) -> int:
        """K."""
        return self.acceptance.n_arms

    @property
    def draft_length(self) -> int:
        """N."""
        return self.acceptance.draft_length


def check_schedule(schedule: Schedule, model: object) -> None:
    """Refuse a schedule that `model` cannot follow."""
    n_domains, drifts = getattr(model, "n_domains", 1), getattr(model, "drifts", False)
    schedule.table(n_domains)
    if schedule.drifts and not drifts:
        raise checks.ConfigError(
            f"schedule={type(schedule).__name__} needs rates that can be interpolated, and "
            f"{type(model).__name__} has none; use IID or Clustered, or a piecewise schedule"
        )
