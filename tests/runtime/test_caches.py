"""After every commit, every cache is what a fresh run on the same tokens would have left.

Whatever was drafted, however much of it stood, whichever drafter was chosen and whichever broke;
with storage that has to grow, and with early exit drafting in the target's own.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import (
    ByTurns,
    Script,
    assert_cache_is_fresh,
    assert_holds,
    fresh_cache,
    greedy_text,
    run,
)

from metasd_runtime.decoding.drafter import Drafter
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.stopping import Stopping
from metasd_runtime.drafters.early_exit import EarlyExit
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model import target as target_module
from metasd_runtime.model.hf import PreallocatedLayer
from metasd_runtime.model.target import CachedModel, Target

VOCAB = 32
LONG = 40
PROMPTS = [[3], [1, 2, 3, 4, 5], list(range(20)), [7, 7, 7, 7]]

tokens_ = st.integers(0, VOCAB - 1)
# How much of a draft is right, and the junk behind it.
drafts = st.lists(st.tuples(st.integers(0, 6), st.lists(tokens_, max_size=5)), min_size=1)
turns = st.lists(st.integers(0, 4), min_size=1, max_size=12)


class Trapped(Sampling):
    """Raises in the middle of drafting, at chosen calls of `propose`."""

    def __init__(self, traps: set[int], **options) -> None:
        super().__init__(**options)
        self.traps, self.calls = traps, 0

    def propose(self, logits, tokens):
        self.calls += 1
        if self.calls in self.traps:
            raise RuntimeError("trap")
        return super().propose(logits, tokens)


class World:
    """A target, two small models, what the target answers, all made once."""

    def __init__(self, tiny_llama) -> None:
        self.model = tiny_llama(0, vocab=VOCAB, layers=3)
        self.other = tiny_llama(1, vocab=VOCAB, layers=1, hidden=16, heads=2, kv_heads=1)
        self.answers = [greedy_text(self.model, prompt, LONG) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def world(tiny_llama):
    return World(tiny_llama)


@pytest.fixture(autouse=True, scope="module")
def _tight_storage():
    """Storage that starts small, so that it has to grow within a query."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_module, "_FIRST_CAPACITY", 2)
        patch.setattr(target_module, "_PREFILL_CHUNK", 7)
        yield


def pool(world: World, target: Target, answer: list[int], script) -> list[Drafter]:
    said = iter(script * 50)

    def say(tokens, n):
        right, junk = next(said)
        return [*answer[len(tokens) : len(tokens) + right], *junk]

    return [
        Script("script", say),
        LanguageModel(world.other, VOCAB, name="other"),
        LanguageModel(world.model, VOCAB, name="itself"),
        EarlyExit(target, 1),
        EarlyExit(target, 2),
    ]


def check(target: Target, drafters: list[Drafter], tokens: list[int]) -> None:
    fresh = fresh_cache(target.model, tokens)
    assert_holds(target.layers, fresh, len(tokens) - 1)
    for drafter in drafters:
        if isinstance(drafter, LanguageModel):
            read = drafter._reading.tokens
            assert read == tokens[: len(read)]
            assert len(read) <= len(tokens)
            assert_cache_is_fresh(drafter.lm, read)


@settings(max_examples=60)
@given(
    st.integers(0, 3),
    drafts,
    turns,
    st.integers(1, LONG),
    st.integers(1, 6),
    st.sets(tokens_, max_size=2),
)
def test_greedy(world, which, script, order, n, draft_length, eos):
    """The caches, and with them the text: the library's own, cut where it should stop."""
    target, answer = Target(world.model), world.answers[which]
    drafters = pool(world, target, answer, script)
    prompt = PROMPTS[which]
    stopping = Stopping(len(prompt) + n, None, frozenset(eos))
    text, rounds = run(
        target,
        drafters,
        prompt,
        n,
        policy=ByTurns(order),
        stopping=stopping,
        draft_length=draft_length,
        after_round=lambda tokens: check(target, drafters, tokens),
    )
    output = answer[len(prompt) : len(prompt) + n]
    stops = [i for i, token in enumerate(output) if token in eos]
    assert text[len(prompt) :] == output[: stops[0] + 1 if stops else n]
    assert sum(r.emitted for r in rounds) == len(text) - len(prompt)
    for r in rounds[:-1]:
        assert r.emitted == r.accepted + 1
    assert rounds[-1].accepted <= rounds[-1].emitted <= rounds[-1].accepted + 1
    assert all(r.accepted <= r.drafted <= draft_length for r in rounds)


@settings(max_examples=25)
@given(
    st.integers(0, 3), drafts, turns, st.integers(0, 2**32), st.sets(st.integers(1, 40), max_size=6)
)
def test_sampled_with_drafters_that_break(world, which, script, order, seed, traps):
    target = Target(world.model)
    drafters = pool(world, target, world.answers[which], script)
    broken: set[str] = set()

    def after(tokens):
        check(target, [d for d in drafters if d.name not in broken], tokens)

    def note(message, *args, **kwargs):
        broken.add(str(message).split("'")[1])

    for turn in range(2):  # what broke in one query is welcome again in the next
        sampling = Trapped(traps if turn == 0 else set(), do_sample=True, seed=seed)
        broken.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(warnings, "warn", note)
            text, _ = run(
                target,
                drafters,
                PROMPTS[which],
                20,
                policy=ByTurns(order),
                sampling=sampling,
                after_round=after,
            )
        assert len(text) == len(PROMPTS[which]) + 20
        assert not (turn and broken)


def test_a_forward_that_breaks_between_two_layers(world):
    """Early exit writes into the target's first layers: a break leaves them as they were."""
    target = Target(world.model)

    class Fragile(EarlyExit):
        armed = False

        def propose(self, tokens, n, sampling):
            calls = iter(range(100))

            def hook(*args):
                if next(calls) == 2:
                    raise RuntimeError("broke in the second layer")

            handle = world.model.model.layers[1].register_forward_pre_hook(hook)
            try:
                return super().propose(tokens, n, sampling)
            finally:
                handle.remove()

    drafters = [Fragile(target, 2)]
    with pytest.warns(RuntimeWarning, match="second layer"):
        text, rounds = run(
            target,
            drafters,
            PROMPTS[1],
            10,
            after_round=lambda tokens: check(target, drafters, tokens),
        )
    assert text == world.answers[1][:15]
    assert all(r.drafted == 0 for r in rounds)


@settings(max_examples=10)
@given(turns)
def test_drafts_after_a_pause_equal_those_of_a_fresh_drafter(world, order):
    """A drafter that was not chosen for some rounds has missed nothing when it is."""
    target, answer = Target(world.model), world.answers[1]
    lm = LanguageModel(world.other, VOCAB, name="other")
    greedy = Sampling()

    class Compared(LanguageModel):
        def propose(self, tokens, n, sampling):
            draft = super().propose(tokens, n, sampling)
            fresh = LanguageModel(world.other, VOCAB)
            fresh.start(tokens)
            expected = fresh.propose(tokens, n, greedy)
            assert draft.tokens == expected.tokens
            torch.testing.assert_close(draft.probs, expected.probs, rtol=1e-4, atol=1e-5)
            return draft

    compared = Compared(world.other, VOCAB, name="compared")
    drafters = [compared, lm, EarlyExit(target, 1), Script("none of it", lambda t, n: [0] * n)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text, _ = run(target, drafters, PROMPTS[1], 20, policy=ByTurns(order))
    assert text == answer[:25]


def test_every_draft_accepted_leaves_one_token_unread(world):
    """The drafter has not read its own last draft, nor the bonus. That is no debt of a switch."""
    target = Target(world.model)
    owed, unread = [], []

    class Watch(LanguageModel):
        def propose(self, tokens, n, sampling):
            unread.append(len(tokens) - self.lm.length)
            draft = super().propose(tokens, n, sampling)
            owed.append(draft.owed)
            assert (draft.switch_seconds > 0) == (draft.owed > 0)
            return draft

    drafter = Watch(world.model, VOCAB)
    text, rounds = run(target, [drafter], PROMPTS[1], 25, draft_length=4)
    assert text == world.answers[1][:30]
    assert [r.accepted for r in rounds] == [4] * 5
    assert unread == [len(PROMPTS[1]), 2, 2, 2, 2]
    assert owed == [len(PROMPTS[1]) - 1, 0, 0, 0, 0]


@pytest.mark.parametrize("together", [False, True])
def test_what_others_emitted_meanwhile_is_owed(world, together):
    """Alone and in a batch."""
    drafter = LanguageModel(world.model, VOCAB)  # every draft of its own is accepted
    metasd = MetaSD(
        world.model,
        drafters=[drafter, Script("silent", lambda t, n: [])],
        policy=ByTurns([0, 0, 1, 1, 0, 1, 0, 0]),
        reward="bd",
        draft_length=4,
    )
    arguments = {"max_new_tokens": 28, "eos_token_id": None}
    if together:
        [out] = metasd.generate_many([PROMPTS[1]], **arguments)
    else:
        out = metasd.generate(torch.tensor([PROMPTS[1]]), return_dict_in_generate=True, **arguments)
    assert [r.emitted for r in out.trace] == [5, 5, 1, 1, 5, 1, 5, 5]
    # Unread after two other rounds: the last draft, the bonus, a token of each; but the last.
    assert [r.owed for r in out.trace] == [len(PROMPTS[1]) - 1, 0, 0, 0, 3, 0, 2, 0]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
@settings(max_examples=40)
def test_storage_grows_and_rolls_back(blocks, data):
    """The storage is a list of positions: what was rolled back is gone, the rest unmoved."""
    layer = PreallocatedLayer(1)
    kept = torch.empty(1, 2, 0, 3)
    for size in blocks:
        new = torch.randn(1, 2, size, 3)
        keys, values = layer.update(new, 2 * new)
        kept = torch.cat([kept, new], dim=2)
        assert torch.equal(keys, kept)
        assert torch.equal(values, 2 * kept)
        assert layer.get_mask_sizes(4) == (layer.length + 4, 0)
        drop = data.draw(st.integers(0, layer.length))
        layer.crop(-drop)
        kept = kept[:, :, : kept.shape[2] - drop]
        assert layer.get_seq_length() == kept.shape[2]


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=6))
def test_layers_that_grew_differently_agree_on_the_next_size(demands):
    """A compiled forward needs every layer's storage of one size."""
    layers = [PreallocatedLayer(256) for _ in demands]
    for layer, needed in zip(layers, demands, strict=True):
        layer.reserve(needed)
        assert needed <= layer.capacity <= max(256, needed + max(255, needed // 8))
    room = max(layer.capacity for layer in layers)
    for layer in layers:
        layer.reserve(room)
    assert {layer.capacity for layer in layers} == {room}


def test_a_long_text_leaves_no_storage_behind():
    layer = PreallocatedLayer(4)
    new = torch.randn(1, 2, 700, 3)
    layer.update(new, new)
    assert layer.capacity == 768
    layer.reset()
    assert (layer.length, layer.capacity) == (0, 4)
    assert layer.keys.shape == layer.values.shape == (1, 2, 4, 3)
    keys, values = layer.update(new[:, :, :3], 2 * new[:, :, :3])
    assert torch.equal(keys, new[:, :, :3])
    assert torch.equal(values, 2 * new[:, :, :3])


def test_growth_does_not_depend_on_who_grows_it(world):
    """Early exit may be the first to outgrow the storage of the layers it shares."""
    target = Target(world.model)
    exit_ = EarlyExit(target, 2)
    target.reset()
    target.prefill(PROMPTS[2])
    while target.layers[0].capacity > target.length + 3:
        target.forward([1])
    tokens = [*PROMPTS[2], *[1] * (target.length - len(PROMPTS[2])), 5]
    exit_.propose(tokens, 8, Sampling())
    assert target.layers[0].capacity > target.layers[2].capacity
    target.forward([5, 6, 7, 8])
    assert_cache_is_fresh(target, [*tokens, 6, 7, 8])


def test_early_exit_shares_everything_with_the_target(world):
    target = Target(world.model)
    exit_ = EarlyExit(target, 2)
    shallow = exit_._exit
    assert isinstance(shallow, CachedModel)
    assert [a is b for a, b in zip(shallow.layers, target.layers, strict=False)] == [True, True]
    own = {id(p) for p in world.model.parameters()}
    assert all(id(p) in own for p in shallow.model.parameters())
    assert len(world.model.model.layers) == 3
    assert world.model.config.num_hidden_layers == 3
