r"""Explicit token distributions: a small Markov language, run through the true accept/reject rule.

The target is a chain over V tokens, p(. | c) given the last token c; drafter i has q_i(. | c) with
a chosen total variation from it. A round draws N tokens from q_i, accepts each with probability
min(1, p/q), draws the correction from (p - q)^+ normalised, or the bonus from p; block divergence
is the mean of 1 - d_TV over all N drafted positions, also those behind the first rejection. So
acceptance is 1 - d_TV by theorem, not by assumption, the output's law is p (the transition counts
are kept, to check it), and the prefixes inside a block are the *drafter's*, as in real decoding.
Sources: Leviathan et al. (2022), Chen et al. (2023) for the rule; the chain is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.stream import uniform
from sim.acceptance.base import AcceptanceModel, rates_by_domain

__all__ = ["Language", "at_distance"]


class Parameters(NamedTuple):
    """p (V, V), q (D, K, V, V), overlap 1 - d_TV (D, K, V), zeros (V), and N."""

    p: NDArray[np.float64]
    q: NDArray[np.float64]
    overlap: NDArray[np.float64]
    nothing: NDArray[np.float64]
    N: int


@kernel
def token(p, q, u):
    """The token at u of the way through (p - q)^+, which need not sum to one; q = 0 gives p."""
    total = 0.0
    for x in range(p.size):
        total += max(p[x] - q[x], 0.0)
    last, running = 0, 0.0
    for x in range(p.size):
        if p[x] > q[x]:
            last = x  # the last token with weight takes what rounding left over
            running += p[x] - q[x]
            if u * total < running:
                break
    return last


@kernel
def begin(model, memory, stream):
    """memory: the last token, then the counts of emitted transitions (V x V)."""
    memory[:] = 0.0
    memory[0] = int(uniform(stream) * model.p.shape[0])


@kernel
def draft(model, memory, arm, place, stream):
    V, N = model.p.shape[0], model.N
    counts = memory[1:].reshape((V, V))
    q = model.q[place.domain, arm]
    context, accepted, overlap = int(memory[0]), 0, 0.0
    last, correction = context, -1
    for _ in range(N):
        overlap += model.overlap[place.domain, arm, context]
        x = token(q[context], model.nothing, uniform(stream))
        coin = uniform(stream)
        if correction < 0:
            if coin * q[context, x] < model.p[context, x]:
                counts[context, x] += 1.0
                accepted += 1
                last = x
            else:
                correction = context
        context = x
    u = uniform(stream)
    rejected = q[correction] if correction >= 0 else model.nothing
    emitted = token(model.p[last], rejected, u)
    counts[last, emitted] += 1.0
    memory[0] = emitted
    return accepted, accepted / N, overlap / N


def at_distance(
    p: NDArray[np.float64], q: NDArray[np.float64], distance: float
) -> NDArray[np.float64]:
    """A distribution at total variation `distance` from p, on the way over q to the last token.

    p must give the last token probability 0, so that every distance in [0, 1] can be reached.
    """
    reach = 0.5 * np.abs(p - q).sum()
    if distance <= reach:
        return p + (distance / reach) * (q - p) if reach > 0.0 else p.copy()
    far = np.zeros_like(p)
    far[-1] = 1.0
    low, high = 0.0, 1.0
    for _ in range(60):  # the distance grows continuously and is convex along the segment
        middle = 0.5 * (low + high)
        reached = 0.5 * np.abs(p - (1 - middle) * q - middle * far).sum()
        low, high = (middle, high) if reached < distance else (low, middle)
    return (1 - high) * q + high * far


@dataclass(frozen=True, eq=False)
class Language(AcceptanceModel):
    """A Markov target and drafters at chosen total variations from it.

    Parameters
    ----------
    distances : array_like, shape (K,) or (D, K)
        d_TV between drafter and target, in [0, 1], averaged over contexts; one row per domain.
    draft_length : int, default 5
        N, at least 1.
    vocabulary : int, default 8
        V, at least 2; the last token is one the target never says.
    unevenness : float, default 0.0
        In [0, 1]: how much d_TV differs between contexts. At 0 it is the same in all, and
        E[r_BD] = alpha; above 0 the drafter's prefixes and the target's meet different distances.
    seed : int, default 0
        Makes the distributions.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If a value is out of range, or there is no drafter.
    """

    distances: Any
    draft_length: int = 5
    vocabulary: int = 8
    unevenness: float = 0.0
    seed: int = 0
    begin = staticmethod(begin)
    draft = staticmethod(draft)

    def __post_init__(self) -> None:
        checks.integer("draft_length", self.draft_length, 1)
        checks.integer("vocabulary", self.vocabulary, 2)
        checks.number("unevenness", self.unevenness, 0.0, 1.0)
        checks.integer("seed", self.seed, 0)
        object.__setattr__(self, "distances", rates_by_domain("distances", self.distances))
        object.__setattr__(self, "n_domains", self.distances.shape[0])
        object.__setattr__(self, "n_arms", self.distances.shape[1])

    def parameters(self) -> Parameters:
        rng, V = np.random.default_rng(self.seed), self.vocabulary
        p = np.zeros((V, V))
        p[:, :-1] = rng.dirichlet(np.full(V - 1, 0.7), size=V)
        q = np.empty((*self.distances.shape, V, V))
        for d, i in np.ndindex(*self.distances.shape):
            distance = float(self.distances[d, i])
            room = min(distance, 1.0 - distance) * self.unevenness
            # symmetric over contexts, so that the plain average stays the chosen distance
            offsets = rng.permutation(np.linspace(-1.0, 1.0, V)) * room
            for c in range(V):
                q[d, i, c] = at_distance(p[c], rng.dirichlet(np.ones(V)), distance + offsets[c])
        overlap = 1.0 - 0.5 * np.abs(p - q).sum(-1)
        return Parameters(p, q, overlap, np.zeros(V), self.draft_length)

    def memory_size(self) -> int:
        return 1 + self.vocabulary**2
