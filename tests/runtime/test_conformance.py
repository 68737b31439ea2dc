"""Greedy equality with plain generate over the architectures people use, tiny and random."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from tiny_models import ATTENTION, GROUPED, STATEFUL, VOCAB, build, small_lm
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BitsAndBytesConfig

from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.hf import output_width

PROMPT = torch.tensor([[5, 9, 3, 5, 9, 3, 7, 5, 9, 3, 5, 9]])
NEW = 24  # three times the sliding windows of the models


def check(model, pool, reference):
    """All arms in turn; none may be disabled on the way."""
    metasd = MetaSD(model, drafters=pool, policy="uniform", reward="bd", draft_length=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        out = metasd.generate(PROMPT, max_new_tokens=NEW, seed=3, return_dict_in_generate=True)
    assert out.sequences.tolist() == reference.tolist()
    return out


def plain(model):
    return model.generate(PROMPT, max_new_tokens=NEW, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("architecture", ATTENTION)
def test_greedy_output_is_plain_generates(architecture):
    model = build(*ATTENTION[architecture])
    reference = plain(model)
    lm = LanguageModel(small_lm(), output_width(model))
    behind = "prompt-lookup:4:3>early-exit:1"
    for arm in ("prompt-lookup", "suffix", "early-exit:1", behind, lm):
        check(model, [arm], reference)
    out = check(model, ["prompt-lookup", "suffix", "early-exit:2", behind, lm, "none"], reference)
    assert sum(arm.accepted for arm in out.statistics.arms) > 0


@pytest.mark.parametrize("architecture", ["llama, grouped queries", "gemma3, window", "gpt2"])
def test_a_drafter_of_the_same_weights_is_always_believed(architecture):
    """Beyond equality: the drafter's cache is right, or something would be rejected."""
    model = build(*ATTENTION[architecture])
    twin = LanguageModel(build(*ATTENTION[architecture]), VOCAB, name="twin")
    metasd = MetaSD(model, drafters=[twin, "prompt-lookup"], policy="uniform", reward="be")
    out = metasd.generate(PROMPT, max_new_tokens=NEW, seed=1, return_dict_in_generate=True)
    rounds = [r for r in out.trace if r.arm == 0]
    assert rounds
    assert all(r.accepted == min(r.drafted, r.emitted) for r in rounds)
    assert out.sequences.tolist() == plain(model).tolist()


@pytest.mark.parametrize("architecture", STATEFUL)
def test_recurrent_and_hybrid_models_are_refused_with_the_reason(architecture):
    name, settings = STATEFUL[architecture]
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, name)(vocab_size=VOCAB, **settings)
    )
    with pytest.raises(ValueError, match="cannot be rolled back"):
        MetaSD(model, drafters=["prompt-lookup"])
    with pytest.raises(ValueError, match="cannot be rolled back"):
        LanguageModel(model, VOCAB)


def test_encoder_decoder_models_are_refused():
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        MetaSD(AutoModelForSeq2SeqLM.from_config(config), drafters=["none"])


@pytest.mark.parametrize("width", [VOCAB - 8, VOCAB + 16])
@pytest.mark.parametrize("do_sample", [False, True])
def test_padded_vocabularies(width, do_sample):
    """A drafter whose vocabulary is padded (or cut) differently never drafts a foreign id."""
    model = build(*ATTENTION["llama, grouped queries"])
    lm = LanguageModel(small_lm(width), VOCAB)
    allowed = list(range(VOCAB - 8))  # the smaller drafter cannot read ids it has no place for
    arguments = {
        "max_new_tokens": NEW,
        "do_sample": do_sample,
        "prefix_allowed_tokens_fn": lambda batch, ids: allowed,
    }
    metasd = MetaSD(model, drafters=[lm], policy="fixed", reward="bd")
    out = metasd.generate(PROMPT, seed=0, return_dict_in_generate=True, **arguments)
    assert max(out.new_tokens) < VOCAB - 8
    assert out.statistics.arms[0].pulls == out.statistics.rounds  # never disabled
    if not do_sample:
        assert (
            out.sequences.tolist() == model.generate(PROMPT, pad_token_id=0, **arguments).tolist()
        )


def test_an_id_the_drafter_cannot_read_disables_it():
    model = build(*ATTENTION["llama, grouped queries"])
    lm = LanguageModel(small_lm(8), VOCAB)
    metasd = MetaSD(model, drafters=[lm, "prompt-lookup"], reward="bd")
    with pytest.warns(RuntimeWarning, match="disabled for this query"):
        out = metasd.generate(PROMPT, max_new_tokens=NEW, seed=0)
    assert out.tolist() == plain(model).tolist()


def test_peft_adapters_are_decoded_with():
    import peft

    model = build(*ATTENTION["llama, grouped queries"])
    bare = plain(model)
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(2)
    adapted = peft.get_peft_model(model, config).eval()
    reference = plain(adapted)
    assert reference.tolist() != bare.tolist()
    check(adapted, ["prompt-lookup", "early-exit:2", "none"], reference)
    metasd = MetaSD(adapted, drafters=["prompt-lookup", "early-exit:2"], reward="bd")
    arguments = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    ours = adapted.generate(input_ids=PROMPT, custom_generate=metasd, **arguments)
    assert ours.tolist() == reference.tolist()


def test_prompt_learning_is_refused():
    import peft

    model = build(*ATTENTION["llama, grouped queries"])
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="prompt learning"):
        MetaSD(peft.get_peft_model(model, config), drafters=["none"])


def test_a_quantised_target_decodes_by_its_own_logits():
    """Int8 with activation scales of the whole block: what is emitted is the verified argmax.

    Such a model rounds a block and a single token differently, so equality with plain decoding,
    which float32 promises, is not promised here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(
            build(*ATTENTION["llama, grouped queries"]), {torch.nn.Linear}, dtype=torch.qint8
        )
    metasd = MetaSD(model, drafters=["prompt-lookup", "early-exit:2"], reward="bd")
    out = metasd.generate(
        PROMPT,
        max_new_tokens=NEW,
        seed=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert [int(step[0].argmax()) for step in out.logits] == out.new_tokens
    assert sum(arm.accepted for arm in out.statistics.arms) > 0


@pytest.mark.parametrize("bits", [8, 4])
def test_a_bitsandbytes_target_decodes_by_its_own_logits(bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    model = build(
        "LlamaConfig", {**GROUPED, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    )
    model.save_pretrained(tmp_path)
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        device_map="cpu",
        quantization_config=BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4),
    )
    metasd = MetaSD(quantised, drafters=["prompt-lookup", "early-exit:2"], reward="bd")
    arguments = {"max_new_tokens": NEW, "seed": 0, "output_logits": True}
    out = metasd.generate(PROMPT, **arguments, return_dict_in_generate=True)
    rows = [PROMPT[0].tolist(), [5, 6], [7] * 9]
    many = metasd.generate_many(rows, **arguments, return_dict_in_generate=True)
    for output in (out, *many):
        assert [int(step[0].argmax()) for step in output.logits] == output.new_tokens
        assert sum(arm.accepted for arm in output.statistics.arms) > 0
