"""``model.generate(custom_generate=metasd)``: every argument is honoured or refused by name."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import warnings

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AsyncTextIteratorStreamer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from metasd_bandits.checks import ConfigError
from metasd_runtime.decoding.stopping import Finish
from metasd_runtime.generation import settings
from metasd_runtime.generation.custom_generate import GenerateOutput
from metasd_runtime.metasd import MetaSD

VOCAB = 26
POOL = ["prompt-lookup", "suffix", "early-exit:1", "none"]
PLAIN = {"pad_token_id": 0, "do_sample": False}


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama(seed=5, vocab=VOCAB, sharpness=12.0)


@pytest.fixture(scope="module")
def tokenizer(letters):
    tokenizer = letters(VOCAB)
    tokenizer.add_special_tokens({"pad_token": "a"})
    tokenizer.padding_side = "left"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


@pytest.fixture(scope="module")
def metasd(model, tokenizer):
    return MetaSD(model, tokenizer, drafters=POOL, reward="bd")


@pytest.fixture(scope="module")
def ids():
    return torch.tensor([[3, 7, 3, 7, 3, 9, 1, 3, 7]])


class NoVowels(LogitsProcessor):
    """In place, as careless processors do it."""

    def __call__(self, input_ids, scores):
        scores[:, [0, 4, 8, 14, 20]] = -float("inf")
        return scores


class AfterThree(StoppingCriteria):
    """Stops behind the third token whose score was above a bound that depends on the scores."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(scores[-1].clone())
        return torch.tensor([len(scores) >= 3])


HONOURED = {
    "max_new_tokens": {"max_new_tokens": 17},
    "max_length": {"max_length": 24},
    "default length": {},
    "repetition_penalty": {"max_new_tokens": 25, "repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"max_new_tokens": 25, "no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"max_new_tokens": 25, "encoder_repetition_penalty": 1.8},
    "encoder_no_repeat_ngram_size": {"max_new_tokens": 25, "encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"max_new_tokens": 25, "bad_words_ids": [[3], [7, 9]]},
    "sequence_bias": {"max_new_tokens": 25, "sequence_bias": [[[4], 8.0]]},
    "suppress_tokens": {"max_new_tokens": 25, "suppress_tokens": [1, 2, 3]},
    "begin_suppress_tokens": {"max_new_tokens": 25, "begin_suppress_tokens": list(range(20))},
    "forced_eos_token_id": {"max_new_tokens": 9, "forced_eos_token_id": 11},
    "min_new_tokens": {"max_new_tokens": 25, "min_new_tokens": 12, "eos_token_id": [2, 5, 9]},
    "min_length": {"max_new_tokens": 25, "min_length": 18, "eos_token_id": [2, 5, 9]},
    "eos_token_id": {"max_new_tokens": 25, "eos_token_id": [2, 5, 9, 14]},
    "eos_token_id, a tuple": {"max_new_tokens": 25, "eos_token_id": (2, 5, 9, 14)},
    "eos_token_id, an array": {"max_new_tokens": 25, "eos_token_id": np.array([2, 5, 9, 14])},
    "eos_token_id, a tensor": {"max_new_tokens": 25, "eos_token_id": torch.tensor([5, 14])},
    "exponential_decay": {
        "max_new_tokens": 25,
        "eos_token_id": 2,
        "exponential_decay_length_penalty": (4, 1.5),
    },
    "remove_invalid_values": {"max_new_tokens": 12, "remove_invalid_values": True},
    "logits_processor": {
        "max_new_tokens": 25,
        "logits_processor": LogitsProcessorList([NoVowels()]),
    },
    "prefix_allowed_tokens_fn": {
        "max_new_tokens": 25,
        "prefix_allowed_tokens_fn": lambda row, text: [(int(text[-1]) + k) % 26 for k in (1, 3)],
    },
    "stop_strings": {"max_new_tokens": 25, "stop_strings": ["g", "nw"]},
    "generation_config": {
        "generation_config": GenerationConfig(max_new_tokens=13, repetition_penalty=1.3)
    },
}


@pytest.mark.parametrize("name", HONOURED)
def test_greedy_arguments_mean_what_they_mean_in_plain_generate(
    model, metasd, tokenizer, ids, name
):
    arguments = {**PLAIN, **HONOURED[name]}
    if "generation_config" in arguments:
        arguments.pop("do_sample")
        arguments.pop("pad_token_id")
    if "stop_strings" in arguments:
        arguments["tokenizer"] = tokenizer
    plain = model.generate(ids, **arguments)
    ours = model.generate(ids, custom_generate=metasd, **arguments)
    assert ours.tolist() == plain.tolist()
    assert metasd.generate(ids, **arguments).tolist() == plain.tolist()


def test_scores_and_logits_are_plain_generates(model, metasd, ids):
    arguments = {
        **PLAIN,
        "max_new_tokens": 12,
        "temperature": None,
        "repetition_penalty": 1.4,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    plain = model.generate(ids, **arguments)
    ours = model.generate(ids, custom_generate=metasd, output_logprobs=True, **arguments)
    assert isinstance(ours, GenerateOutput)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        mine, theirs = getattr(ours, name), getattr(plain, name)
        assert len(mine) == len(theirs) == 12
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), rtol=1e-4, atol=1e-4)
    new = ours.sequences[0, ids.shape[1] :]
    for step, token in enumerate(new):
        for scores, logprobs in ((plain.scores, ours.logprobs), (plain.logits, ours.raw_logprobs)):
            expected = scores[step][0].log_softmax(-1)[token]
            assert logprobs[0, step] == pytest.approx(float(expected), abs=1e-4)
    torch.testing.assert_close(
        model.compute_transition_scores(ours.sequences, ours.scores),
        model.compute_transition_scores(plain.sequences, plain.scores),
        rtol=1e-4,
        atol=1e-4,
    )


def test_stopping_criteria_see_the_scores(model, metasd, ids):
    plain, ours = AfterThree(), AfterThree()
    arguments = {
        **PLAIN,
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    theirs = model.generate(ids, stopping_criteria=StoppingCriteriaList([plain]), **arguments)
    mine = model.generate(
        ids, stopping_criteria=StoppingCriteriaList([ours]), custom_generate=metasd, **arguments
    )
    assert mine.sequences.tolist() == theirs.sequences.tolist()
    assert mine.finishes == (Finish.CRITERIA,)
    torch.testing.assert_close(ours.seen, plain.seen, rtol=1e-4, atol=1e-4)


def test_a_batch_with_left_padding_equals_plain_generate(model, metasd, tokenizer):
    batch = tokenizer(["dhdhdjb", "kqkq", "bcdefghij"], return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    arguments = {**PLAIN, "max_new_tokens": 15, "eos_token_id": [2, 6, 11]}
    plain = model.generate(**batch, **arguments)
    assert model.generate(**batch, custom_generate=metasd, **arguments).tolist() == plain.tolist()


def test_return_sequences_are_rows_of_their_own(model, metasd, ids):
    arguments = {
        "do_sample": True,
        "max_new_tokens": 10,
        "num_return_sequences": 3,
        "pad_token_id": 0,
        "eos_token_id": [1, 2, 3],
        "seed": 4,
        "pool": ["prompt-lookup", "early-exit:1"],  # suffix remembers, so its drafts differ
        "custom_generate": metasd,
    }
    three = model.generate(ids, **arguments)
    assert three.shape[0] == 3
    assert len({tuple(row) for row in three.tolist()}) == 3
    assert model.generate(ids, **arguments).tolist() == three.tolist()
    for name in ("custom_generate", "num_return_sequences"):
        arguments.pop(name)
    one = metasd.generate(ids, **arguments).tolist()[0]
    assert three[0].tolist()[: len(one)] == one  # row 0 of many is the row alone


def test_a_prefix_function_is_told_the_prompts_place_in_the_batch(model, metasd, ids):
    arguments = {
        "do_sample": True,
        "num_return_sequences": 2,
        "max_new_tokens": 4,
        "pad_token_id": 0,
        "prefix_allowed_tokens_fn": lambda batch, text: [batch + 5],
    }
    two = ids.repeat(2, 1)
    ours = model.generate(two, custom_generate=metasd, **arguments)
    assert ours[:, ids.shape[1] :].tolist() == [[5] * 4, [5] * 4, [6] * 4, [6] * 4]
    if transformers.__version__.startswith("5.24"):  # older ones tell the row instead
        assert ours.tolist() == model.generate(two, **arguments).tolist()


def test_streamers(model, metasd, tokenizer, ids, capsys):
    arguments = {**PLAIN, "max_new_tokens": 12, "custom_generate": metasd}
    expected = tokenizer.decode(model.generate(ids, **arguments)[0, ids.shape[1] :])

    model.generate(ids, streamer=TextStreamer(tokenizer, skip_prompt=True), **arguments)
    assert capsys.readouterr().out == expected + "\n"

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    thread = threading.Thread(
        target=model.generate, args=(ids,), kwargs={"streamer": streamer, **arguments}
    )
    thread.start()
    assert "".join(streamer) == expected
    thread.join()

    async def collect():
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(
            None, lambda: model.generate(ids, streamer=streamer, **arguments)
        )
        pieces = [piece async for piece in streamer]
        await job
        return "".join(pieces)

    assert asyncio.run(collect()) == expected


def test_a_refused_call_lets_its_streamers_reader_go(model, metasd, tokenizer, ids):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    with pytest.raises(ConfigError, match="use_cache"):
        model.generate(ids, use_cache=False, streamer=streamer, custom_generate=metasd)
    assert "".join(streamer) == ""


def test_streamed_pieces_are_those_of_plain_generate(model, metasd, tokenizer, ids):
    class Pieces(TextStreamer):
        def __init__(self):
            super().__init__(tokenizer)
            self.pieces = []

        def on_finalized_text(self, text, stream_end=False):
            self.pieces.append((text, stream_end))

    plain, ours = Pieces(), Pieces()
    model.generate(ids, streamer=plain, max_new_tokens=9, **PLAIN)
    model.generate(ids, streamer=ours, max_new_tokens=9, custom_generate=metasd, **PLAIN)
    assert ours.pieces == plain.pieces


REFUSED = {
    "num_beams": {"num_beams": 2},
    "num_assistant_tokens": {"num_assistant_tokens": 5},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
    "guidance_scale": {"guidance_scale": 1.5},
    "low_memory": {"low_memory": True},
    "length_penalty": {"length_penalty": 2.0},
    "negative_prompt_ids": {"negative_prompt_ids": torch.tensor([[1, 2]])},
    "synced_gpus": {"synced_gpus": True},
    "position_ids": {"position_ids": torch.arange(9)[None]},
    "output_scores": {"output_scores": True},
    "num_return_sequences": {"num_return_sequences": 2, "num_beams": 2},
    "draft_length": {"draft_length": 0},
    "pool": {"pool": ["prompt-lokup"]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_refused_by_name(model, metasd, ids, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match=name if name != "num_return_sequences" else "num_"):
            model.generate(ids, custom_generate=metasd, max_new_tokens=4, **PLAIN, **REFUSED[name])


@pytest.fixture
def of_model(model):
    """The model's own settings, put back afterwards."""
    before = model.generation_config
    model.generation_config = copy.deepcopy(before)
    yield model.generation_config
    model.generation_config = before


@pytest.mark.parametrize("storage", ["static", "sliding_window", "hybrid_chunked"])
def test_a_models_own_cache_is_honoured_where_only_storage_differs(
    model, metasd, ids, of_model, storage
):
    arguments = {**PLAIN, "max_new_tokens": 12}
    plain = model.generate(ids, **arguments)
    of_model.cache_implementation = storage
    assert metasd.generate(ids, **arguments).tolist() == plain.tolist()
    assert model.generate(ids, custom_generate=metasd, **arguments).tolist() == plain.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_implementation", "quantized"),
        ("cache_implementation", "offloaded"),
        ("num_beams", 3),
    ],
)
def test_what_a_models_own_settings_ask_in_vain_says_what_to_write(
    model, metasd, ids, of_model, name, value
):
    setattr(of_model, name, value)
    with pytest.raises(ConfigError) as error:
        metasd.generate(ids, max_new_tokens=4, **PLAIN)
    remedy = f"model.generation_config.{name} = None"
    assert str(error.value).endswith(remedy)
    exec(remedy, {"model": model})
    assert metasd.generate(ids, max_new_tokens=4, **PLAIN).shape == (1, ids.shape[1] + 4)


def test_an_assistant_is_refused_by_name(model, metasd, tiny_llama, ids):
    with pytest.raises(ConfigError, match="assistant_model"):
        model.generate(
            ids, custom_generate=metasd, max_new_tokens=4, assistant_model=tiny_llama(seed=1)
        )


def test_an_unknown_argument_is_refused(model, metasd, ids):
    with pytest.raises(ValueError, match="max_new_tokns"):
        model.generate(ids, custom_generate=metasd, max_new_tokns=4)
    with pytest.raises(ConfigError, match="did you mean 'max_new_tokens'"):
        metasd.generate(ids, max_new_tokns=4)


def test_another_model_is_refused(metasd, tiny_llama, ids):
    with pytest.raises(ConfigError, match="another model"):
        tiny_llama(seed=9).generate(ids, custom_generate=metasd, max_new_tokens=4)


def test_outside_generate_it_says_where_to_go(model, metasd, ids):
    with pytest.raises(ConfigError, match=r"metasd\.generate"):
        metasd(model, ids)


def test_every_attribute_of_the_installed_config_is_settled():
    """A new transformers with a new setting fails here, instead of ignoring it for its users."""
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert known <= settings.HONOURED | settings.REFUSED.keys(), transformers.__version__
    assert not settings.HONOURED & settings.REFUSED.keys()


def test_a_generation_config_file_is_read(model, metasd, ids, tmp_path):
    GenerationConfig(max_new_tokens=7, repetition_penalty=1.5, pad_token_id=0).save_pretrained(
        tmp_path
    )
    config = GenerationConfig.from_pretrained(tmp_path)
    plain = model.generate(ids, generation_config=config)
    ours = model.generate(ids, generation_config=config, custom_generate=metasd)
    assert ours.tolist() == plain.tolist()
    assert ours.shape[1] == ids.shape[1] + 7


@pytest.mark.parametrize("prompt", ["dhdhdjb", [{"role": "user", "content": "dhdhdjb"}]])
def test_pipeline(model, metasd, tokenizer, prompt):
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    arguments = {**PLAIN, "max_new_tokens": 12, "max_length": None}
    plain = generator(prompt, **arguments)
    assert generator(prompt, custom_generate=metasd, **arguments) == plain
    plain = generator([prompt] * 2, batch_size=2, stop_sequence="g", **arguments)
    ours = generator(
        [prompt] * 2, batch_size=2, stop_sequence="g", custom_generate=metasd, **arguments
    )
    assert ours == plain


def test_the_class_keeps_its_own_signature():
    assert "draft_length" in inspect.signature(MetaSD).parameters
