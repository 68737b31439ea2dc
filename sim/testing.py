"""`check_acceptance`: does an acceptance model keep the contract? One call, for anybody's class."""

from __future__ import annotations

import math
import operator

import numpy as np

from metasd_bandits.compiled.stream import make_stream
from metasd_bandits.testing import ContractError
from sim.acceptance.base import AcceptanceModel, Place

__all__ = ["check_acceptance"]

_ROUNDS = 60


def check_acceptance(model: AcceptanceModel) -> None:
    """Draw rounds of every drafter in every domain, and look at each.

    Raises
    ------
    metasd_bandits.testing.ContractError
        At the first fault; the message says what to fix.
    """
    if not isinstance(model, AcceptanceModel):
        raise ContractError(
            "is a model", f"{model!r} is none; derive its class from sim.AcceptanceModel"
        )
    for name in ("n_arms", "n_domains", "draft_length"):
        value = getattr(model, name, None)
        if not isinstance(value, int) or value < 1:
            raise ContractError(
                "sizes are set", f"{name}={value!r}; set it to a whole number from 1 on"
            )
    if not callable(getattr(model, "draft", None)):
        raise ContractError(
            "draft is a function", "there is no draft; declare draft = staticmethod(draft)"
        )
    for domain in range(model.n_domains):
        ends = {arm: _rounds(model, arm, domain) for arm in range(model.n_arms)}
        if len(set(ends.values())) > 1:
            raise ContractError(
                "arms draw alike",
                "drafters draw different numbers of random numbers; call uniform(stream) equally "
                "often whatever the arm and its luck, so that policies meet the same world",
            )
        if _rounds(model, 0, domain) != ends[0]:
            raise ContractError(
                "a seed fixes the run", "rounds differ under one seed; draw from `stream` alone"
            )


def _rounds(model: AcceptanceModel, arm: int, domain: int) -> tuple[int, ...]:
    """Play; where the stream stands behind it."""
    stream, memory = make_stream(5), np.zeros(model.memory_size())
    place, parameters = Place(0, domain, domain, 0.0), model.parameters()
    try:
        model.begin(parameters, memory, stream)
        for t in range(_ROUNDS):
            _look(model, model.draft(parameters, memory, arm, place._replace(t=t), stream))
    except ContractError:
        raise
    except Exception as error:
        raise ContractError(
            "draft works", f"drafter {arm} raised {type(error).__name__}: {error}"
        ) from error
    return tuple(stream.tolist())


def _look(model: AcceptanceModel, drawn: object) -> None:
    if not isinstance(drawn, tuple) or len(drawn) != 3:
        raise ContractError(
            "a round is three numbers",
            f"draft gave {drawn!r}; return (accepted, efficiency, divergence)",
        )
    accepted, efficiency, divergence = drawn
    try:
        whole = operator.index(accepted)
    except TypeError:
        whole = -1
    if not 0 <= whole <= model.draft_length:
        raise ContractError(
            "accepted drafts are counted",
            f"draft accepted {accepted!r}; give a whole number in [0, {model.draft_length}]",
        )
    for name, value in (("efficiency", efficiency), ("divergence", divergence)):
        if not (math.isfinite(value) and 0.0 <= value <= 1.0):
            raise ContractError("rewards lie in [0, 1]", f"{name}={value!r}; keep it in [0, 1]")
