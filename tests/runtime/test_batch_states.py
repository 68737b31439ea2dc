"""Random interleavings of everything that happens to a batch, each row against plain decoding."""

from __future__ import annotations

import warnings
from typing import ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from transformers import LlamaConfig, LlamaForCausalLM

from metasd_bandits import Policy
from metasd_runtime.decoding.batch import Batch
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.loop import Query
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.stopping import Stopping
from metasd_runtime.drafters.catch_up import Lazy, Streaming
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.drafters.registry import make_drafter
from metasd_runtime.model.target import Target

VOCAB, CONTEXT = 12, 64


def tiny(seed: int, layers: int, context: int = CONTEXT) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(10)
            layer.mlp.down_proj.weight.mul_(10)
        model.lm_head.weight.mul_(30)
    return model.requires_grad_(False)


_TARGET, _SMALL, _SHORT = tiny(0, 3), tiny(1, 1), tiny(2, 1, context=24)
_TRUTH: dict[tuple[int, ...], list[int]] = {}


_PROMPTS = [
    torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (1, 2, 3, 5, 8, 13, 21, 34, 55)
]


def plain(prompt: list[int]) -> list[int]:
    """The prompt and everything plain greedy decoding gives up to the context's end."""
    key = tuple(prompt)
    if key not in _TRUTH:
        text = list(prompt)
        with torch.inference_mode():
            while len(text) < CONTEXT:
                text.append(int(_TARGET(torch.tensor([text])).logits[0, -1].argmax()))
        _TRUTH[key] = text
    return _TRUTH[key]


class Told(Policy):
    """Takes the arm it is told, or the first that is available."""

    name = "told"

    def __init__(self) -> None:
        self.arm = 0

    def reset(self, n_arms, seed=None):
        return

    def select(self, available=None):
        if available is None or available[self.arm]:
            return self.arm
        return int(available.argmax())

    def update(self, arm, reward, *, cost=1.0, propensity=0.0, rewards=None):
        assert 0.0 <= reward <= 1.0

    def __deepcopy__(self, memo):
        return self  # one lever for all rows


class Moody(Drafter):
    """Drafts the truth, nonsense, or what no decoder should take; breaks when told to."""

    name = "moody"
    mood = "truth"
    prompts: ClassVar[dict[tuple[int, ...], int]] = {}  # text: how much of it is the prompt

    def propose(self, tokens, n, sampling):
        truth = plain(tokens[: Moody.prompts[tuple(tokens)]])[len(tokens) :][:n]
        return {
            "truth": lambda: Draft(truth),
            "half": lambda: Draft([*truth[: n // 2], *[(t + 1) % VOCAB for t in truth[n // 2 :]]]),
            "short": lambda: Draft(truth[:1]),
            "long": lambda: Draft([0] * (n + 1)),
            "outside": lambda: Draft([VOCAB] * n),
            "nan": lambda: Draft([0] * n, torch.full((n, VOCAB), float("nan"))),
            "raises": lambda: 1 // 0,
        }[Moody.mood]()


_MOODS = ("truth", "half", "short", "long", "outside", "nan", "raises")


class Interleavings(RuleBasedStateMachine):
    """Rows are admitted, decoded, cancelled; arms are switched; drafters break."""

    def __init__(self) -> None:
        super().__init__()
        warnings.simplefilter("ignore", RuntimeWarning)  # disabled drafters, on purpose
        target = Target(_TARGET)
        drafters = [
            Moody(),
            make_drafter("prompt-lookup:2", target),
            make_drafter("early-exit:1", target),
            LanguageModel(_TARGET, VOCAB, "itself"),
            LanguageModel(_SMALL, VOCAB, "streaming", Streaming(2, 10)),
            LanguageModel(_SMALL, VOCAB, "lazy", Lazy(3)),
            LanguageModel(_SHORT, VOCAB, "short context"),
        ]
        self.policy = Told()
        self.arms = len(drafters)
        self.target, self.router = target, Router(drafters, self.policy, "bd", 4)
        self.prompts: dict[object, list[int]] = {}
        self.admitted = 0

    @initialize(mode=st.sampled_from(["homogeneous", "heterogeneous"]), size=st.integers(2, 5))
    def begin(self, mode, size):
        self.batch = Batch(self.target, self.router, size, mode, seed=0)

    @rule(rows=st.lists(st.tuples(st.sampled_from(_PROMPTS), st.integers(1, 40)), min_size=1))
    @precondition(lambda self: not self.batch.full)
    def admit(self, rows):
        for prompt, new in rows[: self.batch.size - len(self.batch.rows)]:
            stopping = Stopping(len(prompt) + new, CONTEXT)
            query = Query(str(self.admitted), list(prompt), Sampling(), stopping)
            self.prompts[self.batch.admit(query)] = prompt
            self.admitted += 1

    @rule(arms=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(_MOODS)), min_size=1))
    @precondition(lambda self: self.batch.rows)
    def rounds(self, arms):
        for self.policy.arm, Moody.mood in arms:
            if not self.batch.rows:
                break
            for row in self.batch.rows:
                Moody.prompts[tuple(row.query.tokens)] = len(self.prompts[row])
            for row, round_, emitted in self.batch.round():
                assert 1 <= len(emitted) == round_.emitted <= round_.accepted + 1
                assert row.query.tokens[-len(emitted) :] == emitted
                if row.query.finish is not None:
                    assert len(row.query.tokens) == min(row.query.stopping.max_length, CONTEXT)
                    assert row not in self.batch.rows

    @rule(which=st.integers(0, 3))
    @precondition(lambda self: self.batch.rows)
    def cancel(self, which):
        self.batch.release(self.batch.rows[which % len(self.batch.rows)])

    @rule()
    @precondition(lambda self: self.batch.rows)
    def one_forward_is_lost(self):
        """A forward that nobody commits leaves no trace behind once it is rolled back."""
        model = self.batch.model
        slots = [row.slot for row in self.batch.rows]
        model.forward(slots, [[1, 2, 3][: 1 + slot % 3] for slot in slots])
        for slot in slots:
            model.rollback(slot, 1 + slot % 3)

    @invariant()
    def every_row_is_what_plain_decoding_gives(self):
        for row in self.batch.rows:
            tokens = row.query.tokens
            assert tokens == plain(self.prompts[row])[: len(tokens)]
            assert self.batch.model.lengths[row.slot] == len(tokens) - 1


Interleavings.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestInterleavings = pytest.mark.slow(Interleavings.TestCase)
