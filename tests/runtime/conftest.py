"""Models for the runtime's tests: one real, one whose answer is known, and random tiny ones.

Everything here is float32 on the CPU, where greedy equality must hold token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from metasd_runtime.model.load import LoadedModel, load_target
from metasd_runtime.training.answers import Answerer, answer_all
from metasd_runtime.training.corpus import load_corpus
from metasd_runtime.training.prompts import Prompt


@pytest.fixture(scope="session")
def smollm() -> LoadedModel:
    """The embedded default target in float32; fetched on first use, cached for all tests."""
    return load_target("smollm2-135m", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """A factory of random Llamas: ``tiny_llama(seed, vocab=32, layers=2, ...)``.

    `sharpness` scales the output head: 1 gives nearly uniform distributions, 30 peaked ones.
    Other keywords go to `LlamaConfig`.
    """

    def make(
        seed: int = 0,
        vocab: int = 32,
        layers: int = 2,
        hidden: int = 32,
        heads: int = 4,
        kv_heads: int = 2,
        context: int = 512,
        sharpness: float = 30.0,
        **config: Any,
    ) -> LlamaForCausalLM:
        settings = LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=context,
            **{"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None, **config},
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(settings)
        with torch.no_grad():
            for layer in model.model.layers:  # the default scale leaves attention unfelt
                layer.self_attn.o_proj.weight.mul_(10)
                layer.mlp.down_proj.weight.mul_(10)
            model.lm_head.weight.mul_(sharpness)
        return model.eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def permutation_lm(tiny_llama: Callable[..., LlamaForCausalLM]) -> Callable[..., LlamaForCausalLM]:
    """A factory of models that answer token a with token perm[a], whatever came before.

    One layer whose attention and feed-forward write nothing (o_proj, down_proj zero), unit
    embeddings E, and an output head whose row perm[a] is 10 E[a]: the largest logit after
    token a is perm[a]'s. ``permutation_lm([1, 2, 0])`` counts in a circle of three.
    """

    def make(perm: Sequence[int], seed: int = 0, **config: Any) -> LlamaForCausalLM:
        if sorted(perm) != list(range(len(perm))):
            raise ValueError(f"{perm!r} is not a permutation of 0..{len(perm) - 1}")
        model = tiny_llama(seed, vocab=len(perm), layers=1, hidden=64, **config)
        generator = torch.Generator().manual_seed(seed)
        E = torch.randn(len(perm), 64, generator=generator)
        E /= E.norm(dim=1, keepdim=True)
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(E)
        model.lm_head.weight[torch.tensor(perm)] = 10 * E
        return model

    return make


@pytest.fixture(scope="session")
def world(
    tiny_llama: Callable[..., LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A tiny target, what it answered to twenty prompts, and the corpus that makes.

    The answers lie in the folder that comes second; all three hidden states are kept.
    """
    model = tiny_llama(3, vocab=40, layers=3, sharpness=20.0)
    folder = tmp_path_factory.mktemp("answers")
    draws = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(str(i), torch.randint(0, 40, (3 + i % 7,), generator=draws).tolist())
        for i in range(20)
    ]
    answerer = Answerer(model, {7}, 24, (1, 2, 3))
    answer_all(answerer, {"d": prompts}, folder, held_out=4, batch=8, tokens=10**6, seed=1)
    return model, folder, load_corpus(folder, "d", 10**6)


@pytest.fixture(scope="session")
def letters() -> Callable[[int], PreTrainedTokenizerFast]:
    """A factory of tokenizers for tiny vocabularies: token 0 is "a", token 1 is "b", and so on."""

    def make(vocab: int) -> PreTrainedTokenizerFast:
        characters = [chr(ord("a") + i) if i < 26 else chr(0x4E00 + i) for i in range(vocab)]
        tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
        )

    return make
