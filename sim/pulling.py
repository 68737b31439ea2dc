"""A plain bandit run to a horizon, as one compiled loop. A template, as `sim.decoding` is."""

import numpy as np

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.lean import lean
from metasd_bandits.compiled.state import put, view
from sim.acceptance.base import Place
from sim.defaults import pay, place, select, update  # bound by specialise


@kernel
def pull(s, T, model, table, streams, pulls, marks, at_marks):
    """T rounds: pick an arm, get paid, learn. Returns the sum of rewards."""
    policy_stream, world_stream = streams
    here, total, mark = Place(0, 0, 0, 0.0), 0.0, 0
    for t in range(T):
        here = place(table, t, t, here, world_stream)
        arm = select(s, policy_stream)
        reward = pay(model, arm, here, world_stream)
        update(s, arm, reward, 1.0, np.nan)
        total += reward
        pulls[here.domain, arm] += 1.0 - here.weight
        if here.weight > 0.0:
            pulls[here.to, arm] += here.weight
        if mark < marks.size and t + 1 == marks[mark]:
            at_marks[mark, 0] = total
            for i in range(pulls.shape[1]):
                at_marks[mark, 1 + i] = 0.0
                for d in range(pulls.shape[0]):
                    at_marks[mark, 1 + i] += pulls[d, i]
            mark += 1
    return total


@lean(cache=True, nogil=True)
def run(count, fresh, buffer, world, rows):
    """`count` runs, each with rows of its own; the state of each in turn is in `buffer`."""
    model, table, T, marks = world
    policy_streams, world_streams, totals, pulls, curves = rows
    s = view(buffer)
    for r in range(count):
        put(buffer, fresh)
        streams = policy_streams[r], world_streams[r]
        totals[r] = pull(s, T, model, table, streams, pulls[r], marks, curves[r])
