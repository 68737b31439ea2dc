"""Drafters and policies that do as they are told, and a look into caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from metasd_bandits import Policy, Round
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.loop import Query, decode
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.stopping import Stopping
from metasd_runtime.model.hf import PreallocatedLayer, cache_argument
from metasd_runtime.model.target import CachedModel, Target


class Script(Drafter):
    """Drafts what a function of (tokens, n) says."""

    def __init__(self, name: str, say: Callable[[Sequence[int], int], list[int]]) -> None:
        self.name, self.say = name, say

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        return Draft(self.say(tokens, n)[:n])


class ByTurns(Policy):
    """Pulls the arms of a list in turn, passing over those that are not available."""

    name = "by-turns"

    def __init__(self, turns: Sequence[int]) -> None:
        self.turns = list(turns)

    def reset(self, n_arms: int, seed: int | None = None) -> None:
        self.n_arms, self.decisions = n_arms, 0

    def select(self, available: Any = None) -> int:
        turn = self.turns[self.decisions % len(self.turns)]
        self.decisions += 1
        usable = [i for i in range(self.n_arms) if available is None or available[i]]
        return turn if turn in usable else usable[turn % len(usable)]

    def update(self, arm: int, reward: float, **kwargs: Any) -> None:
        pass


def greedy_text(model: Any, prompt: Sequence[int], n: int, **settings: Any) -> list[int]:
    """Prompt and output of the library's own greedy decoding."""
    ids = torch.tensor([list(prompt)])
    settings = {"eos_token_id": None, "pad_token_id": 0, **settings}
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, **settings
    )
    return output[0].tolist()


def run(
    target: Target,
    drafters: Sequence[Drafter],
    prompt: Sequence[int],
    n: int,
    *,
    policy: str | Policy = "uniform",
    reward: str = "bd",
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
    draft_length: int = 5,
    on_round: Callable[[Round], None] | None = None,
    after_round: Callable[[list[int]], None] | None = None,
) -> tuple[list[int], list[Round]]:
    """Decode once; the text, and its rounds."""
    query = Query(
        "0",
        list(prompt),
        sampling if sampling is not None else Sampling(),
        stopping if stopping is not None else Stopping(len(prompt) + n),
        plain_step=1.0,
    )
    query.on_round = on_round
    rounds = []
    for round_, _ in decode(query, target, Router(drafters, policy, reward, draft_length)):
        rounds.append(round_)
        if after_round is not None:
            after_round(query.tokens)
    return query.tokens, rounds


def fresh_cache(model: Any, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the library's own cache after one forward over all tokens."""
    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([list(tokens)]), use_cache=True, **{cache_argument(model): cache})
    return [(layer.keys, layer.values) for layer in cache.layers]


def assert_holds(
    layers: Sequence[PreallocatedLayer], fresh: Sequence[tuple[Tensor, Tensor]], n: int
) -> None:
    """The storage holds n positions, and they are those of a fresh run."""
    for layer, (keys, values) in zip(layers, fresh, strict=True):
        assert layer.length == n
        if n:
            assert layer.keys is not None
            assert layer.values is not None
            torch.testing.assert_close(layer.keys[:, :, :n], keys[:, :, :n], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                layer.values[:, :, :n], values[:, :, :n], rtol=1e-4, atol=1e-4
            )


def assert_cache_is_fresh(cached: CachedModel, tokens: Sequence[int]) -> None:
    """The model's cache is that of a fresh run on `tokens`."""
    fresh = (
        fresh_cache(cached.model, tokens)
        if tokens
        else [(torch.empty(0),) * 2] * len(cached.layers)
    )
    assert_holds(cached.layers, fresh, len(tokens))
