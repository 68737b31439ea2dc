"""The fixtures are what they say: other tests lean on them."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.mark.parametrize("size", [3, 17, 200])
def test_permutation_lm_answers_with_the_permutation(permutation_lm, size):
    perm = list(range(size))
    random.Random(size).shuffle(perm)
    model = permutation_lm(perm, seed=size)
    ids = torch.randint(size, (2, 30), generator=torch.Generator().manual_seed(size))
    assert model(ids).logits.argmax(-1).tolist() == [[perm[t] for t in row] for row in ids.tolist()]


def test_permutation_lm_wants_a_permutation(permutation_lm):
    with pytest.raises(ValueError, match="not a permutation"):
        permutation_lm([1, 1, 0])


def test_tiny_llama_is_its_seed_and_heeds_the_context(tiny_llama):
    ids = torch.randint(32, (1, 20), generator=torch.Generator().manual_seed(1))
    state = torch.random.get_rng_state()
    logits = tiny_llama(7)(ids).logits
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(logits, tiny_llama(7)(ids).logits)
    assert not torch.allclose(logits, tiny_llama(8)(ids).logits, atol=0.1)
    # The last logits change with the first token: attention is at work.
    other = ids.clone()
    other[0, 0] = (other[0, 0] + 1) % 32
    assert (tiny_llama(7)(other).logits[0, -1] - logits[0, -1]).abs().max() > 1e-2


def test_letters_read_and_write_their_alphabet(letters):
    tokenizer = letters(30)
    assert tokenizer("bcde").input_ids == [1, 2, 3, 4]
    assert tokenizer.decode(list(range(30)))[:6] == "abcdef"
