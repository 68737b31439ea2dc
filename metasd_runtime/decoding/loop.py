"""The loop: one query decoded round by round, as in the paper's algorithm.

A round takes the text's last token and a draft behind it. (1) The policy selects a drafter and
it drafts n tokens, or a tree n deep; (2) one target forward over the last token and the draft
verifies it, and the accepted path plus the target's own next token are committed; (3) what the
round was worth updates the policy. Between rounds the target's cache holds every token but the
last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from metasd_bandits import Round
from metasd_runtime.decoding.commit import commit
from metasd_runtime.decoding.draft_all import draft_all
from metasd_runtime.decoding.judged import Judged
from metasd_runtime.decoding.reward import Timing, score
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.scores import Scores
from metasd_runtime.decoding.select import select_and_draft
from metasd_runtime.decoding.shadow import shadow_drafts, shadow_rounds, with_every_arm
from metasd_runtime.decoding.stopping import Finish, Stopping
from metasd_runtime.model.target import Target

__all__ = ["Query", "decode", "plain_step_seconds"]


@dataclass
class Query:
    """One prompt on its way to a text.

    Attributes
    ----------
    name : str
        Its name in the trace.
    tokens : list of int
        The prompt, then prompt and output as it grows.
    sampling, stopping
        How tokens are chosen, and when the text ends.
    seed : int
        Of the policy's stream.
    finish : Finish or None
        Why the text ended, once it has.
    prefill_seconds, plain_step : float
        Time of reading the prompt, and of one plain step (the unit of the throughput reward).
    kept : Scores
        Keeps the scores of what is emitted, where they were asked for.
    shadow : bool
        Let every other arm draft as well, to learn what each would have earned.
    draft_all : bool
        No bandit: every arm drafts in every round (`metasd_runtime.decoding.draft_all`).
    """

    name: str
    tokens: list[int]
    sampling: Sampling
    stopping: Stopping
    seed: int = 0
    finish: Finish | None = None
    prefill_seconds: float = 0.0
    plain_step: float = 0.0
    kept: Scores = field(default_factory=Scores, repr=False)
    shadow: bool = False
    draft_all: bool = False
    on_round: Callable[[Round], None] | None = field(default=None, repr=False)

    @property
    def alone(self) -> bool:
        """Whether it cannot share its rounds with other rows of its call."""
        users = self.sampling.asks_user or self.stopping.asks_user
        return self.shadow or self.draft_all or users

    def interrupt(self, prompt: int, told: int) -> None:
        """Stop behind the prompt's and the `told` emitted tokens: a round cut short counts nowhere.

        It stands neither in the trace nor in the stream, so it must not in the text.
        """
        if self.finish is None or len(self.tokens) > prompt + told:
            self.finish = Finish.INTERRUPTED
        del self.tokens[prompt + told :]
        self.kept.cut(told)


def decode(query: Query, target: Target, router: Router) -> Iterator[tuple[Round, list[int]]]:
    """Decode a query; yields each round's record and the tokens it emitted.

    The output is the target's own, whatever the drafters propose and whatever the policy learns:
    tokens are emitted only as `verify` allows.
    """
    tokens, sampling, stopping = query.tokens, query.sampling, query.stopping
    prefill(query, target, router)
    select = draft_all if query.draft_all else select_and_draft
    for index in count():
        n = min(router.draft_length, stopping.room(len(tokens)) - 1)
        selected = select(router, tokens, n, sampling, target.vocab_size)
        draft, arm = selected.draft, selected.decision.arm
        shadows = shadow_drafts(query, target, router, arm, n) if query.shadow else {}
        begin = time.perf_counter()
        forward = target.forward(
            [tokens[-1], *draft.tokens], parents=draft.parents, features=router.needs_features
        )
        judged = Judged(draft, forward.logits, tokens, sampling, stopping, query.kept)
        verdict, scores = judged.verdict, judged.scores
        timing = Timing(selected.seconds, time.perf_counter() - begin, query.plain_step)
        others = shadow_rounds(query, router, shadows, judged.known)
        emitted, query.finish = commit(tokens, draft, verdict, target, judged.stop)
        query.kept.keep(emitted)
        features = forward.features_at(verdict.rows[: len(emitted)])
        decision = selected.credited(verdict.path)
        round_ = score(
            router, decision, query.name, index, draft, scores, verdict, len(emitted), timing
        )
        if query.shadow:
            round_ = with_every_arm(round_, others, router)
        if not query.draft_all:
            router.update(round_)
        router.commit(tokens, features)
        if query.on_round is not None:
            query.on_round(round_)
        yield round_, emitted
        if query.finish is not None:
            return


def prefill(query: Query, target: Target, router: Router) -> None:
    """Read the prompt, all but its last token, and tell the drafters that a query begins."""
    begin = time.perf_counter()
    target.reset()
    features = target.prefill(query.tokens[:-1], router.needs_features)
    query.prefill_seconds = time.perf_counter() - begin
    if not query.plain_step:
        query.plain_step = plain_step_seconds(target, query.tokens[-1])
    router.start(query.tokens, query.seed, features)


def plain_step_seconds(target: Target, token: int, repeats: int = 3) -> float:
    """Median time of a one-token forward at the target's present state, which stays as it was."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        int(target.forward([token]).logits[-1].argmax())  # as in a round: waits for the device
        times.append(time.perf_counter() - begin)
        target.rollback(1)
        target.forwards -= 1
    return statistics.median(times[1:])
