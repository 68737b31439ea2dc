"""One call of generate, settled and under way: its rows, its clock, its streamer, its trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from metasd_bandits import Round, Trace, TraceHeader, TraceWriter, checks
from metasd_runtime.decoding.batch import Batch
from metasd_runtime.decoding.loop import Query, decode
from metasd_runtime.decoding.router import Router
from metasd_runtime.generation.output import Interrupted, Output, pad_rows, stack_scores
from metasd_runtime.generation.statistics import Statistics
from metasd_runtime.model.ragged import refuse_ragged
from metasd_runtime.model.target import Target

__all__ = ["Request", "let_go"]

_MOST_ROWS = 16


class Request:
    """Rows decoded, together where the model can, and what came of them.

    Parameters
    ----------
    target, router
        What decodes.
    rows : sequence of Query
    header : TraceHeader
    trace : path-like, optional
        Append every round to this file as it ends.
    streamer : optional
        Hugging Face's; takes one row.
    prompt_streamed : bool
        Whether the streamer has had the prompt already.
    pad : int
        Fills up shorter rows.
    """

    def __init__(
        self,
        target: Target,
        router: Router,
        rows: Sequence[Query],
        header: TraceHeader,
        *,
        trace: str | Path | None = None,
        streamer: Any = None,
        prompt_streamed: bool = False,
        pad: int = 0,
    ) -> None:
        self.target, self.router, self.rows, self.header = target, router, rows, header
        self.streamer, self._prompt_streamed, self._pad = streamer, prompt_streamed, pad
        self._writer = None if trace is None else TraceWriter(trace, header)
        self._rounds: list[Round] = []
        self._bandit_seconds = 0.0
        self._prompts = [len(row.tokens) for row in rows]

    def run(self) -> Output:
        """Decode the rows.

        Raises
        ------
        Interrupted
            On Ctrl-C, with the rows begun so far.
        """
        forwards = self.target.forwards
        begin = time.perf_counter()
        with self._open():
            try:
                if self._together():
                    self._decode_together()
                else:
                    for row in self.rows:
                        self._decode(row)
            except KeyboardInterrupt:
                for row, prompt in zip(self.rows, self._prompts, strict=True):
                    row.interrupt(
                        prompt, sum(r.emitted for r in self._rounds if r.query == row.name)
                    )
                begun = [row for row in self.rows if row.prefill_seconds or row is self.rows[0]]
                output = self._output(begun, time.perf_counter() - begin, forwards)
                raise Interrupted(output) from None
        return self._output(self.rows, time.perf_counter() - begin, forwards)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Whatever happens, the trace file is closed and the streamer's reader is let go."""
        try:
            if self.streamer is not None and not self._prompt_streamed:
                self.streamer.put(torch.tensor([self.rows[0].tokens]))
            yield
        finally:
            if self._writer is not None:
                self._writer.close()
            if self.streamer is not None:
                self.streamer.end()

    def _together(self) -> bool:
        """Whether the rows can be decoded in one batch; one after another, where they cannot.

        The user's code, which the rows share, is asked about one row after another.
        """
        if len(self.rows) == 1 or any(row.alone for row in self.rows):
            return False
        try:
            refuse_ragged(self.target.model)
        except checks.ConfigError:
            return False
        return True

    def _decode_together(self) -> None:
        """Every row with its own drafter and policy, so that it is what it would be alone."""
        batch = Batch(
            self.target,
            self.router,
            min(len(self.rows), _MOST_ROWS),
            "heterogeneous",
            self.rows[0].seed,
        )
        try:
            for row, round_, _ in batch.decode(self.rows):
                self._rounds.append(round_)
                if self._writer is not None:
                    self._writer.write(round_)
                if row.query.finish is not None:
                    self._bandit_seconds += row.router.bandit_seconds
        finally:
            self.target.forwards += batch.model.forwards

    def _decode(self, row: Query) -> None:
        try:
            for round_, emitted in decode(row, self.target, self.router):
                self._rounds.append(round_)
                if self._writer is not None:
                    self._writer.write(round_)
                if self.streamer is not None:
                    for token in emitted:  # one at a time, as plain decoding would
                        self.streamer.put(torch.tensor([token]))
        finally:
            self._bandit_seconds += self.router.bandit_seconds

    def _output(self, rows: Sequence[Query], seconds: float, forwards: int) -> Output:
        statistics = Statistics.of(
            self.router.arms,
            self._rounds,
            seconds=seconds,
            prefill_seconds=sum(row.prefill_seconds for row in rows),
            bandit_seconds=self._bandit_seconds,
            target_forwards=self.target.forwards - forwards,
        )
        finishes = tuple(row.finish for row in rows if row.finish is not None)
        scores: dict[str, Any] = stack_scores([row.kept for row in rows])
        return Output(
            pad_rows([row.tokens for row in rows], self._pad, self.target.device),
            Trace(self.header, self._rounds),
            statistics,
            finishes[0],
            self._prompts[0],
            finishes,
            tuple(len(row.tokens) - n for row, n in zip(rows, self._prompts, strict=False)),
            **scores,
        )


def let_go(streamer: Any) -> None:
    """End a streamer whose call was refused, if somebody may be waiting at its other end."""
    if hasattr(streamer, "text_queue"):
        streamer.end()
