"""DraftAll: greedy it says what the target says, sampled it follows the target's law exactly."""

from __future__ import annotations

import pytest
import torch
from enumeration import (
    CopyDrafter,
    TableDrafter,
    TableTarget,
    deviation,
    every_outcome,
    own_law,
    table,
)
from tiny_models import ATTENTION, VOCAB, build, small_lm

from metasd_bandits.checks import ConfigError
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.loop import Query, decode
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.stopping import Stopping
from metasd_runtime.drafters.fallback import Fallback
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.metasd import MetaSD

PROMPT = torch.tensor([[5, 9, 3, 5, 9, 3, 7, 5, 9, 3, 5, 9]])
EXACT = 1e-12


def law(target, drafters, tokens, draft_length=2):
    def run():
        router = Router(drafters, "fixed", "bd", draft_length=draft_length)
        query = Query("0", [0, 1], Sampling(None, True), Stopping(2 + tokens), plain_step=1.0)
        query.draft_all = True
        for _ in decode(query, target, router):
            pass
        return tuple(query.tokens[2:])

    return every_outcome(run)


class Short(TableDrafter):
    def propose(self, tokens, n, sampling):
        return super().propose(tokens, min(n, 1), sampling)


class Odd(CopyDrafter):
    """Has nothing to say behind even tokens."""

    def __init__(self):
        super().__init__("odd", lambda text: text[0])

    def propose(self, tokens, n, sampling):
        return super().propose(tokens, n, sampling) if tokens[-1] % 2 else Draft()


class Breaks(TableDrafter):
    """Raises behind one of the tokens it may draw: what it drew must stand."""

    def propose(self, tokens, n, sampling):
        draft = super().propose(tokens, min(n, 1), sampling)
        if draft.tokens[0] == 0:
            raise RuntimeError("broke")
        return draft


POOLS = {
    "two drawn": lambda v: [TableDrafter("a", table(2, v)), TableDrafter("b", table(3, v, 2.5))],
    "the same twice": lambda v: [TableDrafter("a", table(2, v)), TableDrafter("b", table(2, v))],
    "drawn and copied": lambda v: [
        CopyDrafter("copy", lambda text: text[0]),
        TableDrafter("b", table(3, v)),
        CopyDrafter("count", lambda text: (text[-1] + 1) % v),
    ],
    "one behind another": lambda v: [
        Fallback(Odd(), TableDrafter("b", table(3, v))),
        TableDrafter("c", table(2, v)),
    ],
    "unequal lengths": lambda v: [Short("a", table(2, v)), TableDrafter("b", table(3, v))],
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("vocab", [2, 3])
def test_sampling_is_exact(pool, vocab):
    target = TableTarget(table(1, vocab), vocab)
    tokens = 3 if vocab == 2 or pool == "drawn and copied" else 2
    found = law(target, POOLS[pool](vocab), tokens)
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    assert deviation(found, own_law(target, [0, 1], tokens)) < EXACT


@pytest.mark.filterwarnings("ignore:drafter 'a' is disabled")
def test_what_a_breaking_drafter_drew_stands():
    target = TableTarget(table(1, 2), 2)
    drafters = [Breaks("a", table(2, 2)), TableDrafter("b", table(3, 2))]
    assert deviation(law(target, drafters, 2), own_law(target, [0, 1], 2)) < EXACT


@pytest.fixture(scope="module")
def model():
    return build(*ATTENTION["granite"])


def test_greedy_equals_plain_and_no_arm_does_better(model):
    lm = LanguageModel(small_lm(), VOCAB)
    pool = ["prompt-lookup", "early-exit:1", "early-exit:2", lm]
    metasd = MetaSD(model, drafters=pool, reward="bd", draft_all=True)
    plain = model.generate(PROMPT, max_new_tokens=40, do_sample=False, pad_token_id=0)
    out = metasd.generate(PROMPT, max_new_tokens=40, return_dict_in_generate=True)
    assert out.sequences.tolist() == plain.tolist()
    assert len({r.arm for r in out.trace}) > 1
    for arm in range(4):
        alone = metasd.generate(
            PROMPT,
            max_new_tokens=40,
            draft_all=False,
            policy=f"fixed:arm={arm}",
            return_dict_in_generate=True,
        )
        assert out.statistics.rounds <= alone.statistics.rounds


def test_the_cache_is_the_winners(model):
    """Twins of the target in between others: were the wrong block left in the cache, one of
    their later drafts would be rejected."""

    class Wrong(Drafter):
        def __init__(self, name):
            self.name = name

        def propose(self, tokens, n, sampling):
            return Draft([(tokens[-1] + 11) % VOCAB] * n)

    pool = [Wrong("first"), LanguageModel(model, VOCAB, name="twin"), Wrong("last")]
    metasd = MetaSD(model, drafters=pool, reward="be", draft_all=True)
    out = metasd.generate(
        PROMPT, max_new_tokens=40, do_sample=True, seed=3, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    text = out.sequences[0]
    logits = model(text[None]).logits[0, PROMPT.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.cat(out.logits), logits, atol=1e-4, rtol=1e-3)


def test_contradictions_are_refused(model):
    metasd = MetaSD(model, drafters=["suffix"], reward="bd", draft_all=True)
    with pytest.raises(ConfigError, match="policy"):
        metasd.generate(PROMPT, max_new_tokens=4, policy="uniform")
    with pytest.raises(ConfigError, match="shadow"):
        metasd.generate(PROMPT, max_new_tokens=4, shadow=True)


def test_several_rows_are_drafted_by_all(model):
    metasd = MetaSD(model, drafters=["prompt-lookup", "early-exit:2"], reward="bd", draft_all=True)
    two = torch.cat([PROMPT, PROMPT + 1])
    out = metasd.generate(two, max_new_tokens=12, return_dict_in_generate=True)
    plain = model.generate(two, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert out.sequences.tolist() == plain.tolist()
    assert all(r.propensity != r.propensity for r in out.trace)  # NaN: nothing was chosen
