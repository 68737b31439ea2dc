"""The user's code is asked what plain decoding asks it: the same texts, in order, each once."""

from __future__ import annotations

import ast
import functools
from collections import Counter

import pytest
import torch
from enumeration import (
    CopyDrafter,
    TableDrafter,
    TableTarget,
    decode_law,
    deviation,
    own_law,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Script
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from metasd_bandits import read_trace
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.generation.settings import settle
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target

VOCAB = 24
PROMPTS = [[3, 1, 4, 1, 5, 3, 1, 4], [7], [2, 6, 2, 6, 2]]
ENDS = 13  # comes up in the answers
PLAIN = {"pad_token_id": 0, "do_sample": False}


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama(4, vocab=VOCAB, layers=3, sharpness=12.0)


class Log:
    """A processor, a criterion and a prefix function that write down what they are asked.

    The processor moves the scores by what the prefix holds; the function forbids a token in three.
    """

    def __init__(self, stop: int | None = None) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        log = self

        class Processor(LogitsProcessor):
            def __call__(self, input_ids, scores):
                assert input_ids.shape[0] == scores.shape[0] == 1
                log.calls.append(("processor", tuple(input_ids[0].tolist())))
                scores[:, (int(input_ids.sum()) * 7) % VOCAB] += 4.0  # in place, as many do it
                return scores

        class Criterion(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                log.calls.append(("criterion", tuple(input_ids[0].tolist())))
                return torch.tensor([bool(input_ids[0, -1] == stop)])

        def allowed(row, text):
            log.calls.append(("allowed", tuple(text.tolist())))
            return [token for token in range(VOCAB) if (token + len(text)) % 3]

        self.arguments = {
            "logits_processor": LogitsProcessorList([Processor()]),
            "stopping_criteria": StoppingCriteriaList([Criterion()]),
            "prefix_allowed_tokens_fn": allowed,
        }


def calls_for(text, prompt):
    """What plain decoding asks on its way from the prompt to the text."""
    calls = []
    for n in range(len(prompt), len(text)):
        calls += [("allowed", tuple(text[:n])), ("processor", tuple(text[:n]))]
        calls.append(("criterion", tuple(text[: n + 1])))
    return calls


def plainly(model, prompt, **arguments):
    """The library's own text, and what it asked the user's code."""
    return _plainly(model, tuple(prompt), repr(sorted(arguments.items())))


@functools.cache
def _plainly(model, prompt, spelled):
    arguments = dict(ast.literal_eval(spelled))
    log = Log(arguments.pop("stop", None))
    text = model.generate(torch.tensor([prompt]), **{**PLAIN, **arguments}, **log.arguments)
    assert log.calls == calls_for(text[0].tolist(), prompt)
    return text[0].tolist(), log.calls


class Bush(Drafter):
    """A tree: two children behind each node of a right path, the wrong one first."""

    name = "bush"

    def __init__(self, follow):
        self.follow = follow

    def propose(self, tokens, n, sampling):
        drafted, parents, last = [], [], -1
        text = list(tokens)
        for _ in range(n):
            right = self.follow(tuple(text))
            drafted += [(right + 1) % VOCAB, right]
            parents += [last, last]
            last = len(drafted) - 1
            text.append(right)
        return Draft(drafted, parents=parents)


def truth(model):
    """A function from a text to plain decoding's next token, wrong behind every fourth text."""
    text, _ = plainly(model, PROMPTS[0], max_new_tokens=30)

    def follow(before):
        n = len(before)
        return text[n] if n < len(text) and n % 4 else before[-1]

    return follow


def pools(model, tiny_llama):
    follow = truth(model)

    def chain(tokens, n):
        text = list(tokens)
        for _ in range(n):
            text.append(follow(tuple(text)))
        return text[len(tokens) :]

    return {
        "chain": [Script("chain", chain)],
        "tree": [Bush(follow)],
        "early-exit": ["early-exit:2"],
        "language model": [LanguageModel(model, VOCAB, "strong")],
        "pool": [
            "prompt-lookup",
            "suffix",
            "early-exit:1",
            LanguageModel(tiny_llama(9, vocab=VOCAB, layers=1), VOCAB, "weak"),
            Bush(follow),
            "none",
        ],
    }


KINDS = ["chain", "tree", "early-exit", "language model", "pool"]
MODES = {"plain rounds": {}, "shadow": {"shadow": True}, "draft_all": {"draft_all": True}}
STOPS = {
    "length": {"max_new_tokens": 14},
    "eos": {"max_new_tokens": 30, "eos_token_id": [ENDS]},
    "both at once": {"max_new_tokens": 30, "stop": ENDS, "eos_token_id": ENDS},
}


@pytest.fixture(scope="module", params=KINDS)
def drafters(request, model, tiny_llama):
    return pools(model, tiny_llama)[request.param]


@pytest.mark.parametrize(
    ("mode", "stops"),
    [("plain rounds", "length"), ("plain rounds", "both at once"), *((m, "eos") for m in MODES)],
)
def test_both_front_doors_ask_as_plain_generate_does(model, drafters, mode, stops):
    text, calls = plainly(model, PROMPTS[0], **STOPS[stops])
    metasd = MetaSD(model, drafters=drafters, policy="uniform", reward="bd")
    arguments = {**PLAIN, **STOPS[stops], **MODES[mode]}
    stop = arguments.pop("stop", None)
    ids = torch.tensor([PROMPTS[0]])

    log = Log(stop)
    assert metasd.generate(ids, **arguments, **log.arguments)[0].tolist() == text
    assert log.calls == calls

    log = Log(stop)
    ours = model.generate(ids, custom_generate=metasd, **arguments, **log.arguments)
    assert ours[0].tolist() == text
    assert log.calls == calls


@pytest.mark.parametrize(
    ("mode", "stops"), [("homogeneous", "eos"), ("heterogeneous", "both at once")]
)
def test_many_prompts_that_share_the_code_are_asked_about_in_turn(model, drafters, mode, stops):
    arguments = {**PLAIN, **STOPS[stops]}
    stop = arguments.pop("stop", None)
    metasd = MetaSD(model, drafters=drafters, policy="uniform", reward="bd")
    log, expected = Log(stop), []
    outputs = metasd.generate_many(PROMPTS, mode=mode, max_batch=2, **arguments, **log.arguments)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        text, calls = plainly(model, prompt, **STOPS[stops])
        assert output.sequences[0].tolist() == text
        expected += calls
    assert log.calls == expected


@pytest.mark.parametrize("mode", ["homogeneous", "heterogeneous"])
def test_many_prompts_with_code_of_their_own_go_together(model, drafters, mode):
    metasd = MetaSD(model, drafters=drafters, policy="uniform", reward="bd")
    logs = [Log(ENDS) for _ in PROMPTS]
    prompts = [
        {"input_ids": prompt, **log.arguments} for prompt, log in zip(PROMPTS, logs, strict=True)
    ]
    together = []
    outputs = list(
        metasd.generate_many(
            prompts,
            mode=mode,
            max_batch=3,
            max_new_tokens=14,
            eos_token_id=2,
            on_round=lambda r: together.append(r.query),
            **PLAIN,
        )
    )
    assert set(together[:3]) == {"0", "1", "2"}
    for output, prompt, log in zip(outputs, PROMPTS, logs, strict=True):
        text, calls = plainly(model, prompt, max_new_tokens=14, eos_token_id=2, stop=ENDS)
        assert output.sequences[0].tolist() == text
        assert log.calls == calls


@pytest.mark.parametrize("door", ["generate", "custom_generate"])
def test_a_batch_is_asked_about_row_after_row(model, drafters, door):
    """Each row as it would be alone, without its padding."""
    metasd = MetaSD(model, drafters=drafters, policy="uniform", reward="bd")
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    log, expected = Log(ENDS), []
    arguments = {**PLAIN, **log.arguments, "max_new_tokens": 14, "attention_mask": mask}
    if door == "generate":
        output = metasd.generate(ids, **arguments)
    else:
        output = model.generate(ids, custom_generate=metasd, **arguments)
    for row, prompt in zip(output.tolist(), PROMPTS, strict=True):
        text, calls = plainly(model, prompt, max_new_tokens=14, stop=ENDS)
        new = text[len(prompt) :]
        assert row[longest : longest + len(new)] == new
        expected += calls
    assert log.calls == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 3])
def test_sampling_asks_about_the_text_alone(model, drafters, mode, rows):
    metasd = MetaSD(model, drafters=drafters, policy="uniform", reward="bd")
    for seed in range(2):
        log, expected = Log(ENDS), []
        output = metasd.generate(
            [PROMPTS[0]],
            do_sample=True,
            temperature=0.9,
            top_k=10,
            max_new_tokens=12,
            num_return_sequences=rows,
            seed=seed,
            return_dict_in_generate=True,
            **MODES[mode],
            **log.arguments,
        )
        for text, n in zip(output.sequences.tolist(), output.lengths, strict=True):
            expected += calls_for(text[: len(PROMPTS[0]) + n], PROMPTS[0])
        assert log.calls == expected


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1),
    st.sets(st.integers(0, VOCAB - 1), max_size=3),
    st.integers(1, 25),
    st.integers(1, 6),
    st.none() | st.integers(0, VOCAB - 1),
)
def test_any_draft_any_stop(model, rights, eos, n, draft_length, stop):
    """Blocks that are right so far and no further, and stops anywhere in them."""
    how = {"max_new_tokens": n, "eos_token_id": sorted(eos) or None, "stop": stop}
    full, _ = plainly(model, PROMPTS[0], max_new_tokens=40)
    text, calls = plainly(model, PROMPTS[0], **how)
    turns = iter(rights * 60)

    def say(tokens, k):
        right = full[len(tokens) : len(tokens) + next(turns)]
        return [*right, *[(t + 1) % VOCAB for t in full[len(tokens) + len(right) :]]][:k]

    metasd = MetaSD(model, drafters=[Script("s", say)], draft_length=draft_length, reward="bd")
    log = Log(how.pop("stop"))
    output = metasd.generate(
        [PROMPTS[0]], return_dict_in_generate=True, **PLAIN, **how, **log.arguments
    )
    assert output.sequences[0].tolist() == text
    assert log.calls == calls
    assert sum(r.emitted for r in output.trace) == len(text) - len(PROMPTS[0])
    assert metasd.target.length == len(text) - 1


# -- Grammars and state ------------------------------------------------------------------------


class Trie:
    """Legal texts only; any other is a KeyError, or has no continuation."""

    def __init__(self, prompt, texts, strict):
        self.legal, self.strict = {}, strict
        for text in texts:
            for n in range(len(text)):
                self.legal.setdefault((*prompt, *text[:n]), set()).add(text[n])

    def __call__(self, row, text):
        key = tuple(text.tolist())
        return sorted(self.legal[key] if self.strict else self.legal.get(key, ()))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_grammar_that_knows_legal_prefixes_only(model, drafters, mode, do_sample, strict):
    eos = 23
    texts = [[5, 6, 7, 8, eos], [5, 6, 9, eos], [5, 10, 11, 12, 13, 14, 15, eos], [1, 4, 1, 5, eos]]
    arguments = {
        "max_new_tokens": 30,
        "eos_token_id": eos,
        "prefix_allowed_tokens_fn": Trie(PROMPTS[0], texts, strict),
    }
    metasd = MetaSD(model, drafters=drafters, policy="uniform", reward="bd")
    ours = metasd.generate(
        [PROMPTS[0]], pad_token_id=0, do_sample=do_sample, seed=3, **MODES[mode], **arguments
    )[0].tolist()
    assert ours[len(PROMPTS[0]) :] in texts
    if not do_sample:
        ids = torch.tensor([PROMPTS[0]])
        assert ours == model.generate(ids, **PLAIN, **arguments)[0].tolist()


class Automaton(LogitsProcessor):
    """Takes in the last token at each call, as compiled grammars do; starts anew at the prompt.

    It forbids what it has taken in twice.
    """

    def __init__(self, starts):
        self.starts = set(map(tuple, starts))

    def __call__(self, input_ids, scores):
        text = tuple(input_ids[0].tolist())
        if text in self.starts:
            self.text, self.counts = text, Counter()
        else:
            assert text[:-1] == self.text, "a text it was not led to"
            self.text = text
            self.counts[text[-1]] += 1
        twice = [token for token, n in self.counts.items() if n > 1]
        scores = scores.clone()
        scores[:, twice] = -float("inf")
        return scores


@pytest.mark.parametrize("mode", MODES)
def test_a_processor_that_keeps_a_state(model, drafters, mode):
    metasd = MetaSD(model, drafters=drafters, policy="uniform", reward="bd")
    expected = [
        model.generate(
            torch.tensor([prompt]),
            max_new_tokens=14,
            logits_processor=LogitsProcessorList([Automaton([prompt])]),
            **PLAIN,
        )[0].tolist()
        for prompt in PROMPTS
    ]
    shared = LogitsProcessorList([Automaton(PROMPTS)])
    arguments = {**PLAIN, "max_new_tokens": 14, "logits_processor": shared}
    for prompt, text in zip(PROMPTS, expected, strict=True):
        ours = metasd.generate([prompt], **MODES[mode], **arguments)
        assert ours[0].tolist() == text
    if mode == "plain rounds":
        many = metasd.generate_many(PROMPTS, max_batch=3, **arguments)
        assert [output.sequences[0].tolist() for output in many] == expected


LIBRARYS = {
    "guidance": lambda model: UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model),
    "watermark": lambda model: SynthIDTextWatermarkLogitsProcessor(
        3, [5, 9, 2, 7], 32, 1, 8, "cpu"
    ),
}


@pytest.mark.parametrize("name", LIBRARYS)
def test_the_librarys_own_that_keep_a_state(model, drafters, name):
    ids, how = torch.tensor([PROMPTS[0]]), {**PLAIN, "max_new_tokens": 20}
    plain = model.generate(
        ids, logits_processor=LogitsProcessorList([LIBRARYS[name](model)]), **how
    )
    metasd = MetaSD(model, drafters=drafters, policy="uniform", reward="bd")
    ours = metasd.generate(
        ids, logits_processor=LogitsProcessorList([LIBRARYS[name](model)]), **how
    )
    assert ours.tolist() == plain.tolist()


def test_scores_that_criteria_and_callers_see_are_the_users(model, drafters):
    seen = []

    class Scored(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen[-1].append(torch.cat(scores))
            return torch.tensor([len(scores) >= 14])

    ids, outputs = torch.tensor([PROMPTS[0]]), []
    metasd = MetaSD(model, drafters=drafters, policy="uniform", reward="bd")
    for door in (None, metasd):
        seen.append([])
        arguments = {
            **PLAIN,
            "max_new_tokens": 30,
            "logits_processor": Log().arguments["logits_processor"],
            "stopping_criteria": StoppingCriteriaList([Scored()]),
        }
        outputs.append(
            model.generate(
                ids,
                custom_generate=door,
                return_dict_in_generate=True,
                output_scores=True,
                **arguments,
            )
        )
    plain, ours = outputs
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for mine, theirs in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    mine, theirs = torch.cat(ours.scores), torch.cat(plain.scores)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_criterion_given_twice_is_asked_once(model):
    log = Log()
    [criterion] = log.arguments["stopping_criteria"]
    twice = StoppingCriteriaList([criterion, criterion])
    text = (
        MetaSD(model, drafters=["early-exit:1"], reward="bd")
        .generate([PROMPTS[0]], max_new_tokens=6, stopping_criteria=twice, **PLAIN)[0]
        .tolist()
    )
    n = len(PROMPTS[0])
    assert log.calls == [("criterion", tuple(text[:i])) for i in range(n + 1, n + 7)]


def test_shadow_rewards_hold_what_the_users_code_said_of_the_text(model, tmp_path):
    """The processor forces one token: an arm that drafts it is right, whichever arm is used."""

    class Force(LogitsProcessor):
        def __call__(self, input_ids, scores):
            forced = torch.full_like(scores, -float("inf"))
            forced[:, 5] = 0.0
            return forced

    right, wrong = (Script(str(t), lambda tokens, n, t=t: [t]) for t in (5, 6))
    metasd = MetaSD(model, drafters=[right, wrong], policy="uniform", reward="bd", shadow=True)
    metasd.generate(
        [PROMPTS[0]],
        max_new_tokens=20,
        seed=1,
        trace=tmp_path / "t.jsonl",
        logits_processor=LogitsProcessorList([Force()]),
        **PLAIN,
    )
    rounds = [r for r in read_trace(tmp_path / "t.jsonl").rounds if r.drafted]
    assert {r.arm for r in rounds} == {0, 1}
    assert all(r.rewards[:2] == pytest.approx((1.0, 0.0)) for r in rounds)


# -- Exact sampling ----------------------------------------------------------------------------


def banned(text, vocab):
    """Tokens forbidden behind a text: a run of two, and the first token's successor."""
    twice = {text[-1]} if text[-1:] == text[-2:-1] else set()
    return twice | ({(text[0] + 1) % vocab} if len(text) % 2 else set())


class Pure(LogitsProcessor):
    """A function of the text, for the truth."""

    def __init__(self, vocab):
        self.vocab = vocab

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, sorted(banned(tuple(input_ids[0].tolist()), self.vocab))] = -float("inf")
        return scores


class Led(Pure):
    """The same from a state, which only the right calls in the right order bring about."""

    def __init__(self, vocab, prompt):
        super().__init__(vocab)
        self.prompt, self.text = tuple(prompt), None

    def __call__(self, input_ids, scores):
        text = tuple(input_ids[0].tolist())
        assert text == self.prompt or (
            text[:-1] == self.text and text[-1] not in banned(self.text, self.vocab)
        ), "an illegal text, or out of turn"
        self.text = text
        return super().__call__(input_ids, scores)


class Fork(Drafter):
    """A tree two deep: the head's siblings drawn without replacement, one child behind each."""

    name = "fork"

    def __init__(self, logits):
        self.logits = logits

    def propose(self, tokens, n, sampling):
        def probs(*behind):
            text = (*tokens, *behind)
            row = torch.tensor([self.logits(text)], dtype=torch.float64)
            return sampling.distributions(row, text, lambda j: ())[0]

        drawn = sampling.draw_children(probs(), len(tokens), 2)
        parents = [-1] * len(drawn)
        for parent, (token, _) in enumerate(list(drawn) if n > 1 else []):
            drawn += sampling.draw_children(probs(token), len(tokens) + 1, 1, parent)
            parents.append(parent)
        return Draft([t for t, _ in drawn], torch.stack([p for _, p in drawn]), parents=parents)


EXACT = {
    "chain": lambda v: [TableDrafter("a", table(2, v))],
    "copied": lambda v: [CopyDrafter("copy", lambda text: text[0])],
    "tree": lambda v: [Fork(table(2, v))],
}


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("pool", EXACT)
def test_sampling_is_exact_under_the_users_processor(pool, shadow):
    vocab, prompt, tokens = 3, [2, 1], 2 if shadow or pool == "tree" else 3
    target = TableTarget(table(1, vocab), vocab)
    warm = TemperatureLogitsWarper(0.8)
    truth = own_law(target, prompt, tokens, processors=LogitsProcessorList([Pure(vocab), warm]))
    law = decode_law(
        target,
        EXACT[pool](vocab),
        prompt,
        tokens,
        processors=LogitsProcessorList([Led(vocab, prompt), warm]),
        shadow=shadow,
    )
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert deviation(law, truth) < 1e-12


# -- Who pays ----------------------------------------------------------------------------------

SETTINGS = {
    "temperature": 0.7,
    "top_k": 4,
    "top_p": 0.9,
    "min_p": 0.1,
    "top_h": 0.5,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "repetition_penalty": 1.2,
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[3]],
    "sequence_bias": [[[4], 1.0]],
    "suppress_tokens": [1],
    "begin_suppress_tokens": [1],
    "forced_bos_token_id": 2,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": (3, 1.2),
    "min_new_tokens": 3,
    "min_length": 12,
    "remove_invalid_values": True,
    "renormalize_logits": True,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_not_the_users_code(model, name):
    """All that settings are turned into may be asked about any text, so its rows go together."""
    config = {"eos_token_id": 2, "do_sample": True, "top_k": 0, name: SETTINGS[name]}
    config = GenerationConfig(**config, max_time=9.0)
    settled = settle(Target(model), PROMPTS[0], generation_config=config, settings={})
    assert len(settled.sampling.processors) > 0
    assert not settled.sampling.asks_user
    assert not settled.stopping.asks_user


@pytest.mark.parametrize("name", ["logits_processor", "prefix_allowed_tokens_fn"])
def test_what_the_user_hands_in_is(model, name):
    given = {name: Log().arguments[name]}
    assert settle(Target(model), PROMPTS[0], settings={}, **given).sampling.asks_user
    assert not Sampling(LogitsProcessorList([TemperatureLogitsWarper(0.5)])).asks_user
