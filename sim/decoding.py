"""Queries decoded with a bandit over drafters, as one compiled loop (MetaSD, Algorithm 1).

A template: `sim.simulate` binds the functions of one policy, acceptance model and schedule into
it, or runs the same text interpreted.
"""

import numpy as np

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.lean import lean
from metasd_bandits.compiled.state import put, view
from sim.acceptance.base import Place
from sim.defaults import begin, draft, place, select, update  # bound by specialise

BE, BD, PER_ROUND, PER_TIME = range(4)


@kernel
def worth(kind, accepted, efficiency, divergence, steps, N):
    """The reward that the policy is given (`metasd_bandits.rewards`)."""
    if kind == BE:
        return efficiency
    if kind == BD:
        return divergence
    if kind == PER_ROUND:
        return (accepted + 1) / (N + 1)
    rate = (accepted + 1) / (steps * (N + 1))
    return rate if rate < 1.0 else 1.0


@kernel
def decode(s, B, model, memory, table, costs, N, kind, streams, cached, totals, pulls, curve):
    """One query: pick a drafter, draft, verify, learn, until B tokens are out.

    `cached[i]` counts the tokens that drafter i has keys and values of.
    """
    policy_stream, world_stream = streams
    begin(model, memory, world_stream)
    marks, by_tokens, at_marks = curve
    none = np.int64(0)  # a plain 0 has a type of its own, and what it is passed to compiles twice
    here, last, tokens, t, mark = Place(0, 0, 0, 0.0), -1, none, none, none
    time, switches, caught_up, earned, efficiencies, divergences = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    while tokens < B:
        here = place(table, t, tokens, here, world_stream)
        arm = select(s, policy_stream)
        accepted, efficiency, divergence = draft(model, memory, arm, here, world_stream)
        steps = costs.block[arm]
        if arm != last:
            if last >= 0:
                owed = costs.prompt + tokens - cached[arm]
                steps += costs.switch[arm] + costs.catch_up[arm] * owed
                switches += 1.0
                caught_up += owed
                cached[last] = costs.prompt + tokens
            last = arm
        reward = worth(kind, accepted, efficiency, divergence, steps, N)
        update(s, arm, reward, steps, np.nan)
        tokens += accepted + 1
        t += 1
        pulls[here.domain, arm] += 1.0 - here.weight
        if here.weight > 0.0:
            pulls[here.to, arm] += here.weight
        time += steps
        earned += reward
        efficiencies += efficiency
        divergences += divergence
        while mark < marks.size and (tokens if by_tokens else t) >= marks[mark]:
            note(at_marks[mark], t, tokens, time, pulls)
            mark += 1
    totals[0], totals[1], totals[2] = t, B if tokens > B else tokens, time
    totals[3], totals[4], totals[5] = switches, caught_up, earned
    totals[6], totals[7] = efficiencies, divergences


@kernel
def note(row, t, tokens, time, pulls):
    """Record the running values when a mark is reached."""
    row[0], row[1], row[2] = t, tokens, time
    for i in range(pulls.shape[1]):
        total = 0.0
        for d in range(pulls.shape[0]):
            total += pulls[d, i]
        row[3 + i] = total


@lean(cache=True, nogil=True)
def run(count, fresh, buffer, world, rows):
    """`count` queries, each with rows of its own; the state of each in turn is in `buffer`."""
    model, table, costs, N, kind, marks, by_tokens = world
    policy_streams, world_streams, lengths, cached, memories, totals, pulls, curves = rows
    s = view(buffer)
    for r in range(count):
        put(buffer, fresh)
        decode(
            s,
            lengths[r],
            model,
            memories[r],
            table,
            costs,
            N,
            kind,
            (policy_streams[r], world_streams[r]),
            cached[r],
            totals[r],
            pulls[r],
            (marks, by_tokens, curves[r]),
        )
