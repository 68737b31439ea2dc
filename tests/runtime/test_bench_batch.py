"""bench-batch: contenders do the same work, runs are written as they end, peers may refuse."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from metasd_runtime.bench.batches import _contenders, _Runs, _turns
from metasd_runtime.bench.peers import RefusedError
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.load import LoadedModel

ROWS = [[1, 2, 3, 1, 2, 3, 1], [4, 5]]


@pytest.fixture(scope="module")
def loaded(tiny_llama, tmp_path_factory):
    model, folder = tiny_llama(0, vocab=24, layers=4), tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return LoadedModel(model, None, "tiny", folder)


@pytest.mark.parametrize("size", [1, 2])
def test_every_contender_emits_the_same_number_of_tokens(loaded, size):
    plain = MetaSD(loaded.model, drafters=["none"])
    meta = MetaSD(loaded.model, drafters=["prompt-lookup", "none"])
    contenders = _contenders(loaded, plain, meta, size, None)
    assert len(contenders) == (9 if size == 1 else 4)
    for name, contender in contenders.items():
        tokens, seconds = contender(ROWS[:size], 9)
        assert tokens == 9 * size, name
        assert seconds > 0


def test_runs_are_written_as_they_end_and_refusals_said_once():
    file, said = io.StringIO(), io.StringIO()

    def refuses(rows, n):
        raise RefusedError("not this")

    def breaks(rows, n):
        if n > 4:  # not when it is warmed up
            raise KeyboardInterrupt
        return n, 1.0

    contenders = {"works": lambda rows, n: (n, 2.0), "refuses": refuses, "breaks": breaks}
    with pytest.raises(KeyboardInterrupt):
        _turns(Console(file=said), contenders, [[1]], 8, 3, _Runs(file))
    head, run = [json.loads(line) for line in file.getvalue().splitlines()]
    assert "machine" in head
    assert run == {"batch": 1, "contender": "works", "tokens": 8, "seconds": 2.0}
    assert said.getvalue() == "refuses takes no part at batch 1: not this\n"
