"""Acceptance models by name, as ``metasd-sim --model`` spells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from metasd_bandits import checks
from metasd_bandits.plugins import load_plugins
from sim.acceptance.base import AcceptanceModel
from sim.acceptance.clustered import Clustered
from sim.acceptance.iid import IID
from sim.acceptance.language import Language

__all__ = ["ACCEPTANCE", "make_acceptance", "register_acceptance"]

_Maker = Callable[[Sequence[float], int], AcceptanceModel]

ACCEPTANCE: dict[str, _Maker] = {
    "iid": IID,
    "clustered": Clustered,
    "language": lambda rates, draft_length: Language([1.0 - a for a in rates], draft_length),
}


def register_acceptance(name: str, make: _Maker) -> None:
    """Make an acceptance model known to the command line under a name.

    Parameters
    ----------
    make : callable
        ``make(rates, draft_length)``, with one acceptance rate per drafter; a class often serves.
    """
    if not callable(make):
        raise checks.ConfigError(
            f"acceptance model {name!r}: {make!r} cannot be called; give a class or a function "
            "make(rates, draft_length)"
        )
    ACCEPTANCE[name] = make


def make_acceptance(name: str, rates: Sequence[float], draft_length: int = 5) -> AcceptanceModel:
    """An acceptance model from its name.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If the name is unknown (the near match is named), or a value out of range.
    """
    if name not in ACCEPTANCE:
        load_plugins("metasd.acceptance", register_acceptance)
    return ACCEPTANCE[checks.choice("model", name, ACCEPTANCE)](rates, draft_length)
