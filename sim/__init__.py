"""Simulated speculative decoding: any policy, millions of rounds a second, known laws."""

from sim.acceptance import IID, AcceptanceModel, Clustered, Language, Place, Recorded
from sim.arms import Arms, Bernoulli, RewardTable, against_ucb
from sim.costs import Costs
from sim.environment import Environment
from sim.lengths import Empirical, EndOfText, Fixed
from sim.schedules import Adversarial, Drifting, MarkovSwitching, Piecewise, Stationary
from sim.several import Drafter, Several
from sim.simulate import (
    BanditRuns,
    InterpretedWarning,
    Rounds,
    Runs,
    sample_rounds,
    simulate,
    simulate_bandit,
)

__all__ = [
    "IID",
    "AcceptanceModel",
    "Adversarial",
    "Arms",
    "BanditRuns",
    "Bernoulli",
    "Clustered",
    "Costs",
    "Drafter",
    "Drifting",
    "Empirical",
    "EndOfText",
    "Environment",
    "Fixed",
    "InterpretedWarning",
    "Language",
    "MarkovSwitching",
    "Piecewise",
    "Place",
    "Recorded",
    "RewardTable",
    "Rounds",
    "Runs",
    "Several",
    "Stationary",
    "against_ucb",
    "sample_rounds",
    "simulate",
    "simulate_bandit",
]
