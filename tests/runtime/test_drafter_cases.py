"""Drafters that are odd, short, broken or elsewhere: decoding goes on, its output unchanged."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scripted import ByTurns, Script, greedy_text, run
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    NoRepeatNGramLogitsProcessor,
)

from metasd_bandits import Policy
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.no_draft import NoDraft
from metasd_runtime.decoding.reward import Timing, score
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.early_exit import EarlyExit
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target

VOCAB = 32
PROMPT = [1, 2, 3, 4, 5, 1, 2]
N = 20


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama(0, vocab=VOCAB, layers=3)


@pytest.fixture(scope="module")
def answer(model):
    return greedy_text(model, PROMPT, N)


# -- Drafters that break ------------------------------------------------------------------------


def raises(draft):
    raise RuntimeError("out of paper")


def nan_row(draft):
    draft.probs = draft.probs.clone()
    draft.probs[-1] = float("nan")
    return draft


def too_many(draft):
    return Draft([*draft.tokens, 1, 1, 1, 1, 1, 1])


def nowhere(draft):
    return Draft([VOCAB])


def negative(draft):
    return Draft([-1])


def fraction(draft):
    return Draft([1.5])


def nothing(draft):
    return None


def wrong_shape(draft):
    return Draft(draft.tokens, draft.probs[:, :-1])


def unnormalised(draft):
    return Draft(draft.tokens, draft.probs * 2)


def below_zero(draft):
    probs = draft.probs.clone()
    probs[:, 0] -= 0.5
    probs[:, 1] += 0.5
    return Draft(draft.tokens, probs)


def stopped_clock(draft):
    return Draft(draft.tokens, draft.probs, switch_seconds=float("nan"))


NONSENSE = {
    raises: "out of paper",
    nan_row: "NaN",
    too_many: "asked for",
    nowhere: "outside the target's vocabulary",
    negative: "outside the target's vocabulary",
    fraction: "integer",
    nothing: "NoneType",
    wrong_shape: "shape",
    unnormalised: "sum to 1",
    below_zero: "no distributions",
    stopped_clock: "switch_seconds",
}


class BreaksLater(EarlyExit):
    """Sound for some rounds, then whatever it is told."""

    def __init__(self, target, nonsense, after):
        super().__init__(target, 2)
        self.nonsense, self.after, self.calls = nonsense, after, 0

    def start(self, tokens):
        self.calls = 0

    def propose(self, tokens, n, sampling):
        self.calls += 1
        draft = super().propose(tokens, n, sampling)
        return draft if self.calls <= self.after else self.nonsense(draft)


@pytest.mark.parametrize("nonsense", NONSENSE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("after", [0, 2])
def test_nonsense_disables_the_drafter_for_the_query(model, answer, nonsense, after):
    target = Target(model)
    broken = BreaksLater(target, nonsense, after)
    pool = [Script("other", lambda t, n: answer[len(t) : len(t) + 1]), broken]
    for _ in range(2):  # and it is welcome again in the next query
        with pytest.warns(RuntimeWarning, match=f"early-exit:2.*{NONSENSE[nonsense]}") as caught:
            text, _ = run(target, pool, PROMPT, N, policy=ByTurns([1, 0]))
        assert text == answer
        assert len(caught) == 1
        assert broken.calls == after + 1


def test_when_every_drafter_is_broken_decoding_is_plain(model, answer):
    class Broken(Drafter):
        name = "broken"

        def propose(self, tokens, n, sampling):
            raise RuntimeError("no")

    class BrokenFromTheStart(Drafter):
        name = "broken from the start"

        def start(self, tokens):
            raise RuntimeError("not today")

        def propose(self, tokens, n, sampling):
            raise AssertionError("it must not be asked")

    class BrokenAtCommit(Drafter):
        name = "broken at commit"

        def propose(self, tokens, n, sampling):
            return Draft([0] * n)

        def commit(self, tokens, features=None):
            raise RuntimeError("cannot learn")

    for reward in ("bd", "throughput"):
        metasd = MetaSD(
            model,
            drafters=[BrokenAtCommit(), Broken(), BrokenFromTheStart()],
            policy="ucb",
            reward=reward,
        )
        with pytest.warns(RuntimeWarning) as caught:
            output = metasd.generate(
                [PROMPT],
                max_new_tokens=N,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
            )
        assert output.sequences[0].tolist() == answer
        reasons = {str(w.message).split("'")[1] for w in caught}
        assert {"broken at commit", "broken from the start"} <= reasons
        assert output.trace.rounds[-1].arm == metasd.router.fallback
        assert output.trace.rounds[-1].drafted == 0


def test_a_policy_that_overlooks_the_mask_costs_no_text(model, answer):
    """A round for which it insists on a broken drafter is decoded plainly."""

    class Stubborn(Policy):
        name = "stubborn"

        def reset(self, n_arms, seed=None):
            pass

        def select(self, available=None):
            return np.int64(0)

        def update(self, arm, reward, **kwargs):
            assert arm == 0

    broken = Script("broken", lambda tokens, n: [0] if len(tokens) < 10 else 1 / 0)
    with pytest.warns(RuntimeWarning, match="ZeroDivision"):
        text, rounds = run(Target(model), [broken, Script("b", lambda t, n: [])], PROMPT, N,
                           policy=Stubborn())  # fmt: skip
    assert text == answer
    assert {type(r.arm) for r in rounds} == {int}
    assert [r.arm for r in rounds[-5:]] == [2] * 5


@pytest.mark.parametrize("arm", [2, -1, None, 0.5])
def test_a_policy_that_selects_no_arm_is_named(model, arm):
    class Lost(Policy):
        name = "lost"

        def reset(self, n_arms, seed=None):
            pass

        def select(self, available=None):
            return arm

        def update(self, arm, reward, **kwargs):
            pass

    with pytest.raises(ValueError, match=r"'lost' selected arm .*\[0, 1\)"):
        run(Target(model), [Script("s", lambda t, n: [])], PROMPT, 3, policy=Lost())


# -- Context, vocabulary, device, precision ------------------------------------------------------


def test_a_drafter_of_short_context_is_disabled_when_the_text_outgrows_it(
    model, answer, tiny_llama
):
    short = LanguageModel(tiny_llama(0, vocab=VOCAB, layers=3, context=16), VOCAB, "short")
    target = Target(model)
    with pytest.warns(RuntimeWarning, match="'short' is disabled.*its context ends at 16"):
        text, rounds = run(target, [short, Script("s", lambda t, n: [])], PROMPT, N)
    assert text == answer
    assert any(r.arm == 0 and r.accepted for r in rounds)
    with pytest.warns(RuntimeWarning, match="context ends at 16"):
        text, _ = run(target, [short], list(range(20)), 5)
    assert len(text) == 25


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("mine", "theirs"), [(40, 32), (32, 40)])
def test_padded_vocabularies(tiny_llama, mine, theirs, do_sample):
    """152,064 against 151,936: rows that one of the two lacks are never drafted."""
    target = Target(tiny_llama(0, vocab=mine, sharpness=2.0))
    lm = LanguageModel(tiny_llama(1, vocab=theirs, layers=1), target.vocab_size)
    seen = []

    class Watch(LanguageModel):
        def propose(self, tokens, n, sampling):
            draft = super().propose(tokens, n, sampling)
            assert draft.probs.shape == (n, mine)
            assert float(draft.probs[:, theirs:].sum()) == 0.0
            seen.extend(draft.tokens)
            return draft

    lm = Watch(lm.lm.model, target.vocab_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # (a drafter with fewer ids cannot read a text that holds the others)
        sampling = Sampling(do_sample=do_sample, seed=3)
        text, _ = run(target, [lm], PROMPT, 1 if theirs < mine else 12, sampling=sampling)
        for _ in range(3):
            sampling.begin_block(len(PROMPT))
            lm.start(PROMPT)
            lm.propose(PROMPT, 4, sampling)
    assert seen
    assert max(seen) < min(mine, theirs)
    assert max(text) < mine


def test_a_drafter_with_half_precision_probs_stays_lossless(model):
    """bfloat16 rows that sum to 1.004: acceptance goes by the normalised weights drawn from."""
    drawn = []

    class Half(Drafter):
        name = "half"

        def propose(self, tokens, n, sampling):
            generator = torch.Generator().manual_seed(len(tokens))
            probs = torch.rand(n, VOCAB, generator=generator).softmax(-1).bfloat16()
            drawn.append(probs)
            return Draft(
                torch.multinomial(probs.float(), 1, generator=generator)[:, 0].tolist(), probs
            )

    checked = []

    def watch(round_):
        checked.append(round_.block_divergence)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Target(model), [Half()], PROMPT, N, sampling=Sampling(do_sample=True), on_round=watch)
    assert max(abs(float(p.float().sum(-1).max()) - 1) for p in drawn) > 1e-4
    assert all(0 <= r <= 1 for r in checked)


def test_tokens_may_be_numpy_or_torch_integers(model, answer, tmp_path):
    class Numpy(Drafter):
        name = "numpy"

        def propose(self, tokens, n, sampling):
            return Draft(np.array(answer[len(tokens) : len(tokens) + n]))

    class Torch(Drafter):
        name = "torch"

        def propose(self, tokens, n, sampling):
            return Draft(torch.tensor(answer[len(tokens) : len(tokens) + n], dtype=torch.int32))

    metasd = MetaSD(model, drafters=[Numpy(), Torch()], reward="bd", policy=ByTurns([0, 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = metasd.generate(
            [PROMPT], max_new_tokens=N, do_sample=False, trace=tmp_path / "t.jsonl"
        )
    assert text[0].tolist() == answer


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_drafter_on_another_device(model, answer, tiny_llama, do_sample):
    lm = LanguageModel(tiny_llama(1, vocab=VOCAB, layers=1).cuda(), VOCAB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text, _ = run(Target(model), [lm], PROMPT, N, sampling=Sampling(do_sample=do_sample))
    assert do_sample or text == answer


# -- What drafters are told ------------------------------------------------------------------------


def test_features_are_those_of_a_fresh_forward(model, answer):
    """The hidden states at each token that the cache gained, the prompt's included."""
    told = []

    class Wants(Script):
        needs_features = (1, 3)

        def start(self, tokens):
            self.before = 0

        def commit(self, tokens, features=None):
            told.append((self.before, features))
            assert features.shape[0] == len(tokens) - 1 - self.before
            self.before = len(tokens) - 1

    def say(tokens, n):
        right = len(tokens) % 4
        return [*answer[len(tokens) : len(tokens) + right], 0, 0][:n]

    text, _ = run(Target(model), [Wants("wants", say)], PROMPT, N)
    assert text == answer
    with torch.inference_mode():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    fresh = torch.cat([states[1][0], states[3][0]], dim=-1)
    for start, features in told:
        torch.testing.assert_close(
            features, fresh[start : start + len(features)], rtol=1e-4, atol=1e-4
        )
    assert told[0][0] == 0
    assert told[-1][0] + len(told[-1][1]) == len(text) - 1


def test_every_drafter_is_told_of_every_round(model, answer):
    """Chosen or not: start once, then commit with all that stands."""
    heard: dict[str, list[int]] = {}

    class Listens(Script):
        def start(self, tokens):
            heard[self.name] = [len(tokens)]

        def commit(self, tokens, features=None):
            assert list(tokens) == answer[: len(tokens)]
            heard[self.name].append(len(tokens))

    pool = [Listens("a", lambda t, n: answer[len(t) : len(t) + 2]), Listens("b", lambda t, n: [0])]
    _, rounds = run(Target(model), pool, PROMPT, N, policy=ByTurns([0, 0, 1]))
    lengths = np.cumsum([len(PROMPT), *(r.emitted for r in rounds)]).tolist()
    assert heard == {"a": lengths, "b": lengths}


def test_the_policys_memory_between_queries_is_as_asked(model):
    """Scope "query" begins every query anew; "carried" goes on."""
    pool = [Script("right", lambda t, n: [0] * n), Script("none of it", lambda t, n: [])]
    pulls = {}
    for scope in ("query", "carried"):
        metasd = MetaSD(model, drafters=pool, policy="ucb", reward="bd", scope=scope)
        for _ in range(3):
            output = metasd.generate(
                [PROMPT], max_new_tokens=4, do_sample=False, eos_token_id=None, seed=0,
                return_dict_in_generate=True,
            )  # fmt: skip
        pulls[scope] = [r.arm for r in output.trace]
    assert set(pulls["query"][:2]) == {0, 1}  # both untried arms first, again


def test_no_draft_wins_where_speculation_does_not_pay(model):
    """Under throughput a slow drafter that is hardly ever right loses to plain decoding."""

    def priced(router, decision, query, index, draft, *rest):
        """A round's cost by its drafts, so that the test does not hang on this machine's clock."""
        cost = Timing(0.2 * len(draft.tokens), 1.0 + 0.05 * len(draft.tokens), 1.0)
        return score(router, decision, query, index, draft, *rest[:-1], cost)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metasd_runtime.decoding.loop.score", priced)
        _, rounds = run(
            Target(model),
            [Script("costly", lambda t, n: [0] * n), NoDraft()],
            PROMPT,
            150,
            policy="ucb:beta=0.05",
            reward="throughput",
        )
    assert sum(r.arm == 1 for r in rounds) > 0.8 * len(rounds)


# -- Architectures -------------------------------------------------------------------------------


def small(kind):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    common = {
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    window = {"num_key_value_heads": 2, "sliding_window": 8}
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, **common))
    elif kind == "gpt_neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **common))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**sizes, **window, **common))
    else:
        head = {"head_dim": 8, "query_pre_attn_scalar": 8}
        model = Gemma2ForCausalLM(Gemma2Config(**head, **sizes, **window, **common))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and "ln" not in name and weight.dim() > 1:
                weight.mul_(4)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "mistral", "gemma2"])
def test_architectures_equal_plain_generate(kind):
    """Early exit cuts them all; the sliding windows (8) are passed many times over.

    No pair of tokens comes twice, so that the text does not fall into a circle.
    """
    model = small(kind)
    plain = greedy_text(model, PROMPT, 60, no_repeat_ngram_size=2)
    assert len(set(plain[-30:])) > 5
    target = Target(model)
    pool = [
        EarlyExit(target, 1),
        EarlyExit(target, 3),
        LanguageModel(model, VOCAB, "itself"),
        Script("half right", lambda t, n: [*plain[len(t) : len(t) + 3], 0, 0]),
    ]
    sampling = Sampling(LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text, rounds = run(
            target, pool, PROMPT, 60, policy=ByTurns([0, 1, 2, 3, 3]), sampling=sampling
        )
    assert text == plain
    assert any(0 < r.accepted < r.drafted for r in rounds)
