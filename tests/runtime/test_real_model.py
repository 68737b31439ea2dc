"""The real model: greedy text equals transformers' own, sampled tokens follow its distribution."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch
from scipy import stats
from transformers import (
    LlamaForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.loop import Query, decode
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.stopping import Stopping
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.drafters.ngram import NGram
from metasd_runtime.drafters.parallel_heads import ParallelHeads, ParallelShape
from metasd_runtime.drafters.prompt_lookup import PromptLookup
from metasd_runtime.drafters.rescored import Rescored
from metasd_runtime.drafters.small_lm import SmallShape, small_language_model
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Forward, Target

# (The time limit allows for a machine that is busy with other things.)
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(3000)]

PROMPTS = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n",
    'import json\n\nwith open("data.json") as f:\n    data = json.',
    "SELECT name, age FROM users WHERE age > 30 ORDER BY",
    "<html>\n<head>\n<title>Home</title>\n</head>\n<body>\n",
    "Translate to French: The house is small. The house is",
    "Deutsch: Der Hund schläft. English: The dog sleeps. Deutsch: Die Katze schläft. English:",
    "Hola, ¿cómo estás? Muy bien, gracias. Hola, ¿cómo",
    "The river rose all night, and by morning the river had covered the road. In short, the river",
    "Summary: the meeting was moved to Friday because the meeting room was taken on Thursday.",
    "Question: What is the capital of Italy? Answer: The capital of Italy is",
    "Q: Who wrote Hamlet? A: William Shakespeare. Q: Who wrote Macbeth? A:",
    "Water boils at 100 degrees Celsius and freezes at",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 = 8\n5 + 5 =",
    "If x + 3 = 7 then x = 4. If x + 5 = 9 then x =",
    "A train travels 60 miles in one hour. In three hours it travels",
    "1, 2, 3, 4, 5, 6, 7, 8, 9,",
    "Once upon a time there was a little",
    "To be, or not to be, that is the",
    "e e e e e e e e",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    " ",
]
SHORT, LONG = 12, 24


@pytest.fixture(scope="module")
def answers(smollm):
    """Each prompt's ids, and the library's own greedy continuation."""
    found = []
    for prompt in PROMPTS:
        inputs = smollm.tokenizer(prompt, return_tensors="pt")
        text = smollm.model.generate(**inputs, max_new_tokens=LONG, do_sample=False)
        found.append((inputs.input_ids, text[0].tolist()))
    return found


@pytest.fixture(scope="module")
def small_lm(smollm):
    """A model of its own with the target's tokenizer: copies of the target's first four layers."""
    config = copy.deepcopy(smollm.model.config)
    config.num_hidden_layers = 4
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    left_out = model.load_state_dict(smollm.model.state_dict(), strict=False)
    assert not left_out.missing_keys
    return model


POOL = ("prompt-lookup", "suffix", "lookahead", "early-exit:8", "lm", "none")


@pytest.mark.parametrize("drafters", [*((name,) for name in POOL), POOL], ids=" ".join)
def test_greedy_text_is_the_librarys(smollm, small_lm, answers, drafters):
    n = LONG if len(drafters) > 1 else SHORT
    pool = [
        LanguageModel(small_lm, smollm.model.config.vocab_size) if name == "lm" else name
        for name in drafters
    ]
    metasd = MetaSD(smollm.model, smollm.tokenizer, drafters=pool)
    accepted = 0
    for prompt, (ids, expected) in zip(PROMPTS, answers, strict=True):
        output = metasd.generate(
            ids, max_new_tokens=n, do_sample=False, return_dict_in_generate=True, seed=1
        )
        text = output.sequences[0].tolist()
        expected = expected[: ids.shape[1] + n]
        assert text == expected, f"{prompt!r}: {_first_difference(smollm.model, text, expected)}"
        accepted += sum(r.accepted for r in output.trace)
    if drafters != ("none",):
        assert accepted > 0


def test_heads_and_small_models_leave_the_text_alone(smollm, answers):
    """Weights without any training: Medusa's and BPD's heads repeat the target's own guess."""
    target, width = Target(smollm.model, smollm.tokenizer), smollm.model.config.hidden_size
    vocabulary, pool = torch.arange(4096), []
    for block in ("medusa", "bpd"):
        shape = ParallelShape(block, len(target.layers), width, 4)
        zeros = {name: torch.zeros(size) for name, size in shape.sizes().items()}
        heads = ParallelHeads(shape, zeros, vocabulary, target, block)
        pool += [heads, Rescored(heads, NGram(target.vocab_size))]
    small = SmallShape.of(smollm.model.config, 64, 1)
    random = {name: torch.full(size, 0.01) for name, size in small.sizes().items()}
    pool.append(small_language_model(small, random, vocabulary, target, "small"))
    metasd = MetaSD(smollm.model, smollm.tokenizer, drafters=pool, reward="bd", policy="uniform")
    for ids, expected in answers[::4]:
        output = metasd.generate(
            ids, max_new_tokens=LONG, do_sample=False, return_dict_in_generate=True, seed=1
        )
        text = output.sequences[0].tolist()
        assert text == expected, _first_difference(smollm.model, text, expected)


def _first_difference(model, text, expected) -> str:
    """Where two texts part, and how near the two best tokens were there."""
    at = next(i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b)
    with torch.inference_mode():
        best = model(torch.tensor([expected[:at]])).logits[0, -1].topk(2).values
    return f"they part at token {at}, where the top-2 gap is {float(best[0] - best[1]):.2e}"


class Remembering:
    """A model's logits behind any text, each computed once; as target, and inside drafters."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.real = Target(model)
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}
        self.text: list[int] = []
        self.vocab_size = self.real.vocab_size
        self.max_length = None
        self.forwards = 0

    def reset(self):
        self.text = []

    def prefill(self, tokens, features=()):
        self.text += tokens

    def rollback(self, n):
        del self.text[len(self.text) - n :]

    def keep(self, n, places):
        assert list(places) == list(range(len(places)))  # chains alone
        self.rollback(n - len(places))

    def forward(self, tokens, *, parents=None, keep=0, features=()):
        assert parents is None
        rows = []
        for token in tokens:
            self.text.append(token)
            rows.append(self.row(self.text))
        return Forward(torch.stack(rows), None)

    def row(self, tokens):
        text = tuple(tokens)
        if text not in self.rows:
            self.real.reset()
            self.real.prefill(list(text[:-1]))
            self.rows[text] = self.real.forward([text[-1]]).logits[0]
            self.forwards += 1
        return self.rows[text]


class RememberingLM(Drafter):
    """Drafts token by token from remembered logits."""

    name = "lm"

    def __init__(self, remembering: Remembering) -> None:
        self.remembering = remembering

    def propose(self, tokens, n, sampling):
        text, rows = list(tokens), []
        for _ in range(n):
            token, probs = sampling.propose(self.remembering.row(text), text)
            text.append(token)
            rows.append(probs)
        return Draft(text[len(tokens) :], torch.stack(rows))


@pytest.mark.filterwarnings("error")
def test_sampled_pairs_follow_the_targets_own_law(smollm, small_lm):
    """Chi-square of the first two tokens against p(a) p(b | a), over 1,500 seeded decodes.

    The logits are the real models' and computed once each, so that thousands of decodes cost
    little; all else is the decoder as it runs.
    """
    prompt = smollm.tokenizer("The weather today is").input_ids
    processors = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopKLogitsWarper(4)])
    target = Remembering(smollm.model)
    pool = [RememberingLM(Remembering(small_lm)), PromptLookup()]
    router = Router(pool, "uniform", "bd", draft_length=2)
    draws, counts = 1500, Counter()
    for seed in range(draws):
        stopping = Stopping(len(prompt) + 3)
        query = Query("0", list(prompt), Sampling(processors, True, seed), stopping, seed)
        query.plain_step = 1.0
        for _ in decode(query, target, router):  # type: ignore[arg-type]
            if len(query.tokens) >= len(prompt) + 2:
                break
        counts[tuple(query.tokens[len(prompt) : len(prompt) + 2])] += 1
    law = {}
    for a, pa in _distribution(target, processors, prompt):
        for b, pb in _distribution(target, processors, [*prompt, a]):
            law[a, b] = pa * pb
    assert counts.keys() <= law.keys()
    assert math.isclose(sum(law.values()), 1.0, abs_tol=1e-6)
    cells = [pair for pair in law if law[pair] * draws >= 5]
    rest = draws - sum(counts[pair] for pair in cells)
    expected = [law[pair] * draws for pair in cells]
    observed = [counts[pair] for pair in cells]
    if draws - sum(expected) > 1.0:
        expected, observed = [*expected, draws - sum(expected)], [*observed, rest]
    expected = [e * sum(observed) / sum(expected) for e in expected]
    assert len(cells) >= 8
    assert stats.chisquare(observed, expected).pvalue > 0.001


def _distribution(target, processors, text):
    scores = processors(torch.tensor([text]), target.row(text)[None])
    return [(i, p) for i, p in enumerate(scores[0].double().softmax(-1).tolist()) if p > 0]


def test_a_sampled_text_stays_in_the_nucleus(smollm):
    """Every token of a real sampled decode lies in the nucleus at its own prefix; seeds repeat."""
    ids = smollm.tokenizer("My favourite food is", return_tensors="pt").input_ids
    metasd = MetaSD(smollm.model, smollm.tokenizer, drafters=["early-exit:8"], reward="bd")
    text = metasd.generate(ids, max_new_tokens=12, do_sample=True, top_p=0.5, top_k=0, seed=5)
    again = metasd.generate(ids, max_new_tokens=12, do_sample=True, top_p=0.5, top_k=0, seed=5)
    assert torch.equal(text, again)
    with torch.inference_mode():
        logits = smollm.model(text).logits[0]
    for at in range(ids.shape[1], text.shape[1]):
        kept = TopPLogitsWarper(0.5)(text[:, :at], logits[at - 1][None].float())
        assert kept[0, text[0, at]] > -math.inf
