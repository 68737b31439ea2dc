"""The names that an engine's text needs before `specialise` binds the real ones."""

from metasd_bandits.compiled.stand_ins import select, update
from sim.acceptance.base import begin_nothing as begin
from sim.acceptance.iid import draft
from sim.arms import pay_bernoulli as pay
from sim.schedules import stay as place

__all__ = ["begin", "draft", "pay", "place", "select", "update"]
