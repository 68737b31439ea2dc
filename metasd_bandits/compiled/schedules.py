"""Schedules that pull survivors to a target, keep the best, and end with one arm.

Successive halving and explore-then-commit differ in their schedule alone: a list of phases, each
with the pulls every survivor must have had by its end and the number of arms it keeps.

A phase ends when the rewards are in, not when the pulls are out: with delayed feedback the best
survivor so far is played meanwhile. A masked arm is not waited for, and ranks last. Equal means
are ranked by a key that each arm draws from the policy's stream when it is first pulled, so
that what is chosen next is known (and its probability exact) before the stream moves on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.rules import index_rule
from metasd_bandits.compiled.state import State, pick_max, record, trials
from metasd_bandits.compiled.stream import uniform

__all__ = [
    "N_ROWS",
    "SCHEDULE",
    "schedule_size",
    "set_schedule",
]

OUT, KEY, N_ROWS = 0, 1, 2  # rows: 1 once eliminated; the key that ranks equal means
PHASE, PHASES, FIRST = 0, 1, 2  # memory: the phase, how many, then (target, survivors) of each


def schedule_size(n_phases: int) -> int:
    """Places of memory that a schedule takes."""
    return FIRST + 2 * n_phases


def set_schedule(s: State, phases: Sequence[tuple[int, int]]) -> None:
    """Write a schedule: for each phase, the pulls per survivor by its end and the arms it keeps."""
    s.memory[PHASES] = len(phases)
    s.memory[FIRST:] = np.array(phases, dtype=float).reshape(-1)


@kernel
def index(s):
    """In (2, 3]: below the phase's target, fewest pulls first. In [0, 1]: a survivor's mean."""
    phase = int(s.memory[PHASE])
    target = s.memory[FIRST + 2 * phase] if phase < s.memory[PHASES] else 0.0
    for i in range(s.score.size):
        n = trials(s, i)
        if s.rows[OUT, i] == 1.0:
            s.score[i] = s.mean[i] - 2.0  # only when every survivor is masked
        elif n < target:
            s.score[i] = 2.0 + 1.0 / (1.0 + n)
        else:
            s.score[i] = s.mean[i]


@kernel
def select(s, stream):
    index(s)
    arm = pick_max(s, stream)
    if s.rows[KEY, arm] == 0.0:
        s.rows[KEY, arm] = 1.0 - uniform(stream)
    return arm


@kernel
def update(s, arm, reward, cost, propensity):
    record(s, arm, reward)
    while s.memory[PHASE] < s.memory[PHASES] and _complete(s):
        _keep(s, s.memory[FIRST + 2 * int(s.memory[PHASE]) + 1])
        s.memory[PHASE] += 1.0


@kernel
def _complete(s):
    target = s.memory[FIRST + 2 * int(s.memory[PHASE])]
    for i in range(s.score.size):
        if s.rows[OUT, i] == 0.0 and s.available[i] != 0.0 and s.pulls[i] < target:
            return False
    return True


@kernel
def _keep(s, count):
    """Eliminate the worst survivor until `count` remain. O(K^2), once per phase."""
    alive = 0.0
    for i in range(s.score.size):
        alive += 1.0 - s.rows[OUT, i]
    while alive > count:
        worst = -1
        for i in range(s.score.size):
            if s.rows[OUT, i] == 0.0 and (worst < 0 or _worse(s, i, worst)):
                worst = i
        s.rows[OUT, worst] = 1.0
        alive -= 1.0


@kernel
def _worse(s, i, j):
    if s.available[i] != s.available[j]:
        return s.available[i] < s.available[j]
    if s.mean[i] != s.mean[j]:
        return s.mean[i] < s.mean[j]
    return s.rows[KEY, i] < s.rows[KEY, j]


SCHEDULE = index_rule(index, update)._replace(select=select)
