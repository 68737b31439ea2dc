"""A suite over a tiny model: every kind of method, nothing that depends on the clock."""

from __future__ import annotations

from pathlib import Path

from metasd_runtime.bench.methods import contenders
from metasd_runtime.bench.run import Step, run
from metasd_runtime.bench.suite import Suite, read_suite
from metasd_runtime.bench.tasks import load_items
from metasd_runtime.models import load_target

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


def measure(model: Path, path: Path, output: Path, stop_at: int | None = None) -> Suite:
    """Run the suite at `path`; as if killed before its `stop_at`-th answer."""

    def interrupt(step: Step) -> None:
        if step.done == stop_at:
            raise KeyboardInterrupt

    suite = read_suite(path, target=str(model))
    loaded = load_target(model, dtype=suite.dtype)
    everybody = contenders(suite, loaded, [path.parent])
    run(suite, loaded, load_items(suite, [path.parent]), everybody, output, interrupt)
    return suite
