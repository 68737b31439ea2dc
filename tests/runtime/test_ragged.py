"""Rows of different lengths in one forward: each computes what it would compute alone."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from metasd_bandits import ConfigError
from metasd_runtime.model.ragged import RaggedModel, packs, refuse_ragged
from metasd_runtime.model.target import CachedModel

_SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_WINDOWED = {"sliding_window": 8}
_OF = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **_WINDOWED},
    "qwen3": {"head_dim": 8},
    "mistral": _WINDOWED,
    "gemma2": {"head_dim": 8, **_WINDOWED},
    "gemma3_text": {"head_dim": 8, "sliding_window_pattern": 2, **_WINDOWED},
    "phi": {},
    "phi3": _WINDOWED,
    "gpt2": {"n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 64},
    "gpt_neox": {"num_key_value_heads": None},
    "olmo": {},
    "olmo2": {},
    "granite": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "stablelm": {},
    "starcoder2": _WINDOWED,
    "smollm3": {},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, **_WINDOWED},
    "cohere2": {"head_dim": 8, "sliding_window_pattern": 2, **_WINDOWED},
}


def tiny(architecture: str, attention: str | None = None):
    config = CONFIG_MAPPING[architecture](**{**_SMALL, **_OF.get(architecture, {})})
    if attention is not None:  # else what the library chooses, SDPA for most
        config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).float().eval()


def ragged_against_alone(model, texts, blocks, packed: bool) -> float:
    """Largest distance between a row's logits in company and alone."""
    vocab = model.get_output_embeddings().weight.shape[0]
    texts = [[t % vocab for t in text] for text in texts]
    rows = RaggedModel(model, len(texts) + 1)
    rows.packs = packed
    slots = list(range(len(texts), 0, -1))  # slot names are not places
    for slot, text in zip(slots, texts, strict=True):
        rows.storage.open(slot)
        rows.prefill(slot, text)
    worst = 0.0
    alone = [CachedModel(model) for _ in texts]
    for single, text in zip(alone, texts, strict=True):
        single.forward(text)
    for block in blocks:
        together = rows.forward(slots, block)
        for slot, single, b, row in zip(slots, alone, block, together, strict=True):
            expected = single.forward(b).logits
            assert row.logits.shape == expected.shape
            worst = max(worst, float((row.logits - expected).abs().max()))
            drop = len(b) // 2  # a rejection of some of them
            rows.rollback(slot, drop)
            single.rollback(drop)
    return worst


@pytest.mark.parametrize("architecture", sorted(_OF))
@pytest.mark.parametrize("attention", [None, "eager"])
def test_a_row_in_company_computes_what_it_computes_alone(architecture, attention):
    model = tiny(architecture, attention)
    texts = [[3, 7, 1, 9, 4, 4, 2, 8, 5, 6, 1, 2, 30], [5, 2], [11] * 20]
    blocks = [
        [[1], [2, 3, 4], [5, 6]],
        [[7, 8, 9, 10, 11, 12], [1], [2]],
        [[1], [2], [3]],
        [[4, 4], [9, 8, 7, 6, 5, 4, 3], [1, 1, 1]],
    ]
    for packed in {False, packs(model)}:
        assert ragged_against_alone(model, texts, blocks, packed) < 2e-4
    refuse_ragged(model)


def test_packed_blocks_cost_no_padding():
    """Sixteen tokens in three rows: sixteen positions go through the layers, not twenty-seven."""
    model = tiny("llama")
    rows, seen = RaggedModel(model, 3), []
    for slot in range(3):
        rows.storage.open(slot)
    hook = model.model.layers[0].mlp.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].shape[:2])
    )
    forwards = rows.forward([0, 1, 2], [[1] * 9, [2], [3] * 6])
    assert [len(f.logits) for f in forwards] == [9, 1, 6]
    rows.forward([0, 1, 2], [[4], [5], [6]])  # no padding: nothing to pack
    hook.remove()
    assert seen == [(1, 16), (3, 1)]


def test_a_model_whose_attention_is_its_own_is_padded():
    assert not packs(tiny("llama", "eager"))


def test_a_packed_forward_that_breaks_leaves_the_model_as_it_was():
    model = tiny("llama")
    rows = RaggedModel(model, 2)
    for slot in range(2):
        rows.storage.open(slot)
    before = model(torch.tensor([[1, 2, 3]])).logits
    with pytest.raises(IndexError):
        rows.forward([0, 1], [[1, 2], [model.config.vocab_size]])
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(torch.tensor([[1, 2, 3]])).logits, before)


@pytest.mark.parametrize("architecture", ["bloom", "gpt_neo"])
def test_a_model_that_cannot_be_told_positions_is_refused_by_name(architecture):
    config = CONFIG_MAPPING[architecture](
        vocab_size=48,
        hidden_size=32,
        **({"n_layer": 2, "n_head": 4} if architecture == "bloom" else {}),
        **(
            {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
            if architecture == "gpt_neo"
            else {}
        ),
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with pytest.raises(ConfigError, match=type(model).__name__):
        refuse_ragged(model)


def test_rows_that_leave_and_come_disturb_no_other():
    """Slots are closed and opened around a row that goes on, whose keys move in the storage."""
    model = tiny("llama")
    rows, alone = RaggedModel(model, 3), CachedModel(model)
    for slot in (0, 1, 2):
        rows.storage.open(slot)
        rows.prefill(slot, [slot + 1] * (4 + 3 * slot))
    alone.forward([3] * 10)
    storage = rows.storage
    storage.close(0)
    assert [storage.place(slot) for slot in (1, 2)] == [1, 0]  # open rows fill the first places
    storage.open(0)
    rows.prefill(0, [9] * 300)  # the storage grows around the others
    for slots in ([2], [0, 1, 2], [1, 2], [2, 0]):
        blocks = [[slot + 5] * (slot + 1) for slot in slots]
        got = rows.forward(slots, blocks)[slots.index(2)].logits
        torch.testing.assert_close(got, alone.forward([7] * 3).logits, atol=1e-4, rtol=0)


def test_nan_left_behind_by_a_row_does_not_reach_the_next():
    model = tiny("llama")
    rows = RaggedModel(model, 2)
    rows.storage.open(0)
    rows.prefill(0, [1, 2, 3, 4, 5])
    with torch.inference_mode():
        for layer in rows.storage.layers:
            layer.keys[0], layer.values[0] = float("nan"), float("nan")
    rows.storage.close(0)
    rows.storage.open(1)
    logits = rows.forward([1], [[1, 2]])[0].logits
    torch.testing.assert_close(logits, CachedModel(model).forward([1, 2]).logits)
