"""Sampling as users meet it: every processor honoured, at its true prefix, and seeds that hold."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache

import pytest
import torch
from enumeration import CopyDrafter, TableDrafter, TableTarget
from scipy import stats
from scripted import ByTurns, Script
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from metasd_runtime.decoding.loop import Query, decode
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.generation.settings import settle
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target

VOCAB = 16
PROMPT = [3, 1, 4, 1, 5, 3, 1]
DRAWS = 200


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama(0, vocab=VOCAB, sharpness=3.0)


@pytest.fixture(scope="module")
def logits(model):
    """The model's own logits behind the prompt."""
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, -1]


@pytest.fixture(scope="module")
def other(tiny_llama):
    return tiny_llama(1, vocab=VOCAB, layers=1, sharpness=2.0)


@pytest.fixture(scope="module")
def pool(other):
    return ["prompt-lookup", "early-exit:1", LanguageModel(other, VOCAB), "none"]


WARPERS = {
    "plain": {},
    "temperature": {"temperature": 0.4},
    "hot": {"temperature": 1.8},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.2},
    "top_p wide": {"top_p": 0.8},
    "min_p": {"min_p": 0.4},
    "typical_p": {"typical_p": 0.3},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[0], [2], [7]]},
    "suppress_tokens": {"suppress_tokens": [1, 3, 9]},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": [2, 5, 6]},
    "sequence_bias": {"sequence_bias": [[[8], 4.0]]},
    "together": {"temperature": 1.3, "top_k": 8, "top_p": 0.7, "repetition_penalty": 1.4},
}


@pytest.mark.parametrize("name", WARPERS)
def test_first_tokens_follow_the_librarys_processors(model, other, name):
    """A histogram over seeds: inside the support of p, and by chi-square drawn from it.

    p is what the library's own `generate` reports as its scores at that position.
    """
    settings = {"top_k": 0, "eos_token_id": None, **WARPERS[name]}
    ids = torch.tensor([PROMPT])
    plain = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=0,
        max_new_tokens=1,
        do_sample=True,
        output_scores=True,
        return_dict_in_generate=True,
        **({**settings, "min_new_tokens": 1} if "min_new_tokens" in settings else settings),
    )
    p = plain.scores[0][0].double().softmax(-1)
    counts = first_tokens(model, other, {**settings, "do_sample": True, "max_new_tokens": 5})
    outside = {token: n for token, n in counts.items() if p[token] == 0}
    assert not outside
    _assert_drawn_from(p, counts)


def first_tokens(model, other, settings) -> Counter[int]:
    """The first token of each seed's decode, under the processors that `generate` settles.

    The models' logits are looked up (`TableTarget`), all else is the decoder as it runs.
    """
    sampling, stopping, _ = settle(Target(model), PROMPT, settings=settings)
    target = TableTarget(_remembered(model), VOCAB)
    drafters = [
        TableDrafter("lm", _remembered(other)),
        CopyDrafter("copy", lambda text: text[-4]),
        TableDrafter("itself", _remembered(model)),
    ]
    router = Router(drafters, "uniform", "bd", draft_length=2)
    counts: Counter[int] = Counter()
    for seed in range(DRAWS):
        how = Sampling(sampling.processors, True, seed)
        query = Query("0", list(PROMPT), how, stopping, seed, plain_step=1.0)
        next(decode(query, target, router))
        counts[query.tokens[len(PROMPT)]] += 1
    return counts


@cache
def _remembered(model):
    """Logits of the model behind a text, each computed once."""

    @cache
    def logits(text):
        with torch.inference_mode():
            return model(torch.tensor([text])).logits[0, -1].tolist()

    return logits


def test_a_narrow_nucleus_through_the_front_door(model, pool, logits):
    """top_p = .2, all the way: no first token outside the nucleus."""
    metasd = MetaSD(model, drafters=pool, policy="uniform", reward="bd", draft_length=3)
    nucleus = TopPLogitsWarper(0.2)(None, logits[None])[0] > -math.inf
    for seed in range(60):
        text = metasd.generate(
            [PROMPT], max_new_tokens=2, do_sample=True, top_p=0.2, top_k=0, seed=seed
        )
        assert nucleus[text[0, len(PROMPT)]]


def _assert_drawn_from(p, counts):
    draws = sum(counts.values())
    often = [i for i in range(len(p)) if p[i] * draws >= 5]
    observed = [counts[i] for i in often]
    expected = [float(p[i]) * draws for i in often]
    if draws - sum(expected) > 1e-6 * draws:
        observed.append(draws - sum(observed))
        expected.append(draws - sum(expected))
    if len(observed) > 1:
        assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-3


def test_the_histogram_can_fail(model, other, logits):
    """Drawing from the unprocessed distribution is noticed."""
    p = (logits.double() / 0.4).softmax(-1)
    counts = first_tokens(model, other, {"top_k": 0, "do_sample": True, "max_new_tokens": 5})
    with pytest.raises(AssertionError):
        _assert_drawn_from(p, counts)


def test_a_sharp_temperature_stays_sharp_for_the_joint_law(permutation_lm):
    """At a low temperature the alphabet model recites, whatever its drafters say."""
    shift = [(i + 1) % 8 for i in range(8)]
    drafters = [
        Script("wrong", lambda t, n: [0] * n),
        Script("half", lambda t, n: [(t[-1] + 1) % 8] * n),
    ]
    metasd = MetaSD(permutation_lm(shift), drafters=drafters, reward="be")
    text = metasd.generate([[0, 1]], max_new_tokens=20, do_sample=True, temperature=0.05, seed=0)
    assert text[0].tolist() == [i % 8 for i in range(22)]


class Prefixes(LogitsProcessor):
    """Keeps every prefix it is shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.seen.append(input_ids[0].tolist())
        return scores


@pytest.mark.parametrize("do_sample", [False, True])
def test_processors_see_true_prefixes(model, do_sample):
    """A processor is shown each prefix of the text, once and in order, and no rejected draft."""
    processor = Prefixes()
    drafter = Script("junk", lambda tokens, n: [9, 9, 2])
    metasd = MetaSD(model, drafters=[drafter], reward="bd", draft_length=3)
    text = metasd.generate(
        [PROMPT],
        max_new_tokens=12,
        do_sample=do_sample,
        seed=0,
        logits_processor=LogitsProcessorList([processor]),
    )[0].tolist()
    assert processor.seen == [text[:n] for n in range(len(PROMPT), len(text))]


@pytest.mark.parametrize("penalty", [1.5, 5.0])
def test_the_repetition_penalty_never_sees_a_rejected_draft(model, penalty):
    """Greedy with a penalty and drafts that are all wrong: equal to plain decoding."""
    ids = torch.tensor([PROMPT])
    plain = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=0,
        eos_token_id=None,
        max_new_tokens=24,
        do_sample=False,
        repetition_penalty=penalty,
    )
    drafters = [
        Script("every token once", lambda t, n: list(range(n))),
        Script("others", lambda t, n: [15 - j for j in range(n)]),
        "prompt-lookup",
        "early-exit:1",
    ]
    metasd = MetaSD(model, drafters=drafters, policy=ByTurns([0, 1, 2, 3]), reward="bd")
    text = metasd.generate(
        ids, max_new_tokens=24, do_sample=False, repetition_penalty=penalty, eos_token_id=None
    )
    assert torch.equal(text, plain)


class Windowed(TemperatureLogitsWarper):
    """A user's warper built on the library's, that looks at the text as well."""

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0]
        scores = super().__call__(input_ids, scores).clone()
        scores[:, input_ids[0, -1]] = -math.inf
        return scores


def test_a_subclass_of_a_warper_is_shown_its_prefix(model):
    """Being a kind of temperature does not make it blind to the text."""
    metasd = MetaSD(
        model, drafters=[Script("same", lambda t, n: [t[-1]] * n), "early-exit:1"], reward="bd"
    )
    for do_sample in (False, True):
        text = metasd.generate(
            [PROMPT],
            max_new_tokens=24,
            do_sample=do_sample,
            seed=1,
            logits_processor=LogitsProcessorList([Windowed(0.9)]),
        )[0].tolist()
        output = text[len(PROMPT) - 1 :]
        assert all(a != b for a, b in itertools.pairwise(output))


@pytest.mark.parametrize("reward", ["bd", "be"])
def test_the_same_seed_gives_the_same_text(model, tiny_llama, reward):
    """Alone, again, in a fresh session; another seed gives another."""

    def session():
        other = tiny_llama(1, vocab=VOCAB, layers=1)
        drafters = ["prompt-lookup", "early-exit:1", LanguageModel(other, VOCAB)]
        return MetaSD(model, drafters=drafters, reward=reward)

    first = session()
    options = {"max_new_tokens": 30, "do_sample": True, "eos_token_id": None}
    texts = [first.generate([PROMPT], seed=s, **options)[0].tolist() for s in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    assert session().generate([PROMPT], seed=1, **options)[0].tolist() == texts[0]


def test_without_a_seed_torchs_generator_decides(model):
    metasd = MetaSD(model, drafters=["early-exit:1"], reward="bd")
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(metasd.generate([PROMPT], max_new_tokens=30, do_sample=True)[0].tolist())
    assert texts[0] == texts[1] != texts[2]


def test_one_q_for_drawing_and_for_verifying(model):
    """A drafter's probs are those it drew from: under the user's warpers, filters included."""
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(0.5)]
    )
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCAB, generator=generator)
    counts: Counter[int] = Counter()
    for seed in range(2000):
        sampling = Sampling(processors, True, seed)
        sampling.begin_block(len(PROMPT))
        token, probs = sampling.propose(logits, PROMPT)
        counts[token] += 1
    expected = processors(torch.tensor([PROMPT]), logits[None].clone())[0].softmax(-1)
    torch.testing.assert_close(probs, expected)
    _assert_drawn_from(probs.double(), counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened_before_the_softmax(dtype):
    sampling = Sampling(LogitsProcessorList([TemperatureLogitsWarper(0.7)]), True, 3)
    logits = torch.linspace(-4, 4, 1000).to(dtype)
    sampling.begin_block(0)
    _, probs = sampling.propose(logits, [])
    assert probs.dtype == torch.float32
    assert abs(float(probs.double().sum()) - 1) < 1e-5
