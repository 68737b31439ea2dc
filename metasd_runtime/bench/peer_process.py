"""Two other packages at the same work, in an environment of their own: `peers` starts this.

A line in, ``{"engine": ..., "rows": [[ids], ...], "new": n, "ends": [ids]}``; a line out,
``{"seconds": ..., "tokens": [[ids], ...]}`` or ``{"refused": why}``. Needs economize or flashspec
beside torch and transformers; nothing of this package is imported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Rows = list[list[int]]
Run = Callable[[Rows, int, list[int]], Rows]  # prompts, most tokens, ends: the emitted tokens


def economize_lookup(model: Any, device: str) -> Run:
    """economize 0.3: prompt lookup, batched and ragged."""
    import economize
    import torch
    from economize.techniques.lookup import LookupConfig

    fast = economize.apply(model, LookupConfig(), decoding=economize.DecodeConfig(cycle_length=6))

    def run(rows: Rows, new: int, ends: list[int]) -> Rows:
        prompts = [torch.tensor(row, device=device) for row in rows]
        return [result.tokens.tolist() for result in fast.decode_batch(prompts, new, stop=ends)]

    return run


def flashspec_lookup(model: Any, device: str) -> Run:
    """flashspec 0.3: prompt lookup, one prompt a call (its batches must not be padded)."""
    import flashspec
    import torch
    from flashspec.engine.ngram import NgramDrafter
    from flashspec.engine.verifier import TargetModel

    place = torch.device(device)
    engine = flashspec.SpeculativeEngine(
        flashspec.FlashSpecConfig(
            device=device,
            dtype=str(model.dtype).removeprefix("torch."),
            drafter_strategy="bandit",
            bandit=flashspec.BanditConfig(n_arms=1),
            sampling=flashspec.SamplingConfig(variant="greedy", temperature=0.0, gamma=5),
        ),
        [NgramDrafter()],
        TargetModel("target", place, model.dtype, model=model),
    )

    def run(rows: Rows, new: int, ends: list[int]) -> Rows:
        if len(rows) > 1:
            raise ValueError("its prompt lookup takes one prompt at a time")
        ids = torch.tensor(rows, device=device)
        result = engine.generate(ids, max_new_tokens=new, eos_token_ids=ends)
        tokens = result.output_ids[0].tolist()
        emitted = tokens[len(rows[0]) :] if len(tokens) > new else tokens  # no prompt
        return [[token for token in emitted if token >= 0]]  # an early end is filled up with -1

    return run


ENGINES = {"economize": economize_lookup, "flashspec": flashspec_lookup}


def serve(path: str, dtype: str, device: str) -> None:
    """Answer lines until there are none."""
    import torch
    from transformers import AutoModelForCausalLM

    runs: dict[str, Run] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked["engine"]
        try:
            if name not in runs:  # a model each: they may change what they are given
                model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
                model.generation_config.eos_token_id = None
                runs[name] = ENGINES[name](model.to(device).eval(), device)
            begin = time.perf_counter()
            tokens = runs[name](asked["rows"], asked["new"], asked["ends"])
            answer: dict[str, Any] = {"seconds": time.perf_counter() - begin, "tokens": tokens}
        except Exception as error:
            answer = {"refused": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    sys.stdout = sys.stderr  # the answers alone go out there
    serve(*sys.argv[1:])
