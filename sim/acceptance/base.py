"""What an acceptance model is: parameters, a little memory, and two functions over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel

__all__ = ["AcceptanceModel", "Place", "begin_nothing", "rates_by_domain"]


class Place(NamedTuple):
    """Where in the text a round stands, as the schedule says; handed to a model's `draft`.

    Attributes
    ----------
    t : int
        Rounds finished so far in this query.
    domain, to : int
        Rows of the rates: the present domain, and the one drifted towards.
    weight : float
        In [0, 1): rates are ``(1 - weight) * rates[domain] + weight * rates[to]``.
    """

    t: int
    domain: int
    to: int
    weight: float


@kernel
def begin_nothing(model, memory, stream):
    """Start of a query for a model that remembers nothing between rounds."""


class AcceptanceModel(ABC):
    """How many drafts a target accepts, and what the block is worth as a reward.

    Subclass it to plug your own model into the simulator: `parameters` and the function `draft`
    are enough. Both functions become part of the compiled loop if they are decorated with
    ``@numba.njit``; plain Python functions work as well, a few hundred times slower.

    - ``draft(model, memory, arm, place, stream) -> (accepted, efficiency, divergence)``: one
      round with drafter `arm`; `model` is what `parameters` returns, `place` a `Place`. Draw
      with ``metasd_bandits.compiled.stream.uniform(stream)``, the same number of times whatever the arm,
      so that policies can be compared on common random numbers.
    - ``begin(model, memory, stream)``: the start of a query (optional).
    """

    n_arms: int
    n_domains: int = 1
    draft_length: int
    drifts: ClassVar[bool] = False
    begin: ClassVar[Callable[..., Any]] = staticmethod(begin_nothing)
    draft: ClassVar[Callable[..., Any]]

    @abstractmethod
    def parameters(self) -> Any:
        """What `draft` reads: a NamedTuple of arrays and numbers."""

    def memory_size(self) -> int:
        """Float64 places that live through a query; the final values are in the result."""
        return 0

    def tokens_per_round(self) -> NDArray[np.float64]:
        """g: expected tokens of a round, shape (D, K); only where a closed form is known."""
        raise TypeError(
            f"{type(self).__name__} has no closed form for tokens per round; estimate it with "
            "simulate(env, 'fixed:arm=i', ...)"
        )

    def expected_reward(self, reward: str) -> NDArray[np.float64]:
        """Mean of the reward ``be`` or ``bd``, shape (D, K); only where a closed form is known."""
        raise TypeError(f"{type(self).__name__} has no closed form for the mean of {reward!r}")


def rates_by_domain(name: str, values: Any) -> NDArray[np.float64]:
    """Acceptance rates as an array (D, K): one row for each domain, one column per drafter.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If there is no drafter, a rate is outside [0, 1], or rows differ in length.
    """
    try:
        table = np.atleast_2d(np.asarray(values, dtype=np.float64))
    except ValueError:
        raise checks.ConfigError(
            f"{name}={checks.shown(values)} is no table of rates; "
            "give K numbers, or rows of K numbers each"
        ) from None
    if table.ndim != 2 or table.shape[1] == 0:
        raise checks.ConfigError(
            f"{name}={checks.shown(values)} holds no drafter; give at least one rate"
        )
    for value in table.ravel().tolist():
        checks.number(name, value, 0.0, 1.0)
    return table
