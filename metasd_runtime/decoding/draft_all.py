"""DraftAll, the static ensemble: every drafter drafts in every round, and the target verifies all.

The baseline without a bandit (MetaSD, appendix; 0.35 to 0.54 of plain decoding's speed there).
The drafts stand side by side as one tree, which one forward verifies as any other
(`metasd_runtime.decoding.verify`): greedy, the longest accepted draft wins, the first of equals;
under sampling, the drafts that agree with what was accepted so far are tried in turn (as in
SpecInfer, Miao et al. 2023). Their tokens are drawn independently of each other, so each trial
leaves exactly the target's law (tests/runtime/test_draft_all.py sums over every draft and coin).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from metasd_bandits import Decision
from metasd_runtime.decoding.drafter import Draft, draft_block, drawn_block
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.select import Selected

__all__ = ["draft_all", "side_by_side"]

_ENSEMBLE = 2  # these lanes of random numbers; shadow drafting has others


def draft_all(
    router: Router, tokens: Sequence[int], n: int, sampling: Sampling, vocab_size: int
) -> Selected:
    """Let every usable arm draft; its propensity is NaN, since nothing was chosen.

    Each has random numbers of its own: its tokens must not depend on the others'. What an arm had
    drawn before it broke stands, as in `metasd_runtime.decoding.select`.
    """
    drafts, owners, seconds = [], list[int](), 0.0
    for arm, drafter in enumerate(router.drafters):
        if arm in router.disabled:
            continue
        lane = sampling.lane(_ENSEMBLE, arm)
        try:
            draft, took = draft_block(drafter, tokens, n, lane, vocab_size)
            seconds += took
        except Exception as error:
            router.disable(arm, error)
            draft = drawn_block(lane, n)
        drafts.append(draft)
        owners += [arm] * len(draft.tokens)
    first = owners[0] if owners else router.fallback
    return Selected(Decision(first, math.nan), side_by_side(drafts, vocab_size), seconds, owners)


def side_by_side(drafts: Sequence[Draft], vocab_size: int) -> Draft:
    """Drafts as the branches of one tree, in their order."""
    tokens, parents = list[int](), list[int]()
    for draft in drafts:
        parents += [-1 if parent < 0 else len(tokens) + parent for parent in draft.lineage]
        tokens += draft.tokens
    probs = None
    drawn = [draft.probs for draft in drafts if draft.tokens and draft.probs is not None]
    if drawn:
        rows = [_rows(draft, vocab_size) for draft in drafts if draft.tokens]
        probs = torch.cat([each.to(drawn[0].device) for each in rows])
    owed = sum(draft.owed for draft in drafts)
    return Draft(tokens, probs, owed, sum(draft.switch_seconds for draft in drafts), parents)


def _rows(draft: Draft, vocab_size: int) -> Tensor:
    """What its tokens were drawn from, told of deterministic ones as well."""
    if draft.probs is not None:
        return draft.probs
    return torch.nn.functional.one_hot(torch.tensor(draft.tokens), vocab_size).float()
