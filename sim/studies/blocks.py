"""One block out of several drafters' tokens against choosing one drafter (``metasd-sim blocks``).

Time is counted in plain decoding steps: a forward over at most six tokens takes 1, each further
node `slope`, a drafted token its drafter's cost. All methods meet the same rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from metasd_bandits import blocks, checks
from metasd_bandits.plotting import line_styles, new_figure
from metasd_bandits.registry import make_policy
from sim.jobs import Jobs
from sim.report import Interval, Report, line_with_interval, mean_interval
from sim.several import CUTS, Drafter, Proposal, Several

__all__ = ["DRAFTERS", "METHODS", "SLOPES", "Merger", "blocks_study"]

SLOPES = (0.0, 0.0125, 0.025, 0.05, 0.1, 0.2)
FREE_NODES, CHAIN = 5, 5
_LEVELS = len(CUTS) + 1

# Two modes: the text copies what stands before it, or not. Lookup comes first, then heads.
DRAFTERS = (
    Drafter((0.88, 0.2), (0.9, 0.35), length=10, noise=0.7),
    Drafter((0.58, 0.48), (1.0, 1.0), length=CHAIN, noise=0.6, second=0.2, cost=0.03),
    Drafter((0.56, 0.51), (1.0, 1.0), length=CHAIN, noise=0.6, second=0.2, cost=0.03),
    Drafter((0.48, 0.40), (1.0, 1.0), length=CHAIN, noise=0.6, second=0.2, cost=0.03),
)
LOOKUP, HEAD = 0, 1


def forward(nodes: int, slope: float) -> float:
    """Time to verify a block of so many nodes."""
    return 1.0 + slope * max(0, nodes - FREE_NODES)


METHODS = (
    "UCB over drafters",
    "best single, hindsight",
    "lookup first, then the head",
    "merged, 5 nodes",
    "merged, 12 nodes",
    "merged, at most 12 by worth",
    "clairvoyant choice of one",
)


def blocks_study(
    *,
    slopes: Sequence[float] = SLOPES,
    rounds: int = 400,
    correlation: float = 0.5,
    policy: str = "ucb:beta=0.1",
    replications: int = 40,
    seed: int = 0,
    jobs: Jobs | None = None,
) -> Report:
    """Tokens a round and speed of each method, as the verify slope grows.

    Parameters
    ----------
    slopes : sequence of float
        Time of each node beyond the fifth, at least 0.
    rounds : int
        Of one replication; everything is learned anew in each.
    correlation : float
        Of the drafters' margins at one position, in [0, 1].
    policy : str
        The bandit that chooses one drafter a round.
    replications, seed : int
    jobs : Jobs, optional
    """
    for slope in slopes:
        checks.number("slopes", slope, 0.0)
    checks.integer("rounds", rounds, 1)
    model = Several(DRAFTERS, correlation)
    seeds = np.random.SeedSequence(seed).spawn(checks.integer("replications", replications, 1))
    tasks = [(model, tuple(slopes), rounds, policy, child) for child in seeds]
    played = np.array((jobs or Jobs()).map(replicate, tasks, "simulating"))
    tokens, time = played[..., 0], played[..., 1]  # (replications, slopes, methods)
    speed = tokens / time
    ratio = speed / speed[:, :, [METHODS.index("best single, hindsight")]]
    rows = [
        {
            "method": method,
            "tokens a round": float(tokens[:, 0, m].mean() / rounds),
            "against best single": mean_interval(ratio[:, 0, m]),
            **{f"at {slope:g}": float(speed[:, s, m].mean()) for s, slope in enumerate(slopes)},
        }
        for m, method in enumerate(METHODS)
    ]
    cells = {
        method: [mean_interval(speed[:, s, m]) for s in range(len(slopes))]
        for m, method in enumerate(METHODS)
    }
    notes = [
        f"at x: speed over plain decoding where each node beyond the fifth takes x plain steps; "
        f"means over {replications} runs of {rounds} rounds",
        f"tokens a round, and speed against the best single drafter, at {slopes[0]:g}",
        "one drafter's chain has at most 5 tokens, so those nodes do not concern it",
    ]
    title = "One block, several drafters, against choosing one"
    data = {"slopes": list(slopes), "speed": cells}
    return Report(title, rows, notes, data, draw=lambda: _draw(cells, slopes))


def replicate(
    model: Several,
    slopes: Sequence[float],
    rounds: int,
    policy: str,
    seed: np.random.SeedSequence,
) -> list[list[tuple[float, float]]]:
    """Tokens and time of each method, in the order of `METHODS`, at each slope."""
    text, choices = seed.spawn(2)
    proposals = list(model.rounds(rounds, text))
    alone = Alone(model, proposals)
    ucb = alone.one_arm(policy, int(choices.generate_state(1)[0]))
    played = []
    for slope in slopes:
        mergers = [
            Merger(model, 5, slope),
            Merger(model, 12, slope),
            Merger(model, 12, slope, weigh=True),
        ]
        merged = [_total([merger.play(p) for p in proposals]) for merger in mergers]
        played.append(
            [ucb, alone.best_single(), alone.lookup_first(), *merged, alone.clairvoyant()]
        )
    return played


def _total(played: Sequence[tuple[float, float]]) -> tuple[float, float]:
    tokens, time = np.sum(played, axis=0)
    return float(tokens), float(time)


def _draw(speed: dict[str, list[Interval]], slopes: Sequence[float]) -> Figure:
    figure, axes = new_figure(width=8.0)
    for (method, cells), line in zip(speed.items(), line_styles(len(speed)), strict=True):
        line_with_interval(axes, slopes, cells, method, line)
    axes.set(
        xlabel="time of each node beyond the fifth (plain steps)",
        ylabel="speed over plain decoding",
    )
    axes.legend(fontsize=8)
    return figure


class Alone:
    """Every drafter's chain of at most `CHAIN` tokens, verified by itself."""

    def __init__(self, model: Several, rounds: Sequence[Sequence[Proposal]]) -> None:
        self.accepted = np.array([[_chain(p) for p in proposals] for proposals in rounds])
        self.proposed = np.array([[bool(p.tokens) for p in proposals] for proposals in rounds])
        costs = np.array([d.cost * min(d.length, CHAIN) for d in model.drafters])
        self.time = 1.0 + self.proposed * costs
        self.tokens = self.accepted + 1.0

    def of(self, arms: NDArray[np.int64]) -> tuple[float, float]:
        """Tokens and time where round r takes drafter ``arms[r]``."""
        r = np.arange(len(arms))
        return float(self.tokens[r, arms].sum()), float(self.time[r, arms].sum())

    def best_single(self) -> tuple[float, float]:
        """The drafter of most tokens a step over all rounds: hindsight."""
        tokens, time = self.tokens.sum(0), self.time.sum(0)
        best = int((tokens / time).argmax())
        return float(tokens[best]), float(time[best])

    def clairvoyant(self) -> tuple[float, float]:
        """In each round the drafter that serves the ratio of sums best (Dinkelbach 1967)."""
        tokens, time = self.best_single()
        while True:
            rate = tokens / time
            tokens, time = self.of((self.tokens - rate * self.time).argmax(1))
            if tokens / time <= rate + 1e-12:
                return tokens, time

    def one_arm(self, policy: str, seed: int) -> tuple[float, float]:
        """A bandit over drafters that learns from block efficiency."""
        bandit = make_policy(policy)
        bandit.reset(self.tokens.shape[1], seed)
        arms = np.zeros(len(self.tokens), int)
        for r, (accepted, proposed) in enumerate(zip(self.accepted, self.proposed, strict=True)):
            arms[r] = bandit.select(proposed.tolist())
            bandit.update(int(arms[r]), accepted[arms[r]] / CHAIN)
        return self.of(arms)

    def lookup_first(self) -> tuple[float, float]:
        """Lookup where it proposes anything, else the head."""
        return self.of(np.where(self.proposed[:, LOOKUP], LOOKUP, HEAD))


def _chain(proposal: Proposal) -> int:
    wrong = [i for i, token in enumerate(proposal.tokens[:CHAIN]) if token != 0]
    return wrong[0] if wrong else min(len(proposal.tokens), CHAIN)


class Merger:
    """Several drafters' candidates in one block, chances and costs learned online.

    Parameters
    ----------
    model : Several
    budget : int
        Nodes of a block, at least 0.
    slope : float
        Time of each node beyond the fifth.
    uses : sequence of int
        Drafters that take part. Those without cost always propose; another is asked while its
        expected gain is worth its time.
    weigh : bool, default False
        Take only the nodes that are worth their time to verify, not always as many as fit.
    """

    def __init__(
        self,
        model: Several,
        budget: int,
        slope: float,
        uses: Sequence[int] = (LOOKUP, HEAD),
        weigh: bool = False,
    ) -> None:
        self.drafters, self.uses = model.drafters, tuple(uses)
        self.budget, self.slope, self.weigh = budget, slope, weigh
        n, depth = len(model.drafters), max(d.length for d in model.drafters)
        # bins: drafter, level, chain or second choice, proposed by one or by several
        self.known = blocks.Calibrator([f"{k}" for k in range(n * _LEVELS * 4)])
        self.typical = blocks.Calibrator([f"{k}" for k in range(n * depth)])
        self.depth = depth
        self.rate = blocks.Rate(start=1.0)

    def play(self, proposals: Sequence[Proposal]) -> tuple[float, float]:
        """Tokens and time of one round, from which everything is learned."""
        asked = [i for i in self.uses if self.drafters[i].cost == 0.0]
        candidates, right, chances = self._block([(i, proposals[i]) for i in asked])
        asked += self._worth_asking(blocks.path_chances(candidates.parents, chances), asked)
        candidates, right, chances = self._block([(i, proposals[i]) for i in asked])
        kept = blocks.allocate(candidates.parents, chances, self._width(candidates, chances))
        stands = _standing(candidates.parents, right)
        tokens = 1.0 + sum(stands[i] for i in kept)
        drafted = sum(len(proposals[i].levels) and self._cost(i) for i in asked)
        time = forward(len(kept), self.slope) + drafted
        self._learn(candidates, kept, right, [(i, proposals[i]) for i in asked])
        self.rate.observe(tokens, time)
        return tokens, time

    def _width(self, candidates: blocks.Candidates, chances: Sequence[float]) -> int:
        """Nodes worth their time at the rate reached, if asked to weigh that; else the budget."""
        if not self.weigh:
            return self.budget
        gains = sorted(blocks.path_chances(candidates.parents, chances), reverse=True)
        worth = np.cumsum([0.0, *gains[: self.budget]])
        times = [forward(n, self.slope) for n in range(len(worth))]
        return int((worth - self.rate.value * np.array(times)).argmax())

    def _cost(self, drafter: int) -> float:
        return self.drafters[drafter].cost * self.drafters[drafter].length

    def _worth_asking(self, held: Sequence[float], asked: Sequence[int]) -> list[int]:
        """Drafters at a cost, judged by what their chains brought so far at each depth."""
        others = [i for i in self.uses if i not in asked]
        offers = []
        for i in others:
            keys = [i * self.depth + d for d in range(self.drafters[i].length)]
            offers.append(np.cumprod(self.typical.chance(keys)).tolist())
        times = [self._cost(i) for i in others]
        order = blocks.whom_to_ask(held, offers, times, self.budget, self.rate.value)
        return [others[j] for j in order]

    def _block(
        self, parts: Sequence[tuple[int, Proposal]]
    ) -> tuple[blocks.Candidates, list[bool], list[float]]:
        """Candidates, whether each is the target's token, and chances."""
        merged = blocks.merge([(p.parents, p.tokens) for _, p in parts])
        keys, owners = [], []
        for proposed in merged.proposals:
            owners.append([parts[j][0] for j, _ in proposed])
            top, level, owner = max(
                (node < self.drafters[parts[j][0]].length, parts[j][1].levels[node], -parts[j][0])
                for j, node in proposed
            )
            kind = 2 * top + (len(proposed) > 1)
            keys.append((-owner * _LEVELS + level) * 4 + kind)
        chances = self.known.chance(keys).tolist() if keys else []
        candidates = blocks.Candidates(merged.parents, owners, keys)
        return candidates, [token == 0 for token in merged.tokens], chances

    def _learn(
        self,
        candidates: blocks.Candidates,
        kept: Sequence[int],
        right: Sequence[bool],
        parts: Sequence[tuple[int, Proposal]],
    ) -> None:
        """Who stands on verified ground is known, verified or not: the emitted token tells."""
        stands, verified = _standing(candidates.parents, right), set(kept)
        seen = [
            i
            for i, parent in enumerate(candidates.parents)
            if parent < 0 or (parent in verified and stands[parent])
        ]
        self.known.observe([candidates.keys[i] for i in seen], [right[i] for i in seen])
        emitted = 1 + sum(stands[i] for i in kept)
        keys, stood = [], []
        for i, proposal in parts:
            for d in range(min(_chain_depth(proposal), emitted, self.drafters[i].length)):
                keys.append(i * self.depth + d)
                stood.append(proposal.tokens[d] == 0)
        self.typical.observe(keys, stood)


def _chain_depth(proposal: Proposal) -> int:
    """How many tokens of a chain were proposed where the chain had not yet failed."""
    for i, token in enumerate(proposal.tokens):
        if token != 0:
            return i + 1
    return len(proposal.tokens)


def _standing(parents: Sequence[int], right: Sequence[bool]) -> list[bool]:
    stands: list[bool] = []
    for parent, good in zip(parents, right, strict=True):
        stands.append(good and (parent < 0 or stands[parent]))
    return stands
