"""A suite over a tiny model: every kind of method, nothing that depends on the clock.

Other packages are played by `FakePeers`, and by `fake_python` where a process is wanted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from metasd_runtime.bench.methods import contenders
from metasd_runtime.bench.peers import Peers
from metasd_runtime.bench.run import Step, run
from metasd_runtime.bench.suite import Suite, read_suite
from metasd_runtime.bench.tasks import load_items
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.load import LoadedModel, load_target

SUITE = """
title = "Tiny"
dtype = "float32"
drafters = ["prompt-lookup", "suffix", "early-exit:2", "none"]
prompts_per_task = 3
max_new_tokens = 12
warm_up = 2

task = [
  { name = "one", prompts = "prompts.jsonl#a" },
  { name = "two", prompts = "prompts.jsonl#b" },
]

method = [
  { name = "generate", engine = "transformers" },
  { name = "lookup", engine = "transformers", prompt_lookup_num_tokens = 3 },
  { name = "assisted", engine = "transformers", assistant_early_exit = 2 },
  { name = "each", each = true },
  { name = "Rand", policy = "uniform", reward = "bd", draft_length = [2, 4] },
  { name = "UCB, carried", policy = "ucb:carry=0.5", reward = "be" },
  { name = "DraftAll", draft_all = true },
]
"""
PEERS_SUITE = """
title = "Tiny, with other packages"
dtype = "float32"
drafters = ["prompt-lookup", "none"]
prompts_per_task = 3
max_new_tokens = 12
warm_up = 2

task = [
  { name = "one", prompts = "prompts.jsonl#a" },
  { name = "two", prompts = "prompts.jsonl#b" },
]

method = [
  { name = "generate", engine = "transformers" },
  { name = "UCB", policy = "ucb" },
  { name = "economize lookup", engine = "economize" },
  { name = "flashspec lookup", engine = "flashspec" },
]
"""
PROMPTS = """
{"category": "a", "prompt": "abcabcab"}
{"category": "b", "turns": ["xyzzyxyz", "more"]}
{"category": "a", "prompt": "aabbaabb"}
{"category": "b", "turns": ["hellohello"]}
{"category": "a", "prompt": "qrsqrsqr"}
{"category": "b", "turns": ["mnmnmnmn"]}
"""


def write_suite(folder: Path, text: str = SUITE) -> Path:
    (folder / "prompts.jsonl").write_text(PROMPTS.strip(), encoding="utf-8")
    path = folder / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    return path


class FakePeers(Peers):
    """Answers as the target does, without a process; `refuses` may raise, given the prompts."""

    def __init__(
        self, loaded: LoadedModel, refuses: Callable[[str, Sequence[list[int]]], Any] | None = None
    ) -> None:
        self._plain = MetaSD(loaded.model, loaded.tokenizer, drafters=["none"])
        self._refuses = refuses or (lambda engine, rows: None)

    def __exit__(self, *error: object) -> None:
        pass

    def run(
        self, engine: str, rows: Sequence[list[int]], new: int, ends: Collection[int] = ()
    ) -> tuple[list[list[int]], float]:
        self._refuses(engine, rows)
        outputs = self._plain.generate_many(list(rows), max_new_tokens=new)
        return [output.new_tokens for output in outputs], 1.0


def fake_python(folder: Path) -> Path:
    """A Python in which economize emits token 0 alone and flashspec is not to be had."""
    script = folder / "peers.py"
    script.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        "    answer = {'tokens': [[0] * asked['new'] for _ in asked['rows']], 'seconds': 1.0}\n"
        "    refused = {'refused': 'no such module'}\n"
        "    print(json.dumps(answer if asked['engine'] == 'economize' else refused), flush=True)\n"
    )
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n")
    python.chmod(0o755)
    return python


def measure(
    model: Path,
    path: Path,
    output: Path,
    stop_at: int | None = None,
    peers: Callable[[LoadedModel], Peers] | None = None,
) -> Suite:
    """Run the suite at `path`; as if killed before its `stop_at`-th answer."""

    def interrupt(step: Step) -> None:
        if step.done == stop_at:
            raise KeyboardInterrupt

    suite = read_suite(path, target=str(model))
    loaded = load_target(model, dtype=suite.dtype)
    everybody = contenders(suite, loaded, [path.parent], peers and peers(loaded))
    run(suite, loaded, load_items(suite, [path.parent]), everybody, output, interrupt)
    return suite
