"""Where two texts part, and how sure the target was there: what half precision is judged by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metasd_runtime.bench.agreement import Agreement, compare
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target

VOCAB = 16
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama(3, vocab=VOCAB)


@given(tokens, tokens, tokens, tokens)
@settings(max_examples=40)
def test_the_first_difference_and_the_gap_there(model, prompt, shared, first, second):
    found = compare(Target(model), prompt, [*shared, *first], [*shared, *second])
    if first == second:
        assert found == Agreement(None, None)
        assert str(found) == "yes"
        return
    same = [a == b for a, b in zip(first, second, strict=False)]
    place = len(shared) + (same.index(False) if False in same else len(same))
    assert found.difference == place
    text = [*prompt, *shared, *first][: len(prompt) + place]
    with torch.inference_mode():
        best = model(torch.tensor([text])).logits[0, -1].sort(descending=True).values
    assert found.gap == pytest.approx(float(best[0] - best[1]), abs=1e-4)
    assert f"token {place}" in str(found)


def test_in_half_precision_every_token_is_the_maximum_it_was_verified_with(tiny_llama):
    """Ties may fall otherwise than in plain decoding (vLLM #7627); nothing else may."""
    model = tiny_llama(4, vocab=VOCAB, sharpness=1.0).to(torch.bfloat16)  # logits near each other
    metasd = MetaSD(model, drafters=["prompt-lookup", "early-exit:1"], reward="bd")
    for prompt in ([1, 2, 3], [7] * 5, [4, 9, 4, 9]):
        out = metasd.generate(
            [prompt], max_new_tokens=40, return_dict_in_generate=True, output_logits=True
        )
        assert [int(step[0].argmax()) for step in out.logits] == out.new_tokens
