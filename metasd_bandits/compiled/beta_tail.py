r"""Beta draws that matter only above a level: exact, and nearly free where the level is far off.

To find the largest of many draws, a draw need not be known as long as it is known to lie below
another. Let f be the density of Beta(a, b) with a, b >= 1, w = a + b - 2 > 0, m = (a - 1) / w its
mode, x > m the level. As log f is concave, f lies below its tangent at x, whose area beyond x is

.. math:: q = f(x) / \lambda, \qquad \lambda = w (x - m) / (x (1 - x)) = -(\log f)'(x) .

Where q < 1, a uniform u >= q says "below"; otherwise a point of the tangent's exponential is drawn
and kept with probability f over tangent: it is then the draw itself, else the draw lay below. (The
kept points have density f beyond x; all else is the event below.)

q is not computed either, as long as u is above a bound on it. By Pinsker f(x) <= f(m) exp(-y),
y = 2 w (x - m)^2, and exp(y) >= (1 + y / 16)^16; f(m) <= (w + 1) min(1, sqrt(w / (2 pi A B))),
A = a - 1, B = b - 1, by Stirling's formula, whose error decreases, and because z log z - log
Gamma(z + 1) is convex, and zero at zero. Source: ours; tangents as envelopes of log-concave
densities are Gilks and Wild's (1992).
"""

from __future__ import annotations

import math

import numpy as np

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.stream import uniform

__all__ = ["mode_of", "odds_beyond", "peak_bound", "surely_below", "tail_weight"]

_TINY = 1e-300


@kernel
def tail_weight(a, b):
    """w = a + b - 2, or 0 where a or b is below 1, whose tails have no tangent. Arrays too."""
    return (a + b - 2.0) * (a >= 1.0) * (b >= 1.0)


@kernel
def mode_of(a, b):
    """m = (a - 1) / w where `tail_weight` is positive. Arrays too."""
    return (a - 1.0) / np.maximum(a + b - 2.0, _TINY)


@kernel
def peak_bound(a, b):
    """An upper bound on the density at the mode, where `tail_weight` is not 0. Arrays too."""
    w, room = np.maximum(a + b - 2.0, 0.0), 2.0 * math.pi * (a - 1.0) * (b - 1.0)
    return (w + 1.0) * np.sqrt(w / np.maximum(np.maximum(room, w), _TINY))


@kernel
def surely_below(u, x, rest, mode, w, peak):
    """Whether u, uniform or 1, is above a bound on q: the draw then lies below x, where u < 1.

    Where u = 1 is above it q is below 1. Never so unless x is above the mode. `rest` is 1 - x.
    """
    distance = x - mode
    beyond = w * distance
    power = 1.0 + 0.125 * beyond * distance
    power *= power
    power *= power
    power *= power
    power *= power
    return beyond > 0.0 and u * beyond * power > peak * x * rest


@kernel
def odds_beyond(stream, u, x, rest, a, b):
    """The odds of a draw of Beta(a, b) if it lies above x, else 0, where q < 1.

    Parameters
    ----------
    stream : stream
    u : float
        Uniform in [0, 1), or known to be below a bound on q and uniform there.
    x, rest : float
        The level, above the mode, and 1 - x; they must not depend on this draw.
    a, b : float
        At least 1.
    """
    A, B = a - 1.0, b - 1.0
    slope = B / rest - A / x
    density = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    density += A * math.log(x) + B * math.log(rest)
    if u * slope >= math.exp(density):
        return 0.0
    step = -math.log(1.0 - uniform(stream)) / slope
    if step >= rest:
        return 0.0
    y, left = x + step, rest - step
    bend = A * math.log(y / x) + B * math.log(left / rest) + slope * step  # log f - log tangent
    return y / left if math.log(1.0 - uniform(stream)) < bend else 0.0
