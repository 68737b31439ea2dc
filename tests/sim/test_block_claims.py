"""Every line on blocks holds, and fails for a mutant of what it is about."""

from __future__ import annotations

from metasd_bandits import blocks
from sim.studies import block_claims
from sim.studies.blocks import Merger


class Worst(blocks.BlockUCB):
    """Takes the least likely nodes."""

    def select(self, candidates: blocks.Candidates, budget: int) -> list[int]:
        chances = 1.0 - self.calibrator.chance(candidates.keys)
        return blocks.allocate(candidates.parents, chances.tolist(), budget)


class Careless(Merger):
    """Takes a node whose parent fell for an observation of its chance."""

    def _learn(self, candidates, kept, right, parts):
        self.known.observe([candidates.keys[i] for i in kept], [right[i] for i in kept])


def test_all_lines_hold() -> None:
    assert [line.verdict for line in block_claims.block_lines()] == ["holds"] * 3


def test_an_allocation_in_order_of_depth_fails() -> None:
    line = block_claims.allocation(lambda parents, chances, m: list(range(m)))
    assert line.verdict == "fails"


def test_an_allocation_that_leaves_parents_out_fails() -> None:
    def careless(parents, chances, m):
        return sorted(range(len(chances)), key=chances.__getitem__, reverse=True)[:m]

    assert block_claims.allocation(careless).verdict == "fails"


def test_a_policy_that_takes_the_worst_nodes_fails() -> None:
    def worst() -> blocks.SetPolicy:
        return Worst(blocks.Calibrator("ab", strength=0.0, bonus=3.0))

    assert block_claims.regret(worst, runs=2).verdict == "fails"


def test_counting_what_stood_on_nothing_fails() -> None:
    assert block_claims.calibrated(Careless).verdict == "fails"
