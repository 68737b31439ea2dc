"""One drafter behind another: the first's draft where it has one, else the second's; lossless."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from enumeration import (
    ByLastReward,
    CopyDrafter,
    TableDrafter,
    TableTarget,
    decode_law,
    deviation,
    own_law,
    table,
)
from hypothesis import given
from hypothesis import strategies as st
from scripted import ByTurns, Script, greedy_text

from metasd_bandits import ConfigError
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.capped import Capped
from metasd_runtime.drafters.eagle import compiled
from metasd_runtime.drafters.eagle.chain import Eagle
from metasd_runtime.drafters.eagle.compiled import compile_steps
from metasd_runtime.drafters.eagle.head import EagleShape
from metasd_runtime.drafters.eagle.tree import DynamicTree, EagleTree
from metasd_runtime.drafters.fallback import Fallback
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.drafters.pool import Trained, save_pool
from metasd_runtime.drafters.prompt_lookup import PromptLookup
from metasd_runtime.drafters.registry import make_drafter, make_pool
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target

VOCAB = 24
EXACT = 1e-12
PROMPT = [5, 9, 3, 5, 9, 3, 7, 5, 9, 3, 5, 9]
texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def head_of(target: Target, seed: int, tree: bool = False) -> Eagle:
    shape = EagleShape.of(target.model.config, (1, 2))
    draws = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=draws) * 0.1
        for name, size in shape.sizes().items()
    }
    rest = (shape, weights, torch.arange(VOCAB), target, f"eagle-{seed}")
    return EagleTree(DynamicTree(6, 2), *rest) if tree else Eagle(*rest)


@pytest.fixture(scope="module")
def target(tiny_llama):
    return Target(tiny_llama(0, vocab=VOCAB, layers=3))


def lookup_before_heads(target: Target) -> list[Drafter]:
    """Heads behind one lookup, one of them of trees, and a lookup and a head on their own."""
    lookup, head = PromptLookup(3, 2), head_of(target, 0)
    return [Fallback(lookup, head), Fallback(lookup, head_of(target, 1, tree=True)), lookup, head]


# -- What it drafts ------------------------------------------------------------------------------


@given(texts, texts, st.integers(1, 3), st.integers(1, 3), st.integers(1, 6))
def test_the_firsts_draft_if_it_has_one_else_the_seconds(prompt, rest, ngram, least, n):
    first = PromptLookup(ngram, min(ngram, least))
    arm = Fallback(first, Script("other", lambda tokens, n: [7, len(tokens)]))
    first.start(prompt)
    for end in range(len(prompt), len(prompt) + len(rest) + 1):
        text = [*prompt, *rest][:end]
        first.commit(text)
        own = first.propose(text, n, Sampling())
        assert arm.propose(text, n, Sampling()).tokens == (own.tokens or [7, end][:n])


def test_it_stands_for_both():
    class Wide(Script):
        def most_tokens(self, n):
            return 12

    a, b, c = Script("a", lambda t, n: []), Wide("b", lambda t, n: []), Script("c", lambda t, n: [])
    a.needs_features, b.needs_features = (2, 5), (1, 2)
    arm = Fallback(a, Capped(Fallback(b, c), 2))
    assert arm.name == "a>b>c@2"
    assert arm.needs_features == (1, 2, 5)
    assert arm.asked(4) == [(a, 4), (b, 2), (c, 2)]
    assert arm.bases == [a, b, c]
    assert arm.most_tokens(4) == 12
    router = Router([arm, b], "fixed", "bd", draft_length=4)
    assert router.bases[:3] == [a, b, c]
    assert router.needs_features == (1, 2, 5)
    assert router.blocks == {5, 13, 3}  # a's and "no draft"'s, b's, c's
    twin = arm.clone()
    assert twin.name == arm.name
    assert not set(map(id, twin.bases)) & set(map(id, arm.bases))


def test_what_both_owed_counts():
    class Owes(Drafter):
        def __init__(self, name, tokens, owed):
            self.name, self.tokens, self.owed = name, tokens, owed

        def propose(self, tokens, n, sampling):
            return Draft(list(self.tokens), owed=self.owed, switch_seconds=self.owed / 8)

    draft = Fallback(Owes("a", [], 3), Owes("b", [1], 2)).propose([0], 4, Sampling())
    assert (draft.tokens, draft.owed, draft.switch_seconds) == ([1], 5, 0.625)
    assert Fallback(Owes("a", [1], 3), Owes("b", [2], 2)).propose([0], 4, Sampling()).owed == 3


# -- Sampling ------------------------------------------------------------------------------------


class Sometimes(Drafter):
    """Another drafter, where the text's last token is `on`; else nothing."""

    def __init__(self, drafter, on):
        self.name, self.drafter, self.on = drafter.name, drafter, on

    def propose(self, tokens, n, sampling):
        return self.drafter.propose(tokens, n, sampling) if tokens[-1] == self.on else Draft()


FIRSTS = {
    "copies": lambda v: Sometimes(CopyDrafter("first", lambda text: (text[-1] + 1) % v), 1),
    "draws": lambda v: Sometimes(TableDrafter("first", table(7, v, 2.5)), 1),
}


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("vocab", [2, 3])
def test_sampling_is_exact(first, vocab):
    """Joint arms among them: the first arm is asked for one token less than the second."""
    target = TableTarget(table(1, vocab), vocab)
    arm = Fallback(FIRSTS[first](vocab), TableDrafter("otherwise", table(2, vocab)))
    other = TableDrafter("other", table(3, vocab, 3.0))
    pool = [Capped(arm, 1), Capped(arm, 2), other]
    law = decode_law(target, pool, [0, 1], 4 if vocab == 2 else 3, policy=ByLastReward(0.5))
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert deviation(law, own_law(target, [0, 1], 4 if vocab == 2 else 3)) < EXACT


def test_nobody_is_asked_behind_one_that_left_out_what_it_drew():
    class Drops(TableDrafter):
        def propose(self, tokens, n, sampling):
            super().propose(tokens, n, sampling)
            return Draft()

    second = Script("second", lambda tokens, n: pytest.fail("asked"))
    sampling = Sampling(do_sample=True)
    sampling.begin_block(1)
    arm = Fallback(Drops("first", table(1, 3)), second)
    assert arm.propose([0], 2, sampling).tokens == []


# -- In the loop ---------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_length", [4, [2, 5]])
@pytest.mark.parametrize("how", ["alone", "shadow", "draft_all"])
def test_text_is_plain_decodings(target, how, draft_length):
    """None is disabled on the way: heads draft for several arms in a round, and catch up."""
    modes = {} if how == "alone" else {how: True}
    metasd = MetaSD(
        target, drafters=lookup_before_heads(target), draft_length=draft_length, reward="bd",
        policy="uniform", **modes,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        out = metasd.generate(PROMPT, max_new_tokens=60, seed=1, return_dict_in_generate=True)
    assert out.sequences[0].tolist() == greedy_text(target.model, PROMPT, 60)


def test_heads_draft_the_same_twice_in_a_round(target):
    """Joint arms of one head, under shadow drafting: the longer repeats the shorter."""
    for tree in (False, True):
        head = head_of(target, 3, tree=tree)
        draws = torch.Generator().manual_seed(0)
        head.start(PROMPT)
        head.commit(PROMPT, torch.randn(len(PROMPT) - 1, 2 * head.shape.hidden, generator=draws))
        head._keys, head._values = head._keys[:12], head._values[:12]  # no room for a second draft
        short, long, again = (head.propose(PROMPT, n, Sampling()) for n in (1, 6, 6))
        assert long.tokens == again.tokens
        assert long.parents == again.parents
        if not tree:
            assert short.tokens == long.tokens[:1]
        assert again.owed == 0


@pytest.mark.parametrize("mode", ["homogeneous", "heterogeneous"])
@pytest.mark.parametrize("draft_length", [4, [2, 5]])
def test_rows_are_plain_decodings(target, tiny_llama, mode, draft_length):
    lm = LanguageModel(tiny_llama(5, vocab=VOCAB, layers=1), VOCAB, "lm")
    exits = make_pool(["prompt-lookup:3:2>early-exit:2", "early-exit:2"], target)
    pool = [*lookup_before_heads(target), *exits, Fallback(PromptLookup(4, 3), lm)]
    metasd = MetaSD(target, drafters=pool, draft_length=draft_length, reward="bd", policy="uniform")
    prompts = [PROMPT, [3, 1, 4, 1, 5, 9, 2, 6], [1], [7, 7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        outputs = list(
            metasd.generate_many(prompts, max_batch=3, mode=mode, seed=2, max_new_tokens=30)
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.sequences[0].tolist() == greedy_text(target.model, prompt, 30)
    assert len({r.arm for output in outputs for r in output.trace}) > 3


def test_a_sampled_row_is_what_it_is_alone(target):
    """Tokens, arms and rewards, which no clock enters."""
    sampled = {"do_sample": True, "temperature": 1.3, "max_new_tokens": 25}
    options = {"reward": "bd", "policy": "exp3", "draft_length": [2, 4]}
    batch = MetaSD(target, drafters=lookup_before_heads(target), **options)
    prompts = [PROMPT, [3, 1, 4], [2, 7, 1, 8, 2, 7]]
    for prompt, output in zip(
        prompts, batch.generate_many(prompts, mode="heterogeneous", seed=4, **sampled), strict=True
    ):
        single = MetaSD(target, drafters=lookup_before_heads(target), **options)
        alone = single.generate([prompt], seed=output.seed, return_dict_in_generate=True, **sampled)
        assert output.sequences.tolist() == alone.sequences.tolist()
        for ours, theirs in zip(output.trace.rounds, alone.trace.rounds, strict=True):
            for name in ("arm", "drafted", "accepted", "emitted", "owed"):
                assert getattr(ours, name) == getattr(theirs, name)


def test_a_shared_drafter_is_told_once(target):
    class Counted(PromptLookup):
        def start(self, tokens):
            self.calls = ["start"]
            super().start(tokens)

        def commit(self, tokens, features=None):
            self.calls.append("commit")
            super().commit(tokens, features)

    lookup = Counted()
    pool = [Fallback(lookup, head_of(target, i)) for i in range(2)]
    metasd = MetaSD(target, drafters=[*pool, lookup], draft_length=[2, 4], reward="bd")
    out = metasd.generate(PROMPT, max_new_tokens=20, return_dict_in_generate=True)
    assert lookup.calls == ["start"] + ["commit"] * out.statistics.rounds


@pytest.mark.parametrize("which", ["first", "otherwise"])
@pytest.mark.parametrize("rows", [1, 2])
def test_one_that_breaks_takes_its_arms_along(target, which, rows):
    def breaks(tokens, n):
        raise RuntimeError("out of paper")

    broken, sound = Script("broken", breaks), Script("sound", lambda tokens, n: [])
    arm = Fallback(*((broken, sound) if which == "first" else (sound, broken)))
    metasd = MetaSD(target, drafters=[arm, sound], reward="bd", policy=ByTurns([0, 1]))
    prompts = torch.tensor([PROMPT] * rows)
    with pytest.warns(RuntimeWarning, match=f"'{arm.name}' is disabled.*out of paper"):
        out = metasd.generate(prompts, max_new_tokens=9)
    assert out.tolist() == [greedy_text(target.model, PROMPT, 9)] * rows


def test_steps_of_heads_behind_another_are_compiled(target, monkeypatch):
    monkeypatch.setattr(compiled, "_compiled", lambda eagle, say: made)
    made = object()
    pool = lookup_before_heads(target)
    heads = [base for arm in pool for base in arm.bases if isinstance(base, Eagle)]
    compile_steps(MetaSD(target, drafters=pool, draft_length=[2, 3]).router.bases)
    assert [head.compiled for head in heads] == [made] * 3
    head = head_of(target, 4)
    compile_steps([Capped(Fallback(PromptLookup(), head), 2)])
    assert head.compiled is made


# -- By name -------------------------------------------------------------------------------------


def test_prompt_lookup_by_name(target):
    for name, sizes in [
        ("prompt-lookup", (3, 1)),
        ("prompt-lookup:5", (5, 1)),
        ("prompt-lookup:3:2", (3, 2)),
        ("prompt-lookup:4:4", (4, 4)),
    ]:
        drafter = make_drafter(name, target)
        assert (drafter.ngram, drafter.least) == sizes
        assert drafter.name == name
    assert make_drafter("prompt-lookup:3:1", target).name == "prompt-lookup"


def test_what_is_named_twice_is_made_once(target):
    names = ["prompt-lookup>early-exit:1", "prompt-lookup>suffix>early-exit:2", "prompt-lookup"]
    pool = make_pool([*names, "early-exit:1"], target)
    assert [drafter.name for drafter in pool] == [*names, "early-exit:1"]
    bases = Router(pool, "fixed", "bd").bases
    assert [base.name for base in bases if base.name != "none"] == [
        "prompt-lookup", "early-exit:1", "suffix", "early-exit:2",
    ]  # fmt: skip


def test_a_pool_behind_a_drafter(target, tmp_path: Path):
    shape = EagleShape.of(target.model.config, (1, 2))
    head = {
        f"eagle-{name}": Trained(
            "eagle", shape, {k: torch.ones(size) for k, size in shape.sizes().items()}, {}
        )
        for name in "ab"
    }
    save_pool(tmp_path / "pool", target.model, "tiny", torch.arange(VOCAB), head, {}, {})
    name = f"pool:{tmp_path / 'pool'}?tree=dynamic&nodes=4&first=prompt-lookup:3:2"
    pool = make_pool([name, "prompt-lookup:3:2"], target)
    assert [drafter.name for drafter in pool] == [
        "prompt-lookup:3:2>eagle-a:dynamic",
        "prompt-lookup:3:2>eagle-b:dynamic",
        "prompt-lookup:3:2",
    ]
    assert len({id(drafter.bases[0]) for drafter in pool}) == 1
    metasd = MetaSD(target, drafters=pool, reward="bd", policy="uniform")
    assert metasd.generate(PROMPT, max_new_tokens=20)[0].tolist() == greedy_text(
        target.model, PROMPT, 20
    )


@pytest.mark.model
@pytest.mark.slow
def test_the_ready_pool_behind_prompt_lookup(smollm):
    """Lossless, and in fewer rounds than the heads alone where the text repeats itself."""
    from metasd_runtime.training.prompts import encode

    ids = torch.tensor([encode(smollm.tokenizer, "Write the numbers from one to ten, twice.")])
    plain = smollm.model.generate(ids, max_new_tokens=64, do_sample=False)
    heads, both = (
        MetaSD(smollm.model, smollm.tokenizer, drafters=[f"pool:smollm2-135m{first}"]).generate(
            ids, max_new_tokens=64, policy="fixed", return_dict_in_generate=True
        )
        for first in ("", "?first=prompt-lookup:3:2")
    )
    assert torch.equal(heads.sequences, plain)
    assert torch.equal(both.sequences, plain)
    assert both.statistics.rounds < heads.statistics.rounds


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prompt-lookup>", "lacks one of two.*prompt-lookup>early-exit:8"),
        (">suffix", "lacks one of two"),
        ("prompt-lookup>sufix", "did you mean 'suffix'"),
        ("sufix>none", "did you mean 'suffix'"),
        ("prompt-lookup:3:2>pool:mine", r"pool:NAME\?first=prompt-lookup:3:2"),
        ("pool:none?first=sufix", "did you mean 'suffix'"),
        ("pool:none?frist=suffix", "did you mean 'first'"),
        ("prompt-lookup:3:4", r"least=4 .*\[1, 3\]"),
        ("prompt-lookup:3:0", r"least=0 .*\[1, 3\]"),
        ("prompt-lookup:3:two", "'two' needs a whole number.*prompt-lookup:3:2"),
        ("prompt-lookup::2", "'' needs a whole number"),
    ],
)
def test_names_that_make_no_sense_are_refused(target, name, message):
    with pytest.raises(ConfigError, match=message):
        make_pool([name], target)
