"""A left-padded batch, given as Hugging Face's users give it."""

from __future__ import annotations

import pytest
import torch

from metasd_bandits import ConfigError
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.metasd import MetaSD

VOCAB, PAD, EOS = 24, 23, 11


@pytest.fixture(scope="module")
def target(tiny_llama):
    return tiny_llama(0, vocab=VOCAB, layers=3, pad_token_id=PAD, eos_token_id=EOS)


def padded(seed: int, lengths=(9, 1, 4, 14)):
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), PAD), torch.zeros(len(lengths), width)
    for row, n in enumerate(lengths):
        ids[row, width - n :] = torch.randint(VOCAB - 1, (n,), generator=generator)
        mask[row, width - n :] = 1
    return ids, mask.long()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [{"max_new_tokens": 25}, {"max_length": 30, "min_length": 20}])
def test_the_sequences_are_those_of_generate(tiny_llama, target, seed, limit):
    ids, mask = padded(seed)
    drafter = LanguageModel(tiny_llama(5, vocab=VOCAB, layers=1), VOCAB)
    metasd = MetaSD(target, drafters=[drafter, "prompt-lookup", "early-exit:1"])
    expected = target.generate(ids, attention_mask=mask, do_sample=False, **limit)
    assert torch.equal(metasd.generate(ids, attention_mask=mask, **limit), expected)
    output = metasd.generate(ids, attention_mask=mask, return_dict_in_generate=True, **limit)
    assert torch.equal(output.sequences, expected)
    assert output.prompt_length == ids.shape[1]
    assert len(output.finishes) == len(ids)
    for row, length in enumerate(output.lengths):
        new = expected[row, ids.shape[1] :].tolist()
        assert new[length:] == [PAD] * (len(new) - length)
    assert output.new_tokens == expected[0, ids.shape[1] :].tolist()[: output.lengths[0]]


def test_new_tokens_of_a_row_that_ended_early_are_what_it_emitted(target):
    """The first row ends by its own token, the others go on to the limit."""
    ids, mask = padded(1)
    plain = target.generate(
        ids[:1], attention_mask=mask[:1], max_new_tokens=25, do_sample=False, eos_token_id=None
    )
    last = plain[0, ids.shape[1] + 3 :][:1].tolist()
    texts = MetaSD(target).generate(
        ids, attention_mask=mask, max_new_tokens=25, eos_token_id=last, return_dict_in_generate=True
    )
    emitted = plain[0, ids.shape[1] :].tolist()
    emitted = emitted[: emitted.index(last[0]) + 1]
    assert texts.sequences.shape[1] > ids.shape[1] + len(emitted)
    assert texts.new_tokens == emitted
    assert texts.lengths[0] == len(emitted)


def test_rows_without_padding_need_no_mask(target):
    ids = torch.randint(VOCAB - 1, (3, 6), generator=torch.Generator().manual_seed(0))
    metasd = MetaSD(target, drafters=["prompt-lookup"])
    expected = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    assert torch.equal(metasd.generate(ids, max_new_tokens=12), expected)


def test_one_padded_row_is_a_batch_too(target):
    ids, mask = padded(3)
    expected = target.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=12, do_sample=False)
    got = MetaSD(target).generate(ids[:1], attention_mask=mask[:1], max_new_tokens=12)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda mask: mask.flip(1),  # padded on the right
        lambda mask: torch.cat([mask[:, :3] * 0, mask[:, :1] * 0 + 1, mask[:, 4:] * 0], 1),
        lambda mask: mask[:, 1:],
        lambda mask: mask * 0,
    ],
)
def test_any_other_mask_is_refused(target, spoil):
    ids, mask = padded(0)
    with pytest.raises(ConfigError):
        MetaSD(target).generate(ids, attention_mask=spoil(mask), max_new_tokens=5)
