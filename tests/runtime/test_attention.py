"""Grouped-query attention without copies, against the library's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ATTENTION, build
from torch import nn
from transformers import AttentionInterface

from metasd_runtime.model.attention import GROUPED, can_attend, grouped, own_attention
from metasd_runtime.model.target import CachedModel


class _Module(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, True


@settings(deadline=None, max_examples=50)
@given(
    batch=st.integers(1, 3),
    shared=st.integers(1, 3),
    group=st.integers(1, 4),
    n=st.integers(1, 5),
    length=st.integers(5, 9),
    seed=st.integers(0, 99),
)
def test_it_is_the_librarys_attention(batch, shared, group, n, length, seed) -> None:
    """Under any mask that lets every query see something, one for each row of the batch."""
    draws = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draws, dtype=torch.float64)

    query, key = normal(batch, shared * group, n, 8), normal(batch, shared, length, 8)
    value = normal(batch, shared, length, 8)
    hidden = torch.rand(batch, 1, n, length, generator=draws) < 0.5
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, -torch.inf)
    functions = AttentionInterface()
    arguments = (_Module(group), query, key, value, mask)
    theirs, _ = functions["sdpa"](*arguments, scaling=0.3)
    ours, _ = functions[GROUPED](*arguments, scaling=0.3)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_a_model_attends_as_before_afterwards(name) -> None:
    model = build(*ATTENTION[name])
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    exchanged = can_attend(model)
    with grouped(model):
        assert (config._attn_implementation != before) == exchanged
        assert own_attention(config) == before
    assert config._attn_implementation == before


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_a_chain_under_a_mask_of_the_librarys_making(name) -> None:
    """A block behind a text: the mask is the library's, and it must be made for our name too."""
    model = build(*ATTENTION[name])
    cached, plain = CachedModel(model), CachedModel(model)
    plain._grouped = False
    logits = []
    for one in (cached, plain):
        one.prefill(list(range(1, 20)))
        logits.append(one.forward([3, 1, 4, 1, 5]).logits)
    torch.testing.assert_close(*logits, atol=2e-5, rtol=2e-5)
