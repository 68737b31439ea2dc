r"""Normal, gamma and beta draws over the policy's own stream, for posterior sampling.

Normal: the ziggurat (Marsaglia and Tsang 2000, "The ziggurat method for generating random
variables"; one 64-bit word gives layer and abscissa from disjoint bits, after Doornik 2005).
Gamma: Marsaglia and Tsang (2000), "A simple method for generating gamma variables". Beta: a
ratio of gammas. Each takes O(1) expected time.
"""

from __future__ import annotations

import math

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.stream import uniform, word

__all__ = ["beta", "gamma", "gamma_spreads", "normal"]

_LAYERS = 256
_TAIL = 3.654152885361009  # where 256 layers of equal area close at the top; a test checks it

SQUEEZE = 0.2


def _ziggurat() -> NDArray[np.float64]:
    """Right edges of the layers, widest (the base with its tail) first, zero last."""
    density = math.exp(-0.5 * _TAIL * _TAIL)
    area = _TAIL * density + math.sqrt(math.pi / 2.0) * math.erfc(_TAIL / math.sqrt(2.0))
    edges = [area / density, _TAIL]
    while len(edges) < _LAYERS:
        density += area / edges[-1]
        edges.append(math.sqrt(-2.0 * math.log(density)))
    return np.array([*edges, 0.0])


_EDGE = _ziggurat()
_INSIDE = _EDGE[1:] / _EDGE[:-1]  # the share of a layer that lies wholly under the curve
_HEIGHT = np.exp(-0.5 * _EDGE**2)
_TO_SIGNED = 1.0 / 4503599627370496.0  # 2**-52


@kernel
def normal(stream):
    """Next standard normal draw."""
    while True:
        bits = word(stream)
        layer = int(bits & uint64(255))
        u = (bits >> uint64(11)) * _TO_SIGNED - 1.0
        x = u * _EDGE[layer]
        if abs(u) < _INSIDE[layer]:
            return x
        if layer == 0:
            return _tail(stream, u)
        low, high = _HEIGHT[layer], _HEIGHT[layer + 1]
        if low + uniform(stream) * (high - low) < math.exp(-0.5 * x * x):
            return x


@kernel
def _tail(stream, sign):
    """A normal draw beyond the widest layer (Marsaglia 1964)."""
    while True:
        x = -math.log(1.0 - uniform(stream)) / _TAIL
        y = -math.log(1.0 - uniform(stream))
        if y + y > x * x:
            return math.copysign(_TAIL + x, sign)


@kernel
def gamma_spreads(a, b):
    """What gamma draws of shapes a and b want, for callers that draw many times: 1 / sqrt(9 d).

    Roots and division take as long as the rest of the draws, so the two share the division. Works
    on arrays too, uncompiled.
    """
    root_a = np.sqrt(9.0 * (a + (a < 1.0)) - 3.0)
    root_b = np.sqrt(9.0 * (b + (b < 1.0)) - 3.0)
    both = 1.0 / (root_a * root_b)
    return both * root_b, both * root_a


@kernel
def gamma(stream, shape, spread):
    """Next gamma draw of scale 1, given its shape (positive) and the shape's `gamma_spreads`.

    The squeeze 1 - 0.2 (c x^2)^2 <= exp(h), h the logarithm of the acceptance, settles all but
    7 % / shape of the draws without a logarithm (ours: as h = -(c x^2)^2 / 12 + ..., it is tighter
    than 1 - 0.0331 x^4 by what the shape allows; a test checks it).
    """
    boost = 1.0
    if shape < 1.0:
        boost = (1.0 - uniform(stream)) ** (1.0 / shape)
        shape += 1.0
    d = shape - 1.0 / 3.0
    while True:
        x = normal(stream)
        v = 1.0 + spread * x
        if v <= 0.0:
            continue
        v = v * v * v
        u = 1.0 - uniform(stream)
        square = x * x
        bend = spread * square
        if u < 1.0 - SQUEEZE * bend * bend:
            return boost * d * v
        if math.log(u) < 0.5 * square + d * (1.0 - v + math.log(v)):
            return boost * d * v


@kernel
def beta(stream, a, b, spread_a, spread_b):
    """The next Beta(a, b) draw x and 1 - x, for a and b of at least 0.1.

    Neither is rounded to 1, so that their ratio tells draws apart near 1, where small b piles them
    up. `gamma_spreads` gives the spreads of a and b.
    """
    x, rest = gamma(stream, a, spread_a), gamma(stream, b, spread_b)
    scale = 1.0 / (x + rest)
    return scale * x, scale * rest
