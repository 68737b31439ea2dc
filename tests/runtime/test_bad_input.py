"""Bad input: each has its own message, is refused before any token, and loses nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time

import pytest
import torch
from scripted import Script, greedy_text
from transformers import GenerationConfig

from metasd_bandits import Policy, read_trace
from metasd_bandits.checks import ConfigError
from metasd_runtime.decoding.stopping import Finish
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.metasd import Interrupted, MetaSD

VOCAB = 32
CONTEXT = 64
PROMPT = [1, 2, 3, 4, 5, 1, 2]


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama(0, vocab=VOCAB, layers=3, context=CONTEXT)


@pytest.fixture
def metasd(model):
    return MetaSD(model, drafters=["prompt-lookup", "early-exit:1"], reward="bd")


class Ear:
    """A streamer that only listens."""

    def __init__(self):
        self.given, self.ended = [], False

    def put(self, value):
        self.given += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


REFUSED = {
    "no tokens": ([[]], {}, "the prompt is empty"),
    "an empty list": ([], {}, "the prompt is empty"),
    "three dimensions": (torch.ones(1, 2, 3, dtype=torch.long), {}, r"shape \(1, 2, 3\)"),
    "a batch of nothing": (torch.zeros(0, 3, dtype=torch.long), {}, "shape|prompt"),
    "too long": ([[1] * CONTEXT], {}, f"{CONTEXT} tokens .* context is {CONTEXT}; shorten it"),
    "an id outside": ([[1, VOCAB]], {}, rf"outside the target's vocabulary \[0, {VOCAB}\)"),
    "a negative id": ([[-1, 2]], {}, "outside the target's vocabulary"),
    "fractions": ([[0.5, 1.0]], {}, "ids"),
    "a hole": ([[1, 2]], {"attention_mask": torch.tensor([[1, 0]])}, "attention_mask hides"),
    "a mask too short": ([[1, 2]], {"attention_mask": torch.tensor([[1]])}, "attention_mask has"),
    "max_new_tokens=0": ([PROMPT], {"max_new_tokens": 0}, "max_new_tokens=0"),
    "max_new_tokens<0": ([PROMPT], {"max_new_tokens": -3}, "max_new_tokens=-3"),
    "max_new_tokens=2.5": ([PROMPT], {"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
    "max_new_tokens=True": ([PROMPT], {"max_new_tokens": True}, "max_new_tokens=True"),
    "config's max_new_tokens": (
        [PROMPT],
        {"generation_config": GenerationConfig(max_new_tokens=5), "max_new_tokens": -1},
        "max_new_tokens=-1",
    ),
    "max_length short": ([PROMPT], {"max_length": len(PROMPT)}, "max_length=7 leaves no room"),
    "beams": ([PROMPT], {"num_beams": 4}, "num_beams=4 is not supported"),
    "assistant tokens": (
        [PROMPT],
        {"num_assistant_tokens": 5},
        "num_assistant_tokens=5 is not supported.*draft_length",
    ),
    "a misspelt name": ([PROMPT], {"max_new_token": 5}, "did you mean 'max_new_tokens'"),
    "temperature=0": ([PROMPT], {"do_sample": True, "temperature": 0.0}, "temperature"),
    "top_p=2": ([PROMPT], {"do_sample": True, "top_p": 2.0}, "top_p"),
    "stop strings without tokenizer": ([PROMPT], {"stop_strings": ["x"]}, "tokenizer"),
    "a negative seed": ([PROMPT], {"seed": -1}, "seed=-1"),
    "a fraction for a seed": ([PROMPT], {"seed": 0.5}, "seed=0.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_any_token(metasd, model, tmp_path, name):
    prompt, settings, message = REFUSED[name]
    ear, trace = Ear(), tmp_path / "t.jsonl"
    forwards = metasd.target.forwards
    with pytest.raises(ValueError, match=message):
        metasd.generate(prompt, streamer=ear, trace=trace, **settings)
    assert metasd.target.forwards == forwards
    assert ear.given == []
    assert not trace.exists()
    after = metasd.generate([PROMPT], max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert after[0].tolist() == greedy_text(model, PROMPT, 5)


BUILT = {
    "policy": ({"policy": "unifrm"}, "unknown policy 'unifrm'; did you mean 'uniform'"),
    "hyperparameter": ({"policy": "ucb:bta=1"}, "did you mean 'beta'"),
    "beta": ({"policy": "ucb:beta=-1"}, "beta=-1"),
    "drafter": ({"drafters": ["promt-lookup"]}, "did you mean 'prompt-lookup'"),
    "layers": ({"drafters": ["early-exit:99"]}, r"early-exit layers=99 .*\[1, 2\]"),
    "layers spelt out": ({"drafters": ["early-exit:two"]}, "whole number behind the colon"),
    "n-gram": ({"drafters": ["prompt-lookup:0"]}, "ngram=0"),
    "lm of nothing": ({"drafters": ["lm"]}, "lm:ID or lm:PATH"),
    "twice": ({"drafters": ["suffix", "suffix"]}, "two drafters are called 'suffix'"),
    "reward": ({"reward": "throughpt"}, "did you mean 'throughput'"),
    "draft length": ({"draft_length": 0}, "draft_length=0"),
    "scope": ({"scope": "carry"}, "did you mean 'carried'"),
}


@pytest.mark.parametrize("name", BUILT)
def test_refused_at_construction(model, name):
    options, message = BUILT[name]
    with pytest.raises(ConfigError, match=message):
        MetaSD(model, **{"drafters": ["prompt-lookup"], **options})


def test_an_arm_that_is_not_there_is_refused_before_any_token(model):
    with pytest.raises(ConfigError, match=r"arm=7 .*\[0, 1\]"):
        MetaSD(model, drafters=["suffix", "none"], policy="fixed:arm=7").generate([PROMPT])


def test_a_drafter_called_none_is_refused(model):
    """The name is decoding's own, for where nothing is drafted."""
    with pytest.raises(ConfigError, match="'none'"):
        MetaSD(model, drafters=[Script("none", lambda t, n: [0])])


def test_a_drafter_of_another_vocabulary_is_refused(model, tiny_llama, letters, tmp_path):
    """By its tokenizer: the same ids would mean other words."""
    folder = tmp_path / "other"
    tiny_llama(1, vocab=VOCAB).save_pretrained(folder)
    other = letters(VOCAB - 4)
    other.add_tokens(["w", "x", "y", "unlike"])
    other.save_pretrained(folder)
    with pytest.raises(ConfigError, match="another vocabulary"):
        MetaSD(model, letters(VOCAB), drafters=[f"lm:{folder}"])


@pytest.mark.parametrize("place", ["no/such/folder/t.jsonl", "folder", "full.txt"])
def test_a_trace_that_cannot_be_written_is_refused_before_decoding(metasd, tmp_path, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "full.txt").write_text("a poem\n")
    path, ear = tmp_path / place, Ear()
    forwards = metasd.target.forwards
    with pytest.raises((OSError, ValueError), match=path.name):
        metasd.generate([PROMPT], trace=path, streamer=ear)
    assert metasd.target.forwards == forwards
    assert ear.given == []
    assert (tmp_path / "full.txt").read_text() == "a poem\n"


def test_a_trace_of_other_arms_is_left_as_it_was(model, metasd, tmp_path):
    path = tmp_path / "t.jsonl"
    metasd.generate([PROMPT], max_new_tokens=3, trace=path)
    before = path.read_bytes()
    other = MetaSD(model, drafters=["suffix"], reward="bd")
    with pytest.raises(ValueError, match="arms"):
        other.generate([PROMPT], max_new_tokens=3, trace=path)
    assert path.read_bytes() == before
    metasd.generate([PROMPT], max_new_tokens=3, trace=path)  # the same arms go on
    assert path.read_bytes().startswith(before)
    assert {r.query for r in read_trace(path)} == {"0", "1"}


# -- Ctrl-C --------------------------------------------------------------------------------------


def interrupted(metasd, tmp_path, **options):
    """What a generation left that was interrupted: its output, its trace file, its stream."""
    trace, ear = tmp_path / "t.jsonl", Ear()
    with pytest.raises(Interrupted) as caught:
        metasd.generate(
            [PROMPT],
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            trace=trace,
            streamer=ear,
            **options,
        )
    output = caught.value.output
    assert ear.ended
    assert output.finish == Finish.INTERRUPTED
    assert output.statistics.tokens == len(output.new_tokens)
    assert ear.given == [*PROMPT, *output.new_tokens]
    assert [r.emitted for r in read_trace(trace)] == [r.emitted for r in output.trace]
    assert sum(r.emitted for r in output.trace) == len(output.new_tokens)
    return output


def test_a_real_ctrl_c_keeps_the_trace(model, tmp_path):
    """Pressed while the third draft is being made, which lasts until then."""
    begun = threading.Event()

    def press():
        assert begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    calls = itertools.count()

    def slow(tokens, n):
        if next(calls) == 2:
            begun.set()
            while True:  # in small steps: the signal may reach another thread than this
                time.sleep(0.01)
        return []

    metasd = MetaSD(model, drafters=[Script("slow", slow)], policy="fixed", reward="bd")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        threading.Thread(target=press).start()
        output = interrupted(metasd, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(output.trace) == 2
    answer = greedy_text(model, PROMPT, 40)
    assert output.sequences[0].tolist() == answer[: output.sequences.shape[1]]
    for line in (tmp_path / "t.jsonl").read_text().splitlines():
        json.loads(line)


PLACES = {
    "while selecting": ("metasd_runtime.decoding.router.Router.select", 3),
    "while verifying": ("metasd_runtime.decoding.judged.verify", 3),
    "in the target's forward": ("metasd_runtime.model.target.CachedModel.forward", 9),
    "behind the commit": ("metasd_runtime.decoding.router.Router.update", 2),
    "while drafters are told": ("metasd_runtime.decoding.router.Router.commit", 2),
    "before the first round": ("metasd_runtime.decoding.router.Router.start", 0),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_anywhere_leaves_one_story(model, tmp_path, place):
    """Text, trace and stream tell of the same rounds, and the session goes on."""
    name, after = PLACES[place]
    metasd = MetaSD(model, drafters=["prompt-lookup", "early-exit:1"], reward="bd", scope="carried")
    module, attribute = name.rsplit(".", 1)
    if module.rsplit(".", 1)[1][0].isupper():
        module, owner = module.rsplit(".", 1)
        holder = getattr(__import__(module, fromlist=["_"]), owner)
    else:
        holder = __import__(module, fromlist=["_"])
    real, calls = getattr(holder, attribute), iter(range(1000))

    def pressed(*args, **kwargs):
        if next(calls) == after:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, attribute, pressed)
        output = interrupted(metasd, tmp_path)
    answer = greedy_text(model, PROMPT, 40)
    assert output.sequences[0].tolist() == answer[: output.sequences.shape[1]]
    again = metasd.generate([PROMPT], max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert again[0].tolist() == answer


def test_the_users_callback_may_stop_everything(metasd, tmp_path):
    """An exception from a callback passes through; the trace is whole up to its round."""
    trace = tmp_path / "t.jsonl"
    rounds = []

    def callback(round_):
        rounds.append(round_)
        if len(rounds) == 3:
            raise OverflowError("enough")

    with pytest.raises(OverflowError, match="enough"):
        metasd.generate([PROMPT], max_new_tokens=30, trace=trace, on_round=callback)
    assert len(read_trace(trace)) == 2


def test_a_policy_of_three_methods_cannot_be_carried_and_says_so(model):
    class Mine(Policy):
        name = "mine"

        def reset(self, n_arms, seed=None):
            self.n = n_arms

        def select(self, available=None):
            return 0

        def update(self, arm, reward, **kwargs):
            pass

    metasd = MetaSD(model, drafters=["suffix"], reward="bd", policy=Mine(), scope="carried")
    metasd.generate([PROMPT], max_new_tokens=3)
    with pytest.raises((TypeError, ConfigError), match="carried"):
        metasd.generate([PROMPT], max_new_tokens=3)


def test_a_drafter_object_without_weights_for_this_vocabulary(model, tiny_llama):
    """An object of the user's own goes unchecked by name, and is cut or padded to fit."""
    lm = LanguageModel(tiny_llama(1, vocab=VOCAB + 8, layers=1), VOCAB)
    metasd = MetaSD(model, drafters=[lm], reward="bd")
    text = metasd.generate([PROMPT], max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert text[0].tolist() == greedy_text(model, PROMPT, 20)
