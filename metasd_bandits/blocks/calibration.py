r"""Chances learned from what verification showed, one for each kind of evidence.

A *bin* is a drafter with a kind of evidence (its own confidence, a match's length, a depth). Every
node whose parent stood is one observation of its bin, whoever proposed it (semi-bandit feedback;
tokens checked until the first failure are a cascade). Bins keep Beta counts:

.. math::

   \hat p_k = \frac{s_k m_k + S_k}{s_k + n_k}, \qquad
   u_k = \max\{q : (s_k + n_k) \, \mathrm{kl}(\hat p_k, q) \le b \ln t\}

m and s are the prior's mean and strength, n and S the observations and those that stood (each
counting for discount**age), t the rounds. With bonus b = 0 the chance is the posterior mean,
else the KL-UCB index u (CascadeKL-UCB: Kveton, Szepesvari, Wen, Ashkan 2015, "Cascading
bandits"; regret with b > 2: docs/theory.md, theorem 6). The chain rule makes the likelihood of a
chain's outcome the product of the chances of what was observed, so counts are all there is to know.
Siblings exclude each other: for trees the product is no likelihood, but a bin's observations are
still i.i.d. where siblings have different bins (proof of theorem 6): its mean goes to the chance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from metasd_bandits import checks
from metasd_bandits.policies.kl_ucb import kl_bernoulli_upper

__all__ = ["Calibrator", "Prior", "read_prior", "save_prior"]

Prior = Mapping[str, tuple[float, float]]
"""Bins by name, each with a mean in [0, 1] and a strength (as many observations as it is worth)."""


class Calibrator:
    """Conditional chances by bin.

    Parameters
    ----------
    bins : sequence of str
        Their names, all different; a bin's place is its key.
    prior : mapping of str to (mean, strength), optional
        For bins that it names (`read_prior`); bins it does not know get `mean` and `strength`.
    mean, strength : float, default 0.5 and 2.0
        The prior of all other bins: in [0, 1], and at least 0.
    discount : float, default 1.0
        What a round's evidence still counts for a round later, in (0, 1].
    bonus : float, default 0.0
        b, at least 0: 0 trusts the mean, larger values are more optimistic where evidence is thin.

    Examples
    --------
    >>> calibrator = Calibrator(["lookup/short", "lookup/long"])
    >>> for _ in range(8):
    ...     calibrator.observe([0, 1, 1], [False, True, True])
    >>> calibrator.chance([0, 1]).round(3).tolist()
    [0.1, 0.944]
    """

    def __init__(
        self,
        bins: Sequence[str],
        *,
        prior: Prior | None = None,
        mean: float = 0.5,
        strength: float = 2.0,
        discount: float = 1.0,
        bonus: float = 0.0,
    ) -> None:
        self.bins = tuple(bins)
        if len(set(self.bins)) < len(self.bins) or not self.bins:
            raise checks.ConfigError(f"bins={list(bins)!r} must be different names, at least one")
        checks.number("mean", mean, 0.0, 1.0)
        checks.number("strength", strength, 0.0)
        self.discount = checks.number("discount", discount, 0.0, 1.0, open_low=True)
        self.bonus = checks.number("bonus", bonus, 0.0)
        known = checked_prior(prior or {}, "prior")
        pairs = np.array([known.get(name, (mean, strength)) for name in self.bins])
        self._mean, self._strength = pairs[:, 0], pairs[:, 1]
        self._seen, self._stood = np.zeros(len(self.bins)), np.zeros(len(self.bins))
        self._rounds = 0.0

    def chance(self, keys: ArrayLike) -> NDArray[np.float64]:
        """The chance of each bin, in [0, 1], shaped like `keys` (ints in [0, number of bins))."""
        k = self._keys(keys)
        mean, count = self._posterior()
        mean, count = mean[k], count[k]
        if self.bonus == 0.0:
            return mean
        budget = self.bonus * math.log(max(self._rounds, 1.0))
        upper = [
            kl_bernoulli_upper(p, budget / n) if n > 0.0 else 1.0
            for p, n in zip(mean.ravel().tolist(), count.ravel().tolist(), strict=True)
        ]
        return np.array(upper).reshape(mean.shape)

    def observe(self, keys: ArrayLike, stood: ArrayLike) -> None:
        """Learn one round's outcomes; what was known before fades by `discount`.

        Parameters
        ----------
        keys : (n,) int array
            The bin of each node whose parent stood; n may be 0.
        stood : (n,) bool array
            Whether the node stood.
        """
        k, x = self._keys(keys), np.asarray(stood, dtype=float)
        if k.shape != x.shape or not ((x == 0.0) | (x == 1.0)).all():
            raise checks.ConfigError(
                f"stood={stood!r} must say true or false for each of the {k.size} keys"
            )
        if self.discount < 1.0:
            self.forget(self.discount)
        self._rounds += 1.0
        np.add.at(self._seen, k, 1.0)
        np.add.at(self._stood, k, x)

    def forget(self, keep: float) -> None:
        """Let all evidence count for `keep` of what it did, in [0, 1]; 0 leaves the prior."""
        checks.number("keep", keep, 0.0, 1.0)
        self._seen *= keep
        self._stood *= keep
        self._rounds *= keep

    def prior(self, strongest: float = 50.0) -> dict[str, tuple[float, float]]:
        """What is known now as a prior for later: means, and strengths of at most `strongest`."""
        checks.number("strongest", strongest, 0.0)
        mean, count = self._posterior()
        worth = np.minimum(count, strongest)
        return dict(zip(self.bins, zip(mean.tolist(), worth.tolist(), strict=True), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The evidence, as JSON holds it; hyperparameters and prior are the constructor's."""
        return {
            "bins": list(self.bins),
            "seen": self._seen.tolist(),
            "stood": self._stood.tolist(),
            "rounds": self._rounds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave; it must be of the same bins."""
        if list(state.get("bins", ())) != list(self.bins):
            raise ValueError(f"this state has the bins {state.get('bins')}, not {list(self.bins)}")
        self._seen = np.array(state["seen"], dtype=float)
        self._stood = np.array(state["stood"], dtype=float)
        self._rounds = float(state["rounds"])

    def _posterior(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and weight of each bin; as a shift, so that the prior stays exact."""
        count = self._strength + self._seen
        shift = np.zeros_like(count)
        np.divide(self._stood - self._seen * self._mean, count, out=shift, where=count > 0.0)
        return np.clip(self._mean + shift, 0.0, 1.0), count

    def _keys(self, keys: ArrayLike) -> NDArray[np.int64]:
        k = np.asarray(keys)
        if k.size == 0:
            return k.astype(np.int64)
        if k.dtype.kind not in "iu" or k.min() < 0 or k.max() >= len(self.bins):
            raise checks.ConfigError(
                f"keys={keys!r} must be integers in [0, {len(self.bins) - 1}], the places of bins"
            )
        return k


def checked_prior(values: Any, where: str) -> dict[str, tuple[float, float]]:
    """A prior with every mean in [0, 1] and every strength at least 0, or `ConfigError`."""
    if not isinstance(values, Mapping):
        raise checks.ConfigError(f"{where} is no mapping of bins to [mean, strength]")
    known = {}
    for name, pair in values.items():
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise checks.ConfigError(f"{where}: {name}={pair!r} must be [mean, strength]")
        known[str(name)] = (
            checks.number(f"{where}: mean of {name}", pair[0], 0.0, 1.0),
            checks.number(f"{where}: strength of {name}", pair[1], 0.0),
        )
    return known


def read_prior(path: str | Path) -> dict[str, tuple[float, float]]:
    """A prior from JSON, ``{"bin": [mean, strength], ...}``.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If the file holds none, or a value is out of range.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise checks.ConfigError(f"{path} is not JSON: {error}") from None
    return checked_prior(values, str(path))


def save_prior(prior: Prior, path: str | Path) -> None:
    """Write a prior (`Calibrator.prior`) as JSON, a bin a line."""
    lines = [f"{json.dumps(name)}: {json.dumps(list(pair))}" for name, pair in prior.items()]
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
