"""Tiny random models of the architectures people use, scaled so that they say something."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB = 48
WIDE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GROUPED = {**WIDE, "num_key_value_heads": 2}
WINDOW = {**GROUPED, "sliding_window": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}

ATTENTION = {
    "llama, grouped queries": ("LlamaConfig", GROUPED),
    "llama, tied head": ("LlamaConfig", {**WIDE, "tie_word_embeddings": True}),
    "mistral, window": ("MistralConfig", WINDOW),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen2, window": (
        "Qwen2Config",
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen2 moe": (
        "Qwen2MoeConfig",
        {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 16, "num_experts": 4},
    ),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma": ("GemmaConfig", {**GROUPED, "head_dim": 8, "tie_word_embeddings": False}),
    "gemma2, window": ("Gemma2Config", {**WINDOW, "head_dim": 8, "tie_word_embeddings": False}),
    "gemma3, window": (
        "Gemma3TextConfig",
        {**WINDOW, "head_dim": 8, "tie_word_embeddings": False},
    ),
    "phi": ("PhiConfig", WIDE),
    "phi3": ("Phi3Config", GROUPED),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "gpt-j": (
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 4},
    ),
    "gpt-neox": ("GPTNeoXConfig", WIDE),
    "olmo": ("OlmoConfig", WIDE),
    "olmo2": ("Olmo2Config", WIDE),
    "granite": ("GraniteConfig", GROUPED),
    "opt": (
        "OPTConfig",
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
        },
    ),
    "cohere": ("CohereConfig", GROUPED),
    "stablelm": ("StableLmConfig", GROUPED),
    "starcoder2, window": ("Starcoder2Config", WINDOW),
    "smollm3": ("SmolLM3Config", GROUPED),
    "falcon, one key-value head": (
        "FalconConfig",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    ),
    "bloom, alibi": ("BloomConfig", {"hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "deepseek v3, latent attention": (
        "DeepseekV3Config",
        {
            **WIDE,
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
}


def build(name: str, settings: dict[str, Any], seed: int = 1) -> Any:
    """A causal LM from the name of its config and its settings."""
    config = getattr(transformers, name)(
        vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, pad_token_id=None, **settings
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.25)  # the default scale makes every model repeat one token
    return model.eval().requires_grad_(False)


def small_lm(vocab: int = VOCAB, seed: int = 7) -> LlamaForCausalLM:
    """A one-layer model to draft with."""
    config = LlamaConfig(vocab_size=vocab, **{**WIDE, "num_hidden_layers": 1})
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


STATEFUL = {
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2}),
    "jamba": ("JambaConfig", GROUPED),
    "recurrent gemma": ("RecurrentGemmaConfig", {**WIDE, "lru_width": 32}),
    "qwen3 next": (
        "Qwen3NextConfig",
        {
            **GROUPED,
            "num_experts": 4,
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {**GROUPED, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "rwkv": ("RwkvConfig", {"hidden_size": 32, "num_hidden_layers": 2}),
    "bamba": ("BambaConfig", {**GROUPED, "mamba_n_heads": 8, "mamba_d_head": 8}),
}
