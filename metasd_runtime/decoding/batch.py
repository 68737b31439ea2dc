"""The loop over many rows: a batch decoded round by round, as `decoder` decodes one query.

A round takes each row's last token and a draft behind it. (1) The policy selects a drafter, one
for all rows (homogeneous) or one for each (heterogeneous; MetaSD, Table 17), and rows of one
drafter draft together; (2) one target forward over the padded blocks verifies them all, and each
row commits its own accepted tokens and the target's next; (3) what the round was worth to each
row updates the policy. Rows come and go between rounds.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from metasd_bandits import Decision, Round, checks
from metasd_runtime.decoding.commit import commit
from metasd_runtime.decoding.drafter import Draft, Drafter, drawn_block
from metasd_runtime.decoding.judged import Judged
from metasd_runtime.decoding.loop import Query
from metasd_runtime.decoding.reward import Timing, score
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.select import Selected
from metasd_runtime.drafters.autoregressive import Ask, RowDrafter, draft_rows, rows_of
from metasd_runtime.drafters.fallback import after, passes
from metasd_runtime.model.ragged import RaggedModel, Row
from metasd_runtime.model.target import Forward, Target

__all__ = ["Batch", "BatchRow", "Mode", "RowRound"]

Mode = Literal["homogeneous", "heterogeneous"]


@dataclass(eq=False)
class BatchRow:
    """A query in its slot, with its own drafters and its own view of the policy."""

    slot: int
    query: Query
    router: Router
    rounds: int = 0

    def asks(self, arm: int) -> list[tuple[Drafter, Ask]]:
        """What the row wants of those whom an arm asks, in turn until one drafts."""
        tokens, drafter = self.query.tokens, self.router.drafters[arm]
        n = min(self.router.draft_length, self.query.stopping.room(len(tokens)) - 1)
        return [
            (base, Ask(self.slot, tokens, most, self.query.sampling))
            for base, most in drafter.asked(n)
        ]


class RowRound(NamedTuple):
    """What a round brought a row."""

    row: BatchRow
    round: Round
    emitted: list[int]


class _Drafted(NamedTuple):
    """What came of an ask, and the row's seconds for it."""

    ask: Ask
    draft: Draft | Exception
    seconds: float

    @property
    def passes(self) -> bool:
        return isinstance(self.draft, Draft) and passes(self.draft, self.ask.sampling)

    def behind(self, other: _Drafted) -> _Drafted:
        """This one, with what it cost that another had nothing to say before it."""
        draft = self.draft
        if isinstance(draft, Draft) and isinstance(other.draft, Draft):
            draft = after(other.draft, draft)
        return _Drafted(self.ask, draft, other.seconds + self.seconds)


class Batch:
    """Rows that are decoded together.

    Parameters
    ----------
    target : Target
        Its model is shared; the rows have caches of their own.
    router : Router
        The pool, the policy and the reward.
    size : int
        Most rows at a time.
    mode : {"homogeneous", "heterogeneous"}
        One drafter a round for all rows, from whose rounds one policy learns; or one for each
        row, from a policy of its own (with scope "carried": from one policy for all rows, whose
        pulls are in flight together).
    seed : int
        Of a policy that the rows share.

    Attributes
    ----------
    rows : list of BatchRow
        Those that are being decoded.
    """

    def __init__(self, target: Target, router: Router, size: int, mode: Mode, seed: int) -> None:
        self.mode = checks.choice("mode", mode, ("homogeneous", "heterogeneous"))
        self.model = RaggedModel(target.model, checks.integer("max_batch", size, 1))
        self.vocab_size = target.vocab_size
        self._bases = router.bases
        self.pool = [rows_of(base, self.model) for base in self._bases]
        shared = None
        if self.mode == "homogeneous" or router.carries:
            shared = router.share(seed)
        self._routers = [
            router.for_row([RowDrafter(rows, slot) for rows in self.pool], shared)
            for slot in range(size)
        ]
        self._lead = router.for_row(self._bases, shared)  # of what the rows share
        self._shared = shared is not None
        self._without = Decision(router.fallback, math.nan)  # not the policy's choice
        self.rows: list[BatchRow] = []
        self._plain = _PlainSteps(self.model)

    @property
    def size(self) -> int:
        """Most rows at a time."""
        return len(self._routers)

    @property
    def full(self) -> bool:
        """Whether every slot is taken."""
        return len(self.rows) == self.size

    def admit(self, query: Query) -> BatchRow:
        """Give a query a slot and read its prompt, all but the last token."""
        slot = min(set(range(self.size)) - {row.slot for row in self.rows})
        begin = time.perf_counter()
        self.model.storage.open(slot)
        features = self.model.prefill(slot, query.tokens[:-1], self._lead.needs_features)
        query.prefill_seconds = time.perf_counter() - begin
        row = BatchRow(slot, query, self._routers[slot])
        row.router.start(query.tokens, query.seed, features)
        self.rows.append(row)
        return row

    def release(self, row: BatchRow) -> None:
        """Let a row go; its slot is free."""
        self.rows.remove(row)
        self.model.storage.close(row.slot)
        for drafter in self.pool:
            drafter.finish(row.slot)

    def decode(self, queries: Iterable[Query]) -> Iterator[RowRound]:
        """Decode queries to their ends, each admitted when there is a slot for it."""
        waiting = iter(queries)
        while True:
            while not self.full and (query := next(waiting, None)) is not None:
                self.admit(query)
            if not self.rows:
                return
            yield from self.round()

    def round(self) -> list[RowRound]:
        """One round of every row; rows whose text ended are released."""
        rows = list(self.rows)
        plain = self._plain.seconds(rows) / len(rows)
        selected = self._select_and_draft()
        begin = time.perf_counter()
        blocks = [[row.query.tokens[-1], *selected[row.slot].draft.tokens] for row in rows]
        forwards = self.model.forward(
            [row.slot for row in rows],
            blocks,
            parents=[selected[row.slot].draft.parents for row in rows],
            features=self._lead.needs_features,
        )
        verified = [
            _verify(row, selected[row.slot], f) for row, f in zip(rows, forwards, strict=True)
        ]
        seconds = time.perf_counter() - begin
        ended = []
        for row, judged, share in zip(rows, verified, self._shares(blocks), strict=True):
            timing = Timing(selected[row.slot].seconds, share * seconds, plain)
            ended.append(self._commit(row, selected[row.slot], judged, timing))
        self._learn([e for e in ended if selected[e.row.slot].decision is not self._without])
        for (row, round_, emitted), f, judged in zip(ended, forwards, verified, strict=True):
            features = f.features_at(judged.verdict.rows[: len(emitted)])
            row.router.commit(row.query.tokens, features)
            if row.query.on_round is not None:
                row.query.on_round(round_)
        for row in rows:
            if row.query.finish is not None:
                self.release(row)
        return ended

    def _shares(self, blocks: Sequence[Sequence[int]]) -> list[float]:
        """Whose time a verification was: everyone's alike, where all had to take one drafter."""
        if self.mode == "homogeneous":
            return [1 / len(blocks)] * len(blocks)
        return self._plain.shares([len(block) for block in blocks])

    def _commit(
        self, row: BatchRow, selected: Selected, judged: Judged, timing: Timing
    ) -> RowRound:
        """Commit one row's tokens, and make the record of its round."""
        query, decision, draft = row.query, selected.decision, selected.draft
        cache = Row(self.model, row.slot)
        emitted, query.finish = commit(query.tokens, draft, judged.verdict, cache, judged.stop)
        query.kept.keep(emitted)
        round_ = score(
            row.router,
            decision,
            query.name,
            row.rounds,
            draft,
            judged.scores,
            judged.verdict,
            len(emitted),
            timing,
        )
        row.rounds += 1
        return RowRound(row, round_, emitted)

    def _learn(self, ended: Sequence[RowRound]) -> None:
        """A policy that the rows share learns from all of their rounds at once."""
        taught = [e for e in ended if e.row.router.teaches(e.round)]
        if not self._shared:
            for row, round_, _ in taught:
                row.router.update(round_)
            return
        self._lead.update_many([e.round for e in taught])
        share = self._lead.bandit_seconds / len(self.rows)
        self._lead.bandit_seconds = 0.0
        for row in self.rows:
            row.router.bandit_seconds += share

    def _select_and_draft(self) -> dict[int, Selected]:
        """An arm and its draft for each slot; a row whose drafter fails selects again.

        What the drafter had drawn by then stands as its draft. Ends, since each failure
        disables an arm of a row and "no draft" always delivers.
        """
        selected: dict[int, Selected] = {}
        waiting = list(self.rows)
        while waiting:
            decisions = dict(zip(waiting, self._select(waiting), strict=True))
            failed = []
            for row, (ask, draft, seconds) in self._draft(decisions).items():
                if isinstance(draft, Exception):
                    row.router.disable(decisions[row].arm, draft)
                    draft = drawn_block(ask.sampling, ask.n)
                    if not draft.tokens:
                        failed.append(row)
                        continue
                selected[row.slot] = Selected(decisions[row], draft, seconds)
            waiting = failed
        return selected

    def _draft(self, decisions: Mapping[BatchRow, Decision]) -> dict[BatchRow, _Drafted]:
        """Each row's draft by its arm; rows that ask one drafter do so together."""
        asks = {row: row.asks(decision.arm) for row, decision in decisions.items()}
        drafted: dict[BatchRow, _Drafted] = {}
        while asks:
            for base, drafter in zip(self._bases, self.pool, strict=True):
                group = {row: own.pop(0)[1] for row, own in asks.items() if own[0][0] is base}
                drafts = draft_rows(drafter, list(group.values()), self.vocab_size)
                for (row, ask), (draft, seconds) in zip(group.items(), drafts, strict=True):
                    new = _Drafted(ask, draft, seconds)
                    drafted[row] = new.behind(drafted[row]) if row in drafted else new
                    if not (asks[row] and new.passes):
                        del asks[row]
        return drafted

    def _select(self, rows: Sequence[BatchRow]) -> list[Decision]:
        if self.mode == "heterogeneous":
            return [row.router.select() for row in rows]
        if len(rows) < len(self.rows):  # a drafter failed in these alone: one arm a round
            return [self._without] * len(rows)
        first, *others = (row.router.disabled for row in rows)
        self._lead.disabled = {
            arm: reason for arm, reason in first.items() if all(arm in other for other in others)
        }
        decision = self._lead.select()
        return [self._without if decision.arm in r.router.disabled else decision for r in rows]


def _verify(row: BatchRow, selected: Selected, forward: Forward) -> Judged:
    query = row.query
    return Judged(
        selected.draft,
        forward.logits,
        query.tokens,
        query.sampling,
        query.stopping,
        query.kept,
    )


_measured: weakref.WeakKeyDictionary[object, dict[int, float]] = weakref.WeakKeyDictionary()


class _PlainSteps:
    """Seconds of a plain step over some rows: measured where there are most, and for one.

    Once for each model and size.
    """

    def __init__(self, model: RaggedModel, repeats: int = 3) -> None:
        self._model, self._repeats = model, repeats
        self._measured = _measured.setdefault(model.model, {})

    def seconds(self, rows: Sequence[BatchRow]) -> float:
        """Interpolated between the sizes that were measured; the caches stay as they are."""
        n = len(rows)
        if n > max(self._measured, default=0):
            for size in {1, n} - set(self._measured):
                self._measured[size] = self._measure(rows[:size])
        sizes = sorted(self._measured)
        return float(np.interp(n, sizes, [self._measured[size] for size in sizes]))

    def shares(self, lengths: Sequence[int]) -> list[float]:
        """Each row's share of a forward over blocks of these lengths.

        A forward costs something, and something for each token; the first is everyone's alike,
        the second theirs who sent the tokens. So a row that does not draft pays a plain step,
        whatever its neighbours do.
        """
        most = max(self._measured)
        one, many = self._measured[1], self._measured[most]
        token = max(0.0, (many - one) / (most - 1)) if most > 1 else 0.0
        fixed = max(0.0, one - token)
        costs = [fixed / len(lengths) + token * n for n in lengths]
        return [cost / sum(costs) for cost in costs]

    def _measure(self, rows: Sequence[BatchRow]) -> float:
        times = []
        for _ in range(self._repeats + 1):
            begin = time.perf_counter()
            self._model.forward([r.slot for r in rows], [[r.query.tokens[-1]] for r in rows])
            times.append(time.perf_counter() - begin)
            for row in rows:
                self._model.rollback(row.slot, 1)
            self._model.forwards -= 1
        return statistics.median(times[1:])
