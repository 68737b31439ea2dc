"""Two compiled policies in one file, and two that derive from another file's."""

from dataclasses import dataclass

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import index_rule, learn_mean
from metasd_bandits.compiled.state import record
from metasd_bandits.policies.ucb import UCB


@kernel
def index(s):
    for i in range(s.score.size):
        s.score[i] = s.theta[0] - s.pulls[i] - s.pending[i]


@dataclass(frozen=True, eq=False)
class Fewest(CompiledPolicy):
    """The arm with the fewest pulls."""

    name = "fewest"
    compiled = index_rule(index, learn_mean)
    level: float = 0.0


@kernel
def index(s):
    for i in range(s.score.size):
        s.score[i] = s.mean[i] if s.pulls[i] + s.pending[i] > 0.0 else 2.0


@dataclass(frozen=True, eq=False)
class Greedy(CompiledPolicy):
    """The arm with the best mean."""

    name = "greedy"
    compiled = index_rule(index, learn_mean)


@dataclass(frozen=True, eq=False)
class WideUCB(UCB):
    """UCB with another name and default."""

    name = "wide-ucb"
    beta: float = 0.7


@kernel
def update(s, arm, reward, cost, propensity):
    record(s, arm, reward * reward)


@dataclass(frozen=True, eq=False)
class SquaredUCB(UCB):
    """UCB on squared rewards: another update, the rest inherited."""

    name = "squared-ucb"
    compiled = UCB.compiled._replace(update=update)
