"""Replayed blocks against the rounds as they would have been, and refusals by name."""

from __future__ import annotations

import numpy as np
import pytest

from metasd_bandits import ConfigError, blocks
from metasd_bandits.blocks.replay import NotIdentifiedError, replay_blocks
from metasd_bandits.round import Node

PARENTS, OWNERS = [-1, 0, 1, -1, 3, 0], [(0,), (0,), (0,), (1,), (1,), (1,)]


def policy() -> blocks.BlockUCB:
    return blocks.BlockUCB(blocks.Calibrator("abcdef", mean=0.6))


def place(node: Node) -> int:
    """Here each node is a bin of its own, and its token is its place."""
    return node.token


def simulated(verified: int, rounds: int = 200) -> tuple[list[list[Node]], list[list[bool]]]:
    """Rounds of which `BlockUCB` verified so many nodes, and the whole truth."""
    rng, learner = np.random.default_rng(1), policy()
    candidates = blocks.Candidates(PARENTS, OWNERS, list(range(6)))
    log, truth = [], []
    for _ in range(rounds):
        u = rng.random(4)
        first, deep = u[0] < 0.6, u[1] < 0.5
        second, third = not first and u[0] < 0.9, not deep and u[2] < 0.5
        stands = [first, first and deep, first and deep and u[3] < 0.7]
        stands += [second, second and u[1] < 0.4, first and third]
        stands = [bool(x) for x in stands]
        kept = learner.select(candidates, verified)
        shown = [x if i in kept else None for i, x in enumerate(stands)]
        learner.update(candidates, kept, shown)
        log.append([Node(i, PARENTS[i], OWNERS[i], 0.5, shown[i]) for i in range(len(PARENTS))])
        truth.append(stands)
    return log, truth


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 6])
def test_with_everything_verified_any_budget_brings_what_it_would_have(budget: int) -> None:
    log, truth = simulated(6)
    learner, expected = policy(), []
    candidates = blocks.Candidates(PARENTS, OWNERS, list(range(6)))
    for stands in truth:
        kept = learner.select(candidates, budget)
        learner.update(candidates, kept, [x if i in kept else None for i, x in enumerate(stands)])
        expected.append(1 + sum(stands[i] for i in kept))
    assert replay_blocks(log, policy(), budget, place) == expected


def test_the_recorded_budget_replays_as_recorded_and_a_larger_one_is_refused_by_name() -> None:
    log, _ = simulated(3)
    recorded = [1 + sum(bool(node.stood) for node in nodes) for nodes in log]
    assert replay_blocks(log, policy(), 3, place) == recorded
    with pytest.raises(NotIdentifiedError, match=r"round \d+: node \d, proposed by \[\d\]"):
        replay_blocks(log, policy(), 6, place)


def test_behind_a_node_that_fell_nothing_need_be_verified() -> None:
    nodes = [Node(0, -1, (0,), 0.5, False), Node(1, 0, (0,), 0.5, None)]
    assert replay_blocks([nodes], policy(), 2) == [1]
    unknown = [Node(0, -1, (0,), 0.5, True), Node(1, 0, (0,), 0.5, None)]
    with pytest.raises(NotIdentifiedError, match="node 1"):
        replay_blocks([unknown], policy(), 2)


def test_rounds_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="node 1 stood but its parent, node 0, fell"):
        replay_blocks([[Node(0, -1, (0,), 0.5, False), Node(1, 0, (0,), 0.5, True)]], policy(), 1)
    with pytest.raises(ConfigError, match="node 0 has parent 0"):
        replay_blocks([[Node(0, 0, (0,), 0.5, True)]], policy(), 1)
