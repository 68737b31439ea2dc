"""Queries decoded with a bandit over drafters, as one compiled loop (MetaSD, Algorithm 1).

A template: `sim.simulate` binds one policy's and one acceptance model's functions into it, or
runs the same text interpreted.
"""

import numpy as np
from numba import njit

from metasd_bandits.lean import lean
from metasd_bandits.state import put, view
from sim.acceptance.base import Place
from sim.defaults import begin, draft, select, update  # bound by specialise
from sim.schedules import place

BE, BD, PER_ROUND, PER_TIME = range(4)
ROUNDS, TOKENS, STEPS, SWITCHES, OWED, REWARD, BE_SUM, BD_SUM = range(8)


@lean(cache=True)
def worth(kind, accepted, efficiency, divergence, steps, N):
    """The reward that the policy is given (`metasd_bandits.rewards`)."""
    if kind == BE:
        return efficiency
    if kind == BD:
        return divergence
    if kind == PER_ROUND:
        return (accepted + 1) / (N + 1)
    return min(1.0, (accepted + 1) / (steps * (N + 1)))


@lean(cache=True)
def decode(s, B, model, memory, timetable, costs, N, kind, streams, cached, totals, pulls, curve):
    """One query: pick a drafter, draft, verify, learn, until B tokens are out.

    `cached[i]` counts the tokens that drafter i has keys and values of.
    """
    policy_stream, world_stream = streams
    begin(model, memory, world_stream)
    marks, by_tokens, at_marks = curve
    none = np.int64(0)  # a plain 0 has a type of its own, and what it is passed to compiles twice
    here, last, tokens, t, mark = Place(0, 0, 0, 0.0), -1, none, none, none
    while tokens < B:
        here = place(timetable, t, tokens, here, world_stream)
        arm = select(s, policy_stream)
        accepted, efficiency, divergence = draft(model, memory, arm, here, world_stream)
        steps = costs.block[arm]
        if arm != last:
            if last >= 0:
                owed = costs.prompt + tokens - cached[arm]
                steps += costs.switch[arm] + costs.catch_up[arm] * owed
                totals[SWITCHES] += 1.0
                totals[OWED] += owed
                cached[last] = costs.prompt + tokens
            last = arm
        reward = worth(kind, accepted, efficiency, divergence, steps, N)
        update(s, arm, reward, steps, np.nan)
        tokens += accepted + 1
        t += 1
        pulls[here.domain, arm] += 1.0 - here.weight
        if here.weight > 0.0:
            pulls[here.to, arm] += here.weight
        totals[STEPS] += steps
        totals[REWARD] += reward
        totals[BE_SUM] += efficiency
        totals[BD_SUM] += divergence
        while mark < marks.size and (tokens if by_tokens else t) >= marks[mark]:
            note(at_marks, mark, t, tokens, totals[STEPS], pulls)
            mark += 1
    totals[ROUNDS], totals[TOKENS] = t, min(tokens, B)


@lean(cache=True)
def note(at_marks, mark, t, tokens, steps, pulls):
    """Record the running values when a mark is reached."""
    at_marks[mark, 0], at_marks[mark, 1], at_marks[mark, 2] = t, tokens, steps
    for i in range(pulls.shape[1]):
        at_marks[mark, 3 + i] = 0.0
        for d in range(pulls.shape[0]):
            at_marks[mark, 3 + i] += pulls[d, i]


@njit(cache=True, nogil=True)
def run(first, last, fresh, streams, lengths, memories, world, marks, totals, pulls, curves):
    """Replications first..last-1; each has its own streams, state and rows of the results.

    What a round writes is copied out of the shared arrays first: rows of neighbouring replications
    share cache lines, and threads that write to one line take turns at it.
    """
    model, timetable, costs, N, kind = world
    at, by_tokens = marks
    for r in range(first, last):
        s, cached = view(fresh.copy()), np.zeros(pulls.shape[2])
        streams_r = streams[0][r].copy(), streams[1][r].copy()
        curve = at, by_tokens, curves[r]
        memory, B = memories[r].copy(), lengths[r]
        total, pulled = totals[r].copy(), pulls[r].copy()
        decode(
            s,
            B,
            model,
            memory,
            timetable,
            costs,
            N,
            kind,
            streams_r,
            cached,
            total,
            pulled,
            curve,
        )
        put(totals[r], total)
        put(memories[r], memory)
        for d in range(pulls.shape[1]):
            put(pulls[r, d], pulled[d])
