"""Every outcome of a randomised decode, with its exact probability, through the real code.

A decode asks for uniform numbers by key. `every_outcome` runs it once for each cell of the
unit cube in which all its decisions are the same: a number it looks at is handed out as the
middle of the part of [0, 1) still to be explored, and the breakpoints of each decision that
depends on it (a coin's chance, the cumulative sums of a distribution) narrow the cell. What
the cell leaves over is explored next. A number asked for twice is one coordinate, so reusing
random numbers shows up as the dependence it is.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from metasd_bandits import Policy
from metasd_runtime.decoding import sampling, verify
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.loop import Query, decode
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.stopping import Stopping
from metasd_runtime.model.target import Forward, Target

Cell = dict[Hashable, tuple[float, float]]


class Number(float):
    """A uniform number that notes in which cell the decisions taken on it stay the same."""

    key: Hashable
    cell: Cell

    def narrow(self, low: float, high: float) -> None:
        was_low, was_high = self.cell.get(self.key, (0.0, 1.0))
        self.cell[self.key] = max(low, was_low), min(high, was_high)

    def __ge__(self, chance: float) -> bool:
        answer = float(self) >= chance
        self.narrow(*((chance, 1.0) if answer else (0.0, chance)))
        return answer

    def __lt__(self, chance: float) -> bool:
        return not self >= chance


def every_outcome(run: Callable[[], Hashable]) -> dict[Hashable, float]:
    """The exact law of what `run` returns, over all the uniform numbers it asks for."""
    law: dict[Hashable, float] = defaultdict(float)
    unexplored: list[Cell] = [{}]
    with pytest.MonkeyPatch.context() as patch:
        while unexplored:
            region = unexplored.pop()
            cell: Cell = {}
            _hand_out(patch, region, cell)
            outcome = run()
            assert region.keys() <= cell.keys(), "a region must be left by the way it was entered"
            inside: Cell = {}
            for key, (low, high) in cell.items():
                region_low, region_high = region.get(key, (0.0, 1.0))
                low, high = max(low, region_low), min(high, region_high)
                for part in ((region_low, low), (high, region_high)):
                    if part[1] > part[0]:
                        unexplored.append({**region, **inside, key: part})
                inside[key] = low, high
            law[outcome] += math.prod(high - low for low, high in inside.values())
    return dict(law)


def _hand_out(patch: pytest.MonkeyPatch, region: Cell, cell: Cell) -> None:
    real = sampling.draw if not hasattr(sampling.draw, "real") else sampling.draw.real

    def uniform(*key: Hashable) -> Number:
        low, high = region.get(key, (0.0, 1.0))
        number = Number((low + high) / 2)
        number.key, number.cell = key, cell
        return number

    def draw(probs: Tensor, u: Number) -> int:
        token = real(probs, float(u))
        cumulative = [0.0, *(probs.double().cumsum(0) / probs.double().sum()).tolist()]
        low, high = cumulative[token], cumulative[token + 1] if token < len(probs) - 1 else 1.0
        if all(p == 0 for p in probs[token + 1 :].tolist()):
            high = 1.0
        for share in (1e-6, 1 - 1e-6):  # the real draw keeps to these breakpoints
            assert real(probs, low + share * (high - low)) == token
        u.narrow(low, high)
        return token

    draw.real = real
    patch.setattr(sampling, "uniform", uniform)
    patch.setattr(sampling, "draw", draw)
    patch.setattr(verify, "draw", draw)


@dataclass
class TableTarget:
    """A target whose logits are a function of the text, in float64; it checks how it is used."""

    logits: Callable[[tuple[int, ...]], list[float]]
    vocab_size: int
    max_length: int | None = None
    text: list[int] = field(default_factory=list)
    forwards: int = 0

    def reset(self) -> None:
        self.text = []

    def prefill(self, tokens: list[int], features: Sequence[int] = ()) -> None:
        self.text += tokens

    def rollback(self, n: int) -> None:
        assert 0 <= n <= len(self.text)
        del self.text[len(self.text) - n :]

    def keep(self, n: int, places: Sequence[int]) -> None:
        block = self.text[len(self.text) - n :]
        self.rollback(n)
        self.text += [block[place] for place in places]

    def forward(
        self,
        tokens: list[int],
        *,
        parents: Sequence[int] | None = None,
        keep: int = 0,
        features: Sequence[int] = (),
    ) -> Forward:
        texts = [(*self.text, tokens[0])]
        for i, token in enumerate(tokens[1:]):
            parent = i if parents is None else parents[i] + 1
            texts.append((*texts[parent], token))
        self.text += tokens
        self.forwards += 1
        rows = [self.logits(text) for text in texts]
        return Forward(torch.tensor(rows, dtype=torch.float64), None)


class ModelTarget(Target):
    """A real target that also tells its logits behind any text, as `TableTarget` does."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.known: dict[tuple[int, ...], list[float]] = {}

    def logits(self, text: tuple[int, ...]) -> list[float]:
        if text not in self.known:
            self.known[text] = self.model(torch.tensor([text])).logits[0, -1].tolist()
        return self.known[text]


def table(
    seed: int, vocab: int, scale: float = 1.5, window: int = 2
) -> Callable[[tuple[int, ...]], list[float]]:
    """Logits that depend on the last `window` tokens, fixed by the seed."""

    def logits(text: tuple[int, ...]) -> list[float]:
        generator = random.Random(f"{seed} {text[-window:]}")
        return [scale * generator.gauss(0, 1) for _ in range(vocab)]

    return logits


class TableDrafter(Drafter):
    """Draws from logits that are a function of the text."""

    def __init__(self, name: str, logits: Callable[[tuple[int, ...]], list[float]]) -> None:
        self.name, self.logits = name, logits

    def propose(self, tokens: Any, n: int, sampling: Sampling) -> Draft:
        text, rows = list(tokens), []
        for _ in range(n):
            logits = torch.tensor(self.logits(tuple(text)), dtype=torch.float64)
            token, probs = sampling.propose(logits, text)
            text.append(token)
            rows.append(probs)
            if not sampling.confident(token, probs):
                break
        return Draft(text[len(tokens) :], torch.stack(rows))


class CopyDrafter(Drafter):
    """Deterministic: a function of the text names the next token."""

    def __init__(self, name: str, follow: Callable[[tuple[int, ...]], int]) -> None:
        self.name, self.follow = name, follow

    def propose(self, tokens: Any, n: int, sampling: Sampling) -> Draft:
        text = list(tokens)
        for _ in range(n):
            text.append(self.follow(tuple(text)))
        return Draft(text[len(tokens) :])


class ByLastReward(Policy):
    """Chooses by what the last block diverged: the coupling that reused numbers would feel."""

    name = "by-last-reward"

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold

    def reset(self, n_arms: int, seed: int | None = None) -> None:
        self.n_arms, self.last = n_arms, 0.0
        self.decisions = 0

    def select(self, available: Any = None) -> int:
        self.decisions += 1
        arm = 0 if self.decisions == 1 else 1 + (self.last > self.threshold)
        usable = [i for i in range(self.n_arms) if available is None or available[i]]
        return usable[arm % len(usable)]

    def update(self, arm: int, reward: float, **kwargs: Any) -> None:
        rewards = kwargs.get("rewards")
        self.last = reward if rewards is None else float(sum(rewards) / len(rewards))


def decode_law(
    target: TableTarget | ModelTarget,
    drafters: list[Drafter],
    prompt: list[int],
    max_new_tokens: int,
    *,
    policy: Policy | None = None,
    draft_length: int = 2,
    processors: Any = None,
    eos: frozenset[int] = frozenset(),
    rounds: int | None = None,
    draft_threshold: float = 0.0,
    shadow: bool = False,
) -> dict[Hashable, float]:
    """The joint law of the tokens that the real decoder emits after `prompt` (in some rounds)."""

    def run() -> tuple[int, ...]:
        router = Router(
            drafters, policy if policy is not None else "fixed", "bd", draft_length=draft_length
        )
        stopping = Stopping(len(prompt) + max_new_tokens, None, eos)
        how = Sampling(processors, True, draft_threshold=draft_threshold)
        query = Query("0", list(prompt), how, stopping, plain_step=1.0, shadow=shadow)
        for _ in islice(decode(query, target, router), rounds):  # type: ignore[arg-type]
            pass
        return tuple(query.tokens[len(prompt) :])

    return every_outcome(run)


def own_law(
    target: TableTarget | ModelTarget,
    prompt: list[int],
    max_new_tokens: int,
    *,
    processors: Any = (),
    eos: frozenset[int] = frozenset(),
) -> dict[Hashable, float]:
    """The joint law of plain sampling from the target: a product of conditionals."""
    return continued({(): 1.0}, target, prompt, max_new_tokens, processors=processors, eos=eos)


def continued(
    law: dict[Hashable, float],
    target: TableTarget | ModelTarget,
    prompt: list[int],
    max_new_tokens: int,
    *,
    processors: Any = (),
    eos: frozenset[int] = frozenset(),
) -> dict[Hashable, float]:
    """Texts of a law, each continued to full length by plain sampling."""
    for _ in range(max_new_tokens):
        longer: dict[Hashable, float] = defaultdict(float)
        for text, weight in law.items():
            assert isinstance(text, tuple)
            if len(text) == max_new_tokens or (text and text[-1] in eos):
                longer[text] += weight
                continue
            full = (*prompt, *text)
            scores = torch.tensor([target.logits(full)], dtype=torch.float64)
            for processor in processors:
                scores = processor(torch.tensor([full]), scores)
            for token, p in enumerate(scores[0].softmax(-1).tolist()):
                if p > 0:
                    longer[(*text, token)] += weight * p
        law = longer
    return law


def deviation(law: dict[Hashable, float], truth: dict[Hashable, float]) -> float:
    """Largest difference in probability between two laws."""
    return max(abs(law.get(x, 0.0) - truth.get(x, 0.0)) for x in law.keys() | truth.keys())
