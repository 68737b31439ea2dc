"""The two ways a policy turns scores into a decision, and what nearly all policies share.

An *index* policy fills ``s.score`` with an index per arm and takes the largest; a *sampling*
policy fills it with probabilities and draws. Either way the policy's file holds its equation
alone, and `index_rule` or `sampling_rule` makes the compiled functions around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from metasd_bandits.compiled.kernel import Kernels, kernel
from metasd_bandits.compiled.state import (
    pick_by_probability,
    pick_max,
    record,
    share_max,
    tied_share,
)

__all__ = [
    "COUNT",
    "TOTAL",
    "anytime_rate",
    "explore",
    "importance",
    "index_rule",
    "learn_loss",
    "learn_mean",
    "learn_variance",
    "mix",
    "recent_index",
    "recent_pulls",
    "sampling_rule",
    "softmax",
    "variance",
]

_Kernel = Callable[..., Any]


def index_rule(index: _Kernel, update: _Kernel, update_all: _Kernel | None = None) -> Kernels:
    """The kernels of a policy that takes the largest index, around ``index(s)`` and its update."""

    def select(s, stream):
        index(s)
        return pick_max(s, stream)

    def probabilities(s):
        index(s)
        share_max(s)

    def propensity(s, arm):
        return tied_share(s, arm)

    rule = _compiled_for(index, select, probabilities, propensity)
    return Kernels(rule[0], rule[1], update, rule[2], update_all)


def sampling_rule(weigh: _Kernel, update: _Kernel, update_all: _Kernel | None = None) -> Kernels:
    """The kernels of a policy that draws from the scores of ``weigh(s)``, and its update."""

    def select(s, stream):
        weigh(s)
        arm = pick_by_probability(s, stream)
        s.chance[arm] = s.score[arm]
        return arm

    def probabilities(s):
        weigh(s)

    def propensity(s, arm):
        return s.score[arm]

    rule = _compiled_for(weigh, select, probabilities, propensity)
    return Kernels(rule[0], rule[1], update, rule[2], update_all)


def _compiled_for(owner: _Kernel, *functions: _Kernel) -> list[_Kernel]:
    """Compile, as functions of the owner's file: the policy's class stands there."""
    for function in functions:
        function.__module__ = owner.__module__
    return [kernel(function) for function in functions]


@kernel
def learn_mean(s, arm, reward, cost, propensity):
    """The update of a policy that remembers means and counts alone."""
    record(s, arm, reward)


@kernel
def learn_variance(s, arm, reward, cost, propensity):
    """The update of a policy that needs variances too: row 0 sums squared rewards."""
    s.rows[0, arm] += reward * reward
    record(s, arm, reward)


@kernel
def variance(s, i):
    """Variance of arm i's rewards, from the sum of squares in row 0; 0 before the first."""
    return max(s.rows[0, i] / s.pulls[i] - s.mean[i] * s.mean[i], 0.0) if s.pulls[i] > 0.0 else 0.0


@kernel
def anytime_rate(s):
    """sqrt(ln K / (K t)), t the round at hand: the learning rate that needs no horizon."""
    K = s.score.size
    return math.sqrt(math.log(K) / (K * (s.clock[0] + 1.0)))


@kernel
def importance(s, arm, propensity):
    """The probability to weight by: the one given, else that of the arm's last selection."""
    return s.chance[arm] if math.isnan(propensity) else propensity


COUNT, TOTAL = 0, 1  # rows of a policy that forgets: the pulls that still count, their rewards


@kernel
def recent_pulls(s):
    """How many pulls still count, over all arms. O(K)."""
    t = 0.0
    for i in range(s.score.size):
        t += s.rows[COUNT, i]
    return t


@kernel
def recent_index(s, beta, t):
    """MetaSD-UCB's index over the pulls that still count, t in all; untried arms first. O(K)."""
    wide = beta * math.sqrt(2.0 * math.log(max(t, 1.0)))
    for i in range(s.score.size):
        n = s.rows[COUNT, i] + s.pending[i]
        mean = s.rows[TOTAL, i] / s.rows[COUNT, i] if s.rows[COUNT, i] > 0.0 else 1.0
        s.score[i] = math.inf if n == 0.0 else mean + wide / math.sqrt(n)


@kernel
def learn_loss(s, arm, reward, cost, propensity):
    """The update of exponential weights on losses: row 0 falls by the weighted loss."""
    s.rows[0, arm] -= (1.0 - reward) / importance(s, arm, propensity)
    record(s, arm, reward)


@kernel
def softmax(s, scale):
    """Scores become exp(scale * rows[0]) over the available arms, normalised. O(K).

    The largest exponent is taken off first, so that no reward sequence overflows.
    """
    top = -math.inf
    for i in range(s.score.size):
        if s.available[i] != 0.0:
            top = max(top, scale * s.rows[0, i])
    total = 0.0
    for i in range(s.score.size):
        w = math.exp(scale * s.rows[0, i] - top) if s.available[i] != 0.0 else 0.0
        s.score[i] = w
        total += w
    for i in range(s.score.size):
        s.score[i] /= total


@kernel
def mix(s, gamma):
    """Give the uniform choice among available arms the share gamma of the probability. O(K)."""
    count = 0.0
    for i in range(s.score.size):
        count += s.available[i]
    for i in range(s.score.size):
        s.score[i] = (1.0 - gamma) * s.score[i] + gamma * s.available[i] / count


@kernel
def explore(s, epsilon):
    """Indices become probabilities: the largest, or with share epsilon any available arm.

    While an arm was never tried (infinite index), the untried ones alone are drawn. O(K).
    """
    untried = False
    for i in range(s.score.size):
        untried = untried or (s.available[i] != 0.0 and s.score[i] == math.inf)
    share_max(s)
    if not untried:
        mix(s, epsilon)
