"""Verification of draft trees is exact: the law summed over every draft and coin, as for chains.

Trees of one to three siblings, one or two deep: drawn without replacement, copied, both, and
EAGLE-2's, which are chosen by confidence. The mistakes at the end show that the sums can fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from enumeration import (
    ByLastReward,
    TableDrafter,
    TableTarget,
    continued,
    decode_law,
    deviation,
    every_outcome,
    own_law,
)
from test_exact_sampling import PROCESSORS, only, table
from transformers import LogitsProcessorList

from metasd_runtime.decoding import sampling as sampling_module
from metasd_runtime.decoding import verify
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.reward import block_divergence
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.eagle.tree import DynamicTree, Node

EXACT = 1e-12


class TreeDrafter(Drafter):
    """A tree with `widths[d]` children behind every node of depth d."""

    def __init__(
        self, name: str, logits: Callable[[tuple[int, ...]], list[float]], widths: Sequence[int]
    ) -> None:
        self.name, self.logits, self.widths = name, logits, widths

    def distribution(self, text: Sequence[int], sampling: Sampling) -> torch.Tensor:
        logits = torch.tensor([self.logits(tuple(text))], dtype=torch.float64)
        return sampling.distributions(logits, text, lambda j: ())[0]

    def grow(self, tokens: Any, n: int, children: Callable[..., list[Any]]) -> Draft:
        drafted, rows, parents, level = [], [], [], [-1]
        for width in self.widths[:n]:
            below = []
            for parent in level:
                path = Draft(list(drafted), parents=list(parents)).path(parent)
                text = [*tokens, *(drafted[i] for i in path)]
                for token, probs in children(text, width, parent):
                    below.append(len(drafted))
                    drafted.append(token)
                    parents.append(parent)
                    rows.append(probs)
            level = below
        drawn = rows and rows[0] is not None
        return Draft(drafted, torch.stack(rows) if drawn else None, parents=parents)


class Drawn(TreeDrafter):
    """Siblings drawn without replacement."""

    def propose(self, tokens: Any, n: int, sampling: Sampling) -> Draft:
        def children(text, width, parent):
            return sampling.draw_children(
                self.distribution(text, sampling), len(text), width, parent
            )

        return self.grow(tokens, n, children)


class Likeliest(TreeDrafter):
    """The drafter's top tokens, nothing drawn."""

    def propose(self, tokens: Any, n: int, sampling: Sampling) -> Draft:
        def children(text, width, parent):
            best = self.distribution(text, sampling).topk(width).indices.tolist()
            return [(token, None) for token in best]

        return self.grow(tokens, n, children)


class ByConfidence(Likeliest):
    """EAGLE-2's: all nodes of `widths`, of which the `nodes` surest stay."""

    nodes = 3

    def propose(self, tokens: Any, n: int, sampling: Sampling) -> Draft:
        draft = super().propose(tokens, n, sampling)
        return self.surest(draft, tokens, sampling)

    def surest(self, draft: Draft, tokens: Any, sampling: Sampling) -> Draft:
        grown: list[Node] = []
        for node, parent in enumerate(draft.lineage):
            before = draft.before(parent + 1)
            p = float(self.distribution([*tokens, *before], sampling)[draft.tokens[node]])
            above = 1.0 if parent < 0 else grown[parent].confidence
            grown.append(Node(draft.tokens[node], parent, (), above * p))
        kept = DynamicTree(self.nodes).kept(grown)
        place = {-1: -1, **{node: i for i, node in enumerate(kept)}}
        return Draft(
            [draft.tokens[i] for i in kept],
            None if draft.probs is None else draft.probs[kept],
            parents=[place[draft.lineage[i]] for i in kept],
        )


KINDS = {"drawn": Drawn, "likeliest": Likeliest, "by confidence": ByConfidence}
SHAPES = [(1, 1), (2,), (3,), (2, 1), (1, 2), (2, 2), (3, 1)]
LONG = {"drawn": {(2, 2), (3, 1)}}


@pytest.mark.parametrize(
    ("kind", "widths"),
    [
        pytest.param(kind, widths, marks=[pytest.mark.slow] if widths in LONG.get(kind, ()) else [])
        for kind in KINDS
        for widths in SHAPES
    ],
)
def test_one_tree(kind, widths):
    """One verified tree; what it emits, continued by plain sampling, follows the target."""
    n = len(widths)
    vocab = 3 if sum(widths) == 4 else 4
    target = TableTarget(table(1, vocab), vocab)
    drafter = KINDS[kind]("d", table(2, vocab), widths)
    law = decode_law(target, [drafter], [0], n + 1, draft_length=n, rounds=1)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert max(map(len, law)) == n + 1
    assert deviation(continued(law, target, [0], n + 1), own_law(target, [0], n + 1)) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["temperature", "top-p", "penalty", "temperature, top-p"])
def test_under_the_users_processors(kind, name):
    processors = LogitsProcessorList(PROCESSORS[name])
    target = TableTarget(table(8, 4), 4)
    drafter = KINDS[kind]("d", table(9, 4), (2, 1))
    law = decode_law(target, [drafter], [3, 1], 2, draft_length=2, processors=processors, rounds=1)
    law = continued(law, target, [3, 1], 3, processors=processors)
    assert deviation(law, own_law(target, [3, 1], 3, processors=processors)) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_whole_decodes_whose_policy_looks_at_the_divergence(kind):
    """Several rounds of trees and a chain; which comes next depends on what was drafted."""
    target = TableTarget(table(3, 2), 2)
    pool = [
        KINDS[kind]("first", table(13, 2), (2, 1)),
        KINDS[kind]("second", table(23, 2, scale=3.0), (1, 2)),
        TableDrafter("third", table(33, 2, scale=3.0)),
    ]
    law = decode_law(target, pool, [0, 1], 3, policy=ByLastReward(0.8), draft_length=2)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert deviation(law, own_law(target, [0, 1], 3)) < EXACT


def test_a_drafter_equal_to_the_target_is_always_believed():
    """p = q: the first sibling always stands, the others are never tried."""
    logits = table(3, 3)
    paths = set()
    real = verify.speculative

    def watch(*arguments):
        verdict = real(*arguments)
        paths.add(tuple(verdict.path))
        return verdict

    target = TableTarget(logits, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "speculative", watch)
        drafter = Drawn("same", logits, (2, 2))
        law = decode_law(target, [drafter], [0], 3, draft_length=2, rounds=1)
    assert paths == {(0, 2)}
    assert deviation(law, own_law(target, [0], 3)) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target_support", [(0,), (0, 1), (1, 2)])
@pytest.mark.parametrize("drafter_support", [(2, 3), (1, 2, 3), (0, 1, 2)])
def test_supports(kind, target_support, drafter_support):
    """Disjoint and overlapping; there may be fewer tokens than siblings asked for."""
    target = TableTarget(only(*target_support, vocab=4), 4)
    drafter = KINDS[kind]("d", only(*drafter_support, vocab=4), (3, 1))
    law = decode_law(target, [drafter], [0], 3, draft_length=2, rounds=1)
    assert deviation(continued(law, target, [0], 3), own_law(target, [0], 3)) < EXACT


class Breaks(Drawn):
    """Raises once some token was drawn in the first level."""

    def propose(self, tokens: Any, n: int, sampling: Sampling) -> Draft:
        def children(text, width, parent):
            if len(text) > len(tokens) and text[-1] == 0:
                raise RuntimeError("broke")
            return sampling.draw_children(
                self.distribution(text, sampling), len(text), width, parent
            )

        return self.grow(tokens, n, children)


@pytest.mark.filterwarnings("ignore:drafter .* is disabled:RuntimeWarning")
def test_what_a_breaking_drafter_drew_stands():
    target = TableTarget(table(14, 3), 3)
    pool = [Breaks("first", table(15, 3), (2, 1)), TableDrafter("second", table(16, 3))]
    law = decode_law(target, pool, [0], 3, draft_length=2, rounds=1)
    assert deviation(continued(law, target, [0], 3), own_law(target, [0], 3)) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_block_divergence_is_the_chance_of_acceptance(kind, width):
    """One position: its mean over all draws is the probability that some sibling stands."""
    target = TableTarget(table(5, 4), 4)
    drafter = KINDS[kind]("d", table(6, 4), (width,))

    def run():
        how = Sampling(None, True)
        how.begin_block(1)
        draft = drafter.propose([0], 1, how)
        texts = [[0, *draft.before(row)] for row in range(len(draft.tokens) + 1)]
        scores = torch.tensor([target.logits(tuple(text)) for text in texts], dtype=torch.float64)
        verdict = verify.verify(draft, scores, 1, how)
        return verdict.accepted, block_divergence(draft, scores, verdict.path)

    law = every_outcome(run)
    stands = sum(weight for (accepted, _), weight in law.items() if accepted)
    mean = sum(weight * divergence for (_, divergence), weight in law.items())
    assert stands == pytest.approx(mean, abs=EXACT)


# -- Mistakes that somebody could make -------------------------------------------------------


def one_tree_deviates(kind: type[TreeDrafter]) -> float:
    target, drafter = TableTarget(table(3, 3, 1.0), 3), kind("d", table(4, 3, 1.0), (2, 1))
    law = decode_law(target, [drafter], [0], 3, draft_length=2, rounds=1)
    return deviation(continued(law, target, [0], 3), own_law(target, [0], 3))


class DropsDrawn(ByConfidence):
    """EAGLE-2's choice among nodes that were drawn: some are dropped for what they hold."""

    def propose(self, tokens: Any, n: int, sampling: Sampling) -> Draft:
        draft = Drawn(self.name, self.logits, self.widths).propose(tokens, n, sampling)
        return self.surest(draft, tokens, sampling)


class SameRow(Drawn):
    """Tells of every sibling the distribution of the first."""

    def propose(self, tokens: Any, n: int, sampling: Sampling) -> Draft:
        draft = super().propose(tokens, n, sampling)
        first = [draft.children([parent])[0] for parent in draft.lineage]
        assert draft.probs is not None
        return Draft(draft.tokens, draft.probs[first], parents=draft.parents)


@pytest.mark.parametrize("mistake", [DropsDrawn, SameRow])
def test_mistakes_in_drafting_bend_the_law(mistake):
    assert one_tree_deviates(mistake) > 1e-3


def test_mistakes_in_verification_bend_the_law(monkeypatch):
    assert one_tree_deviates(Drawn) < EXACT

    def never_removed(draft, node, p):
        return p

    def not_normalised(draft, node, p):
        return (p - draft.probs[node]).clamp(min=1e-30)

    for mistake in (never_removed, not_normalised):
        with monkeypatch.context() as patch:
            patch.setattr(verify, "residual", mistake)
            assert one_tree_deviates(Drawn) > 1e-3, mistake


def test_one_number_for_all_siblings_bends_the_law(monkeypatch):
    def one_for_all(self, position, purpose, sibling=0):
        return sampling_module.uniform(self.seed, self.row, position, purpose)

    monkeypatch.setattr(Sampling, "uniform", one_for_all)
    assert one_tree_deviates(Drawn) > 1e-3


def test_greedy_follows_the_first_maximum():
    #      3        the target: 1, then 4 behind 1, then 0
    #   1     2
    #  5 4
    draft = Draft([3, 1, 2, 5, 4], parents=[-1, -1, -1, 1, 1])
    best = [1, 9, 4, 9, 9, 0]
    scores = torch.nn.functional.one_hot(torch.tensor(best), 10).float()
    assert verify.greedy(draft, scores) == verify.Verdict([1, 4], 0)
    assert verify.greedy(draft, scores).rows == [0, 2, 5]
    best[0] = 7
    scores = torch.nn.functional.one_hot(torch.tensor(best), 10).float()
    assert verify.greedy(draft, scores) == verify.Verdict([], 7)
    assert math.isclose(block_divergence(draft, scores.log(), []), 0.0)
