"""Stopping and limits: nothing behind a stop is emitted, counted or streamed; limits are exact.

Each case is held against the library's plain decoding, for every kind of drafter.
"""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Script, greedy_text, run
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, TextStreamer

from metasd_runtime.decoding.stopping import Finish, Stopping
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target

N = 26
SHIFT = [(i + 1) % N for i in range(N)]  # a -> b -> ... -> z -> a: greedy output is known


@pytest.fixture(scope="module")
def alphabet(permutation_lm):
    """A model that recites the alphabet."""
    return permutation_lm(SHIFT)


class Oracle(Script):
    """Drafts exactly what the alphabet model will say: every draft is accepted."""

    def __init__(self) -> None:
        super().__init__("oracle", lambda t, n: [(t[-1] + 1 + j) % N for j in range(n)])


class HalfRight(Script):
    """Right twice, then wrong."""

    def __init__(self) -> None:
        super().__init__(
            "half-right",
            lambda t, n: [(t[-1] + 1 + j) % N if j < 2 else t[-1] for j in range(n)],
        )


def pools(model):
    return {
        "oracle": [Oracle()],
        "half-right": [HalfRight()],
        "prompt-lookup": ["prompt-lookup"],
        "suffix": ["suffix"],
        "lm": [LanguageModel(model, N)],
        "none": ["none"],
        "pool": [Oracle(), HalfRight(), "prompt-lookup", "suffix", "none"],
    }


KINDS = ["oracle", "half-right", "prompt-lookup", "suffix", "lm", "none", "pool"]


@pytest.fixture(params=KINDS)
def metasd(request, alphabet, letters):
    return MetaSD(alphabet, letters(N), drafters=pools(alphabet)[request.param], reward="bd")


PROMPT = [0, 1, 2, 3, 0, 1]  # "abcdab": looking up drafts "cdab", right twice


def generate(metasd, prompt=PROMPT, **settings):
    settings = {"eos_token_id": None, "do_sample": False, **settings}
    output = metasd.generate([prompt], return_dict_in_generate=True, **settings)
    # Accounting ends where the text does.
    assert sum(r.emitted for r in output.trace) == len(output.new_tokens)
    assert output.statistics.tokens == len(output.new_tokens)
    assert all(r.accepted <= min(r.drafted, r.emitted) for r in output.trace)
    return output


def says(n, start=2):
    return [(start + i) % N for i in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 11, 40])
def test_max_new_tokens_is_exact(metasd, n):
    output = generate(metasd, max_new_tokens=n)
    assert output.new_tokens == says(n)
    assert output.finish == Finish.LENGTH


@pytest.mark.parametrize("length", [7, 9, 20, 21])
def test_max_length_counts_the_prompt(metasd, length):
    """20, the library's default value, included: given by the user it is a limit like any other."""
    output = generate(metasd, max_length=length)
    assert output.sequences.shape[1] == length
    assert output.new_tokens == says(length - len(PROMPT))


def test_the_default_is_twenty_new_tokens(metasd):
    assert len(generate(metasd).new_tokens) == 20


@pytest.mark.parametrize("stop", range(2, 15))
def test_eos_anywhere_in_a_block(metasd, stop):
    output = generate(metasd, max_new_tokens=30, eos_token_id=stop)
    assert output.new_tokens == says(stop - 1)
    assert output.finish == Finish.EOS


@pytest.mark.parametrize("stops", [[7, 5], [5, 25, 7], [12]])
def test_the_first_of_several_eos(metasd, stops):
    output = generate(metasd, max_new_tokens=30, eos_token_id=stops)
    assert output.new_tokens == says(min(stops) - 1)
    assert output.finish == Finish.EOS


@pytest.mark.parametrize("cap", range(1, 8))
def test_a_stop_and_a_cap_in_one_block(metasd, cap):
    """Whichever comes first; at the same token it is the stop that ended the text."""
    output = generate(metasd, max_new_tokens=cap, eos_token_id=6)
    assert output.new_tokens == says(min(cap, 5))
    assert output.finish == (Finish.EOS if cap >= 5 else Finish.LENGTH)


@pytest.mark.parametrize(
    "strings", [["e"], ["ef"], ["de", "f"], ["zabc"], "gh", ["nowhere to be seen"]]
)
def test_stop_strings_equal_plain(metasd, alphabet, letters, strings):
    plain = greedy_text(alphabet, PROMPT, 30, stop_strings=strings, tokenizer=letters(N))
    output = generate(metasd, max_new_tokens=30, stop_strings=strings)
    assert output.sequences[0].tolist() == plain
    stopped = len(plain) < len(PROMPT) + 30
    assert output.finish == (Finish.CRITERIA if stopped else Finish.LENGTH)


class EndsWith(StoppingCriteria):
    """A criterion of the user's own; it keeps the prefixes that it was shown."""

    def __init__(self, token):
        self.token, self.seen = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids[0].tolist())
        return torch.full((input_ids.shape[0],), bool(input_ids[0, -1] == self.token))


@pytest.mark.parametrize("token", [4, 5, 9])
def test_custom_criteria_see_every_prefix_in_order(metasd, token):
    criterion = EndsWith(token)
    output = generate(
        metasd, max_new_tokens=30, stopping_criteria=StoppingCriteriaList([criterion])
    )
    text = [*PROMPT, *says(token - 1)]
    assert output.sequences[0].tolist() == text
    assert output.finish == Finish.CRITERIA
    assert criterion.seen == [text[:i] for i in range(len(PROMPT) + 1, len(text) + 1)]


def test_max_time(alphabet):
    slow = Script("slow", lambda t, n: time.sleep(0.02) or [(t[-1] + 1) % N])
    metasd = MetaSD(alphabet, drafters=[slow], reward="bd")
    output = generate(metasd, max_new_tokens=400, max_time=0.1)
    assert output.finish == Finish.CRITERIA
    assert 1 <= len(output.new_tokens) < 400
    assert output.new_tokens == says(len(output.new_tokens))


def test_the_models_context_is_a_limit(permutation_lm):
    metasd = MetaSD(permutation_lm(SHIFT, context=16), drafters=[Oracle()], reward="bd")
    output = generate(metasd, max_new_tokens=100)
    assert output.sequences.shape[1] == 16
    assert output.finish == Finish.CONTEXT


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 5), min_size=1),
    st.sets(st.integers(0, N - 1), max_size=3),
    st.integers(1, 40),
    st.integers(1, 7),
)
def test_any_draft_any_stop(alphabet, rights, eos, n, draft_length):
    """Random blocks against the rule itself; the cache holds no token behind a stop."""
    turns = iter(rights * 60)

    def say(tokens, k):
        right = next(turns)
        return [(tokens[-1] + 1 + j) % N if j < right else 0 for j in range(k)]

    target = Target(alphabet)
    stopping = Stopping(len(PROMPT) + n, None, frozenset(eos))
    text, rounds = run(
        target, [Script("s", say)], PROMPT, n, stopping=stopping, draft_length=draft_length
    )
    expected = says(n)
    cut = next((i + 1 for i, token in enumerate(expected) if token in eos), n)
    assert text == [*PROMPT, *expected[:cut]]
    assert target.length == len(text) - 1
    assert sum(r.emitted for r in rounds) == cut
    assert sum(r.accepted for r in rounds) <= cut


# -- Streaming -------------------------------------------------------------------------------


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.ends = 0

    def put(self, value):
        assert not self.ends
        self.given.append(value.reshape(-1).tolist())

    def end(self):
        self.ends += 1


def test_a_streamer_gets_the_prompt_then_exactly_the_output(metasd):
    recorder = Recorder()
    output = generate(metasd, max_new_tokens=30, eos_token_id=9, streamer=recorder)
    assert recorder.given[0] == PROMPT
    assert [t for given in recorder.given[1:] for t in given] == output.new_tokens == says(8)
    assert recorder.ends == 1


def test_text_streamer(metasd, letters, capsys):
    streamer = TextStreamer(letters(N), skip_prompt=True)
    generate(metasd, max_new_tokens=9, streamer=streamer)
    assert capsys.readouterr().out == "cdefghijk\n"


def test_text_iterator_streamer(metasd, letters):
    streamer = TextIteratorStreamer(letters(N), timeout=10)
    generate(metasd, max_new_tokens=9, stop_strings=["gh"], streamer=streamer)
    assert "".join(streamer) == "abcdabcdefgh"


def test_a_streamer_is_ended_when_decoding_breaks(alphabet):
    class Broken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise RuntimeError("broken criterion")

    recorder = Recorder()
    metasd = MetaSD(alphabet, drafters=[Oracle()], reward="bd")
    with pytest.raises(RuntimeError, match="broken criterion"):
        generate(metasd, stopping_criteria=StoppingCriteriaList([Broken()]), streamer=recorder)
    assert recorder.ends == 1
    assert generate(metasd, max_new_tokens=5).new_tokens == says(5)  # nothing is left behind
