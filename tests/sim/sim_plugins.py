"""A user's own policy and acceptance models, as their file would look."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from metasd_bandits import Policy
from metasd_bandits.compiled.stream import make_stream, uniform
from sim import AcceptanceModel


class EveryOther(Policy):
    """Arms in turn, in plain Python."""

    name = "every-other"

    def reset(self, n_arms, seed=None):
        self.n_arms, self.t, self.stream = n_arms, 0, make_stream(seed or 0)

    def select(self, available=None):
        self.t += 1
        return (self.t - 1) % self.n_arms

    def update(self, arm, reward, *, cost=1.0, propensity=float("nan"), rewards=None):
        assert 0.0 <= reward <= 1.0


class Chances(NamedTuple):
    chances: np.ndarray


def draft(model, memory, arm, place, stream):
    """All or nothing; remembers how often all were accepted."""
    accepted = 4 if uniform(stream) < model.chances[arm] else 0
    memory[0] += accepted == 4
    return accepted, accepted / 4, model.chances[arm]


class AllOrNothing(AcceptanceModel):
    """Interpreted: `draft` is plain Python."""

    draft_length = 4
    draft = staticmethod(draft)

    def __init__(self, chances):
        self.chances = np.array(chances)
        self.n_arms = len(chances)

    def parameters(self):
        return Chances(self.chances)

    def memory_size(self):
        return 1


compiled_draft = njit(draft)


class CompiledAllOrNothing(AllOrNothing):
    """The same, compiled."""

    draft = staticmethod(compiled_draft)


@njit
def wasteful_draft(model, memory, arm, place, stream):
    scratch = np.zeros(3)
    scratch[0] = uniform(stream)
    accepted = 4 if scratch[0] < model.chances[arm] else 0
    return accepted, accepted / 4, model.chances[arm]


class Wasteful(AllOrNothing):
    """Compiled, but it allocates an array in every round."""

    draft = staticmethod(wasteful_draft)
