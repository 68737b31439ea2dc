"""Sampling in a batch follows the target: frequencies against its exact distribution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.metasd import MetaSD

MODES = ("homogeneous", "heterogeneous")


def exact(model, prompt: list[int], n: int, vocab: list[int], temperature: float):
    """The probability of every continuation of n tokens over `vocab` (the others are ruled out)."""
    texts = [list(text) for text in itertools.product(vocab, repeat=n)]
    ids = torch.tensor([prompt + text for text in texts])
    with torch.inference_mode():
        logits = model(ids).logits[:, len(prompt) - 1 : -1].double() / temperature
    keep = torch.full(logits.shape[-1:], float("-inf"), dtype=torch.double)
    keep[vocab] = 0.0
    log_p = (logits + keep).log_softmax(-1)
    chosen = log_p.gather(2, torch.tensor(texts)[:, :, None])[:, :, 0].sum(1)
    return {tuple(text): float(p) for text, p in zip(texts, chosen.exp(), strict=True)}


def check(counts: dict[tuple[int, ...], int], p: dict[tuple[int, ...], float]) -> None:
    n = sum(counts.values())
    assert set(counts) <= set(p)
    common = [text for text in p if n * p[text] >= 5]
    observed = [counts.get(text, 0) for text in common]
    expected = [n * p[text] for text in common]
    if n - sum(expected) > 1e-6 * n:
        observed.append(n - sum(observed))
        expected.append(n - sum(expected))
    scale = n / sum(expected)
    assert chisquare(observed, [e * scale for e in expected]).pvalue > 1e-3


def test_the_check_finds_another_law(tiny_llama):
    """As many draws as the test below makes, from the right law and from one 0.15 away from it.

    The distance is total variation; finer faults are for the enumerations of other files.
    """
    target = tiny_llama(0, vocab=3, layers=2, sharpness=6)
    right, off = (exact(target, [2, 2], 3, [0, 1, 2], t) for t in (1.5, 0.8))
    assert sum(abs(right[text] - off[text]) for text in right) / 2 < 0.15
    rng = np.random.default_rng(0)
    for law in (right, off):
        p = np.array(list(law.values()))
        counts = dict(zip(law, rng.multinomial(800, p / p.sum()).tolist(), strict=True))
        drawn = {text: n for text, n in counts.items() if n}
        if law is right:
            check(drawn, right)
        else:
            with pytest.raises(AssertionError):
                check(drawn, right)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_frequencies_in_a_batch_are_the_targets(tiny_llama, mode):
    """Rows share rounds with rows of other prompts, and arms that are good and bad."""
    target = tiny_llama(0, vocab=3, layers=2, sharpness=6)
    drafters = [
        LanguageModel(tiny_llama(1, vocab=3, layers=1, sharpness=6), 3),
        "early-exit:1",
        "prompt-lookup",
        "prompt-lookup:3:2>early-exit:1",
    ]
    metasd = MetaSD(target, drafters=drafters, reward="bd", policy="ucb", draft_length=3)
    prompts = [[0, 1, 2, 1], [2, 2]]
    counts: list[dict[tuple[int, ...], int]] = [{}, {}]
    rows = (prompts[i % 2] for i in range(1600))
    sampled = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 3, "seed": 11}
    for output in metasd.generate_many(rows, max_batch=40, mode=mode, **sampled):
        text = tuple(output.new_tokens)
        which = counts[output.index % 2]
        which[text] = which.get(text, 0) + 1
    for prompt, count in zip(prompts, counts, strict=True):
        check(count, exact(target, prompt, 3, [0, 1, 2], 1.5))


@pytest.mark.slow
@pytest.mark.model
def test_frequencies_in_a_batch_are_the_real_models(smollm):
    """SmolLM2, two tokens from those the model likes best, drafted by its own first layers."""
    prompt = smollm.tokenizer("My favourite colour is").input_ids
    with torch.inference_mode():
        best = smollm.model(torch.tensor([prompt])).logits[0, -1].topk(3).indices.tolist()
    metasd = MetaSD(
        smollm.model,
        smollm.tokenizer,
        drafters=["early-exit:8", "prompt-lookup"],
        reward="bd",
        draft_length=2,
    )
    counts: dict[tuple[int, ...], int] = {}
    outputs = metasd.generate_many(
        [prompt] * 96,
        max_batch=32,
        mode="heterogeneous",
        seed=1,
        do_sample=True,
        temperature=1.5,
        top_k=0,
        max_new_tokens=2,
        eos_token_id=None,
        prefix_allowed_tokens_fn=lambda row, ids: best,
    )
    for output in outputs:
        text = tuple(output.new_tokens)
        counts[text] = counts.get(text, 0) + 1
    check(counts, exact(smollm.model, prompt, 2, best, 1.5))
