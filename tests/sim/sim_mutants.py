"""Kernels and policies that are wrong on purpose, each in one place."""

from __future__ import annotations

from dataclasses import dataclass

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.state import record
from metasd_bandits.compiled.stream import uniform
from metasd_bandits.policies.exp3 import EXP3
from metasd_bandits.policies.exp3 import update as exp3_update
from sim.acceptance.clustered import draft as clustered_draft
from sim.acceptance.language import draft as language_draft
from sim.acceptance.recorded import draft as recorded_draft


@kernel
def one_draft_more(model, memory, arm, place, stream):
    """An IID block that accepts one draft more than it should."""
    alpha = model.alpha[place.domain, arm]
    v, power, accepted = 1.0 - uniform(stream), 1.0, 0
    for _ in range(model.efficiency.size - 1):
        accepted += v <= power
        power *= alpha
    return accepted, model.efficiency[accepted], alpha


@kernel
def tenth_of_bd(model, memory, arm, place, stream):
    accepted, be, bd = clustered_draft(model, memory, arm, place, stream)
    return accepted, be, 0.1 * bd


@kernel
def be_for_bd(model, memory, arm, place, stream):
    accepted, be, _ = clustered_draft(model, memory, arm, place, stream)
    return accepted, be, be


@kernel
def rewards_exchanged(model, memory, arm, place, stream):
    accepted, be, bd = recorded_draft(model, memory, arm, place, stream)
    return accepted, bd, be


@kernel
def whole_l1_distance(model, memory, arm, place, stream):
    """BD from the L1 distance, not half of it."""
    accepted, be, bd = language_draft(model, memory, arm, place, stream)
    return accepted, be, 2.0 * bd - 1.0


@kernel
def negated(s, arm, reward, cost, propensity):
    exp3_update(s, arm, -reward, cost, propensity)


@kernel
def unweighted(s, arm, reward, cost, propensity):
    exp3_update(s, arm, reward, cost, 1.0)


@kernel
def forgetful(s, arm, reward, cost, propensity):
    record(s, arm, reward)


@dataclass(frozen=True, eq=False)
class NegatedEXP3(EXP3):
    @classmethod
    def kernels(cls):
        return EXP3.kernels() | {"update": negated}


@dataclass(frozen=True, eq=False)
class UnweightedEXP3(EXP3):
    @classmethod
    def kernels(cls):
        return EXP3.kernels() | {"update": unweighted}


@dataclass(frozen=True, eq=False)
class ForgetfulEXP3(EXP3):
    """Never learns."""

    @classmethod
    def kernels(cls):
        return EXP3.kernels() | {"update": forgetful}
