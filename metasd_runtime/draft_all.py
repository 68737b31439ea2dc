"""DraftAll, the static ensemble: every drafter drafts in every round, and the target verifies all.

The baseline without a bandit (MetaSD, appendix; 0.35 to 0.54 of plain decoding's speed there).
Each block is verified in a forward of its own. Greedy: the longest accepted block wins, the first
of equals. Sampling (recursive rejection, as in SpecInfer, Miao et al. 2023): the drafts that agree
with what was accepted so far are candidates for the next token, tried in turn, each against what
is left of the target's distribution after those before it were rejected. Their tokens are drawn
independently of each other, so each trial leaves exactly the target's law
(tests/runtime/test_draft_all.py sums over every draft and coin).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from metasd_bandits import Decision, Round
from metasd_runtime.commit import commit
from metasd_runtime.decoder import Query, prefill
from metasd_runtime.draft import Draft, draft_block, drawn_block
from metasd_runtime.randomness import Purpose
from metasd_runtime.reward import Timing, score
from metasd_runtime.router import Router
from metasd_runtime.sampling import Sampling, draw
from metasd_runtime.target import Forward, Target
from metasd_runtime.verify import Verdict, greedy, residual

__all__ = ["Block", "decode_all", "ensemble_sampling", "longest"]

_ENSEMBLE = 2  # these lanes of random numbers; shadow drafting has others


@dataclass
class Block:
    """One arm's draft and what the target says of it.

    Attributes
    ----------
    arm : int
    draft : Draft
    lane : Sampling
        Random numbers of the arm's own: its tokens must not depend on the others'.
    scores : (n + 1, vocabulary)
        The target's processed scores at each position.
    forward : Forward
    stored : list of tensor pairs
        What the target's cache held of the block.
    """

    arm: int
    draft: Draft
    lane: Sampling
    scores: Tensor
    forward: Forward
    stored: list[tuple[Tensor, Tensor]]


def decode_all(query: Query, target: Target, router: Router) -> Iterator[tuple[Round, list[int]]]:
    """Decode a query with all drafters at once; yields as `metasd_runtime.decoder.decode` does.

    A round's record names the arm whose block stood longest, with the seconds of all; its
    propensity is NaN, since nothing was chosen.
    """
    tokens, sampling, stopping = query.tokens, query.sampling, query.stopping
    prefill(query, target, router)
    for index in count():
        n = min(router.draft_length, stopping.room(len(tokens)) - 1)
        begin = time.perf_counter()
        drafts = _draft_all(router, tokens, n, sampling, target.vocab_size)
        drafted = time.perf_counter()
        blocks = [_seen(target, router, tokens, sampling, *draft) for draft in drafts]
        choose = ensemble_sampling if sampling.do_sample else longest
        winner, verdict = choose(blocks, len(tokens), sampling)
        target.bring_back(winner.stored)
        timing = Timing(drafted - begin, time.perf_counter() - drafted, query.plain_step)
        query.kept.see(winner.forward.logits, winner.scores)
        emitted, query.finish = commit(tokens, winner.draft, verdict, target, stopping)
        query.kept.keep(emitted)
        features = winner.forward.features
        round_ = score(
            router,
            Decision(winner.arm, math.nan),
            query.name,
            index,
            winner.draft,
            winner.scores,
            verdict,
            len(emitted),
            timing,
        )
        router.commit(tokens, None if features is None else features[: len(emitted)])
        if query.on_round is not None:
            query.on_round(round_)
        yield round_, emitted
        if query.finish is not None:
            return


def longest(blocks: Sequence[Block], position: int, sampling: Sampling) -> tuple[Block, Verdict]:
    """Greedy: the block of which most stands; every block's correction would be the same."""
    verdicts = [greedy(block.draft.tokens, block.scores) for block in blocks]
    best = max(range(len(blocks)), key=lambda i: verdicts[i].accepted)
    return blocks[best], verdicts[best]


def ensemble_sampling(
    blocks: Sequence[Block], position: int, sampling: Sampling
) -> tuple[Block, Verdict]:
    """Sampling: recursive rejection over all blocks, position by position.

    Parameters
    ----------
    blocks : sequence of Block
        Drawn independently of each other; one of them at least.
    position : int
        Place of the blocks' first token in the sequence, the key of the random numbers.
    """
    alive, accepted = list(blocks), 0
    while True:
        p = alive[0].scores[accepted].softmax(-1)
        candidates = [b for b in alive if len(b.draft.tokens) > accepted]
        for block in candidates:
            token = block.draft.tokens[accepted]
            q = None if block.draft.probs is None else block.draft.probs[accepted]
            coin = block.lane.uniform(position + accepted, Purpose.ACCEPT)
            if coin < float(p[token]) / (1.0 if q is None else float(q[token])):
                alive = [b for b in candidates if b.draft.tokens[accepted] == token]
                accepted += 1
                break
            p = residual(p, q, token)
            p = p / p.sum()
        else:
            quantile = sampling.uniform(position + accepted, Purpose.SAMPLE)
            return alive[0], Verdict(accepted, draw(p, quantile))


def _draft_all(
    router: Router, tokens: Sequence[int], n: int, sampling: Sampling, vocab_size: int
) -> list[tuple[int, Draft, Sampling]]:
    """Every usable arm's draft, or "no draft" if none drafts anything.

    What an arm had drawn before it broke stands, as in `metasd_runtime.select`.
    """
    drafts = []
    for arm, drafter in enumerate(router.drafters):
        if arm in router.disabled:
            continue
        lane = sampling.lane(_ENSEMBLE, arm)
        try:
            draft, _ = draft_block(drafter, tokens, n, lane, vocab_size)
        except Exception as error:
            router.disable(arm, error)
            draft = drawn_block(lane, n)
        drafts.append((arm, draft, lane))
    return [d for d in drafts if d[1].tokens] or [(router.fallback, Draft(), sampling)]


def _seen(
    target: Target,
    router: Router,
    tokens: Sequence[int],
    sampling: Sampling,
    arm: int,
    draft: Draft,
    lane: Sampling,
) -> Block:
    """Let the target read a block, keep what it made of it, and take it back."""
    forward = target.forward([tokens[-1], *draft.tokens], features=router.needs_features)
    scores = sampling.scores(forward.logits, tokens, draft.tokens)
    stored = target.take_back(1 + len(draft.tokens))
    return Block(arm, draft, lane, scores, forward, stored)
