"""One policy's kernels as the live decoder calls them: on the buffer, two arguments, compiled.

The wrappers borrow the arrays, and they and all they call are compiled without reference counting
(``_nrt=False``, which callees inherit): counting references to a dozen views would take longer
than the decision itself. The caller holds the arrays for as long as a call lasts, so nothing can
vanish.
"""

# ruff: noqa: I001 (joined, the imports of stand-ins would not fit the line that is replaced)

from metasd_bandits.compiled.borrow import borrow
from metasd_bandits.compiled.lean import lean

from metasd_bandits.compiled.stand_ins import probabilities, propensity  # bound by specialise
from metasd_bandits.compiled.stand_ins import select, update, update_all  # bound by specialise
from metasd_bandits.compiled.state import view


@lean(cache=True)
def select_on(buffer, stream):
    return select(view(borrow(buffer)), borrow(stream))


@lean(cache=True)
def decide_on(buffer, stream):
    s = view(borrow(buffer))
    arm = select(s, borrow(stream))
    return arm, propensity(s, arm)


@lean(cache=True)
def update_on(buffer, arm, reward, cost, chance):
    update(view(borrow(buffer)), arm, reward, cost, chance)


@lean(cache=True)
def update_many_on(buffer, arms, rewards, costs, chances):
    s = view(borrow(buffer))
    arms, rewards = borrow(arms), borrow(rewards)
    costs, chances = borrow(costs), borrow(chances)
    for t in range(arms.size):
        update(s, arms[t], rewards[t], costs[t], chances[t])


@lean(cache=True)
def update_all_on(buffer, arm, rewards, cost, chance):
    update_all(view(borrow(buffer)), arm, rewards, cost, chance)


@lean(cache=True)
def probabilities_on(buffer):
    probabilities(view(borrow(buffer)))
