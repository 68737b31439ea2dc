"""Cache strategies: what a drafter has read is always a fresh reading of a view of the text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metasd_bandits import ConfigError
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.catch_up import (
    Lazy,
    Reading,
    Recompute,
    Streaming,
    make_cache_strategy,
)
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.drafters.registry import make_drafter
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import CachedModel, Target

VOCAB = 6


def view(cache, sinks_end, start, text):
    return [*text[:sinks_end], *text[start:]]


@st.composite
def histories(draw):
    """A prompt, then rounds: chosen or not, n, how much is accepted, what comes."""
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40))
    rounds = draw(
        st.lists(
            st.tuples(
                st.booleans(),
                st.integers(1, 5),
                st.integers(0, 5),
                st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
            ),
            max_size=25,
        )
    )
    return prompt, rounds


@settings(max_examples=300)
@given(
    histories(),
    st.sampled_from(
        [Recompute(), Streaming(2, 8), Streaming(0, 12), Streaming(4, 4), Lazy(3), Lazy(8)]
    ),
)
def test_the_cache_is_always_a_view_of_the_text_that_ends_where_the_text_does(history, strategy):
    text, rounds = list(history[0]), history[1]
    reading, cache = Reading(strategy), []
    for chosen, n, accepted, others in rounds:
        if chosen:
            forget, owed = reading.plan(text, n)
            assert owed, "the last token must be read, for the logits behind it"
            del cache[len(cache) - forget :]
            cache += owed
            reading.extend(owed)
            gap = len(text) - len(cache)
            assert gap >= 0
            # the view: a prefix of the text, a gap, the rest
            assert any(
                cache == text[:start] + text[start + gap :] for start in range(len(cache) + 1)
            )
            if isinstance(strategy, Recompute):
                assert gap == 0
            if isinstance(strategy, Streaming):
                assert len(cache) + n <= strategy.sinks + max(strategy.window, n + 1)
                assert cache[: strategy.sinks] == text[: strategy.sinks]
            drafted = [(text[-1] + j) % VOCAB for j in range(n)]
            for token in drafted[: n - 1]:
                cache.append(token)
                reading.extend([token])
            text += drafted[: min(accepted, n)]
        text += others
        forget = reading.settle(text)
        del cache[len(cache) - forget :]
        assert cache == reading.tokens


def test_lazy_pays_a_large_debt_only_when_chosen_twice():
    reading = Reading(Lazy(4))
    text = list(range(50))
    assert reading.plan(text, 3) == (0, text[-4:])
    reading.extend(text[-4:])
    text.append(50)
    assert reading.settle(text) == 0
    assert reading.plan(text, 3) == (4, text)
    reading.extend(text)
    text += [51, 52]
    assert reading.plan(text, 3) == (0, [51, 52])  # a small debt is paid at once


def test_streaming_reads_sinks_and_window_of_a_long_prompt_alone():
    reading = Reading(Streaming(4, 100))
    text = list(range(5_000))
    _, owed = reading.plan(text, 5)
    assert owed == text[:4] + text[-50:]


def tiny_drafter(tiny_llama, cache, context=64):
    return LanguageModel(tiny_llama(3, vocab=16, layers=1, context=context), 16, cache=cache)


@pytest.mark.parametrize("cache", [Recompute(), Streaming(2, 12), Lazy(4)])
def test_drafts_equal_those_of_a_fresh_model_that_reads_the_view(tiny_llama, cache):
    """The drafts of a drafter that is chosen now and then, against no cache at all."""
    drafter = tiny_drafter(tiny_llama, cache)
    model, sampling = drafter.lm.model, Sampling()
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(16, (20,), generator=generator).tolist()
    drafter.start(text)
    for round_ in range(12):
        if round_ % 5 != 2:
            draft = drafter.propose(text, 4, sampling)
            seen = drafter._reading.tokens[: len(drafter._reading.tokens) - 3]
            logits = CachedModel(model).forward([*seen, *draft.tokens[:-1]]).logits[-4:]
            assert draft.tokens == logits.argmax(-1).tolist()
            torch.testing.assert_close(draft.probs, logits.softmax(-1), atol=1e-4, rtol=0)
            text += draft.tokens[: round_ % 5]
        text += torch.randint(16, (1 + round_ % 3,), generator=generator).tolist()
        drafter.commit(text)


@pytest.mark.parametrize("cache", ["recompute", "streaming", "lazy"])
def test_decoding_is_lossless_and_tells_what_switching_cost(tiny_llama, cache):
    target = tiny_llama(0, vocab=16)
    metasd = MetaSD(
        target,
        drafters=[tiny_drafter(tiny_llama, cache), "prompt-lookup", "none"],
        policy="uniform",
        reward="bd",
    )
    prompt = torch.randint(16, (1, 12), generator=torch.Generator().manual_seed(1))
    expected = target.generate(prompt, max_new_tokens=30, do_sample=False)
    out = metasd.generate(prompt, max_new_tokens=30, return_dict_in_generate=True, seed=0)
    assert torch.equal(out.sequences, expected)
    chosen = [r for r in out.trace.rounds if r.arm == 0]
    assert chosen[0].owed == 11
    assert all(r.switch_seconds > 0 for r in chosen if r.owed)


def test_a_drafter_of_short_context_is_disabled_or_windowed(tiny_llama):
    target = tiny_llama(0, vocab=16, context=512)
    prompt = torch.randint(16, (1, 100), generator=torch.Generator().manual_seed(1))
    expected = target.generate(prompt, max_new_tokens=60, do_sample=False)
    for cache, drafts in (("recompute", False), ("streaming", True)):
        drafter = tiny_drafter(tiny_llama, cache, context=48)
        metasd = MetaSD(target, drafters=[drafter], reward="bd")
        if drafts:
            out = metasd.generate(prompt, max_new_tokens=60, return_dict_in_generate=True)
        else:
            with pytest.warns(RuntimeWarning, match="cache=streaming"):
                out = metasd.generate(prompt, max_new_tokens=60, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
        assert any(r.drafted for r in out.trace.rounds) == drafts
        if drafts:
            assert drafter.lm.layers[0].capacity <= 256  # bounded: the first storage was enough


@pytest.mark.parametrize("length", [4_000, 8_000])
def test_long_prompts_are_decoded_with_bounded_drafter_memory(tiny_llama, length):
    """One prompt alone, then beside a short one in a batch; the short context is disabled."""
    target = tiny_llama(0, vocab=16, context=8_192)
    prompt = torch.randint(16, (1, length), generator=torch.Generator().manual_seed(1))
    expected = target.generate(prompt, max_new_tokens=12, do_sample=False)
    windowed = tiny_drafter(tiny_llama, Streaming(4, 128), context=512)
    short = tiny_drafter(tiny_llama, "recompute", context=512)
    short.name = "short"
    metasd = MetaSD(target, drafters=[windowed, short], policy="uniform", reward="bd")
    with pytest.warns(RuntimeWarning, match="'short' is disabled"):
        out = metasd.generate(prompt, max_new_tokens=12, return_dict_in_generate=True, seed=0)
    assert torch.equal(out.sequences, expected)
    assert windowed.lm.layers[0].capacity == 256
    assert sum(r.owed for r in out.trace.rounds) < 128
    with pytest.warns(RuntimeWarning, match="'short' is disabled"):
        both = list(metasd.generate_many([prompt, [1, 2, 3]], max_new_tokens=12, seed=0))
    assert torch.equal(both[0].sequences, expected)
    assert both[0].trace.rounds[0].owed < 128


@pytest.mark.parametrize(
    ("written", "strategy"),
    [
        ("", Recompute()),
        ("?cache=recompute", Recompute()),
        ("?cache=streaming", Streaming()),
        ("?cache=streaming&sinks=2&window=64", Streaming(2, 64)),
        ("?cache=lazy&window=16", Lazy(16)),
    ],
)
def test_strategies_are_written_behind_the_drafters_name(
    tiny_llama, letters, tmp_path, written, strategy
):
    tiny_llama(0, vocab=16, context=2048).save_pretrained(tmp_path)
    letters(16).save_pretrained(tmp_path)
    drafter = make_drafter(f"lm:{tmp_path}{written}", Target(tiny_llama(1, vocab=16), letters(16)))
    assert drafter.cache == strategy
    assert drafter.name == f"lm:{tmp_path}{written}"


@pytest.mark.parametrize(
    "written", ["cache=sliding", "cache=streaming&window=x", "cache=lazy&sinks=3", "kv=lazy"]
)
def test_nonsense_behind_the_question_mark_is_refused(tiny_llama, written):
    with pytest.raises(ConfigError):
        make_drafter(f"lm:somewhere?{written}", Target(tiny_llama(1, vocab=16)))


def test_sinks_that_fill_the_context_are_refused():
    with pytest.raises(ConfigError, match="sinks=62"):
        make_cache_strategy("streaming", {"sinks": 62}).fit(64)
