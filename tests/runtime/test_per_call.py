"""Draft length, policy, pool and speculation for one call; lengths that adapt; shadow rewards."""

from __future__ import annotations

import math

import pytest
import torch
from enumeration import TableDrafter, TableTarget, deviation, every_outcome, own_law, table
from tiny_models import ATTENTION, VOCAB, build, small_lm

from metasd_bandits import Policy, Round, read_trace
from metasd_bandits.checks import ConfigError
from metasd_runtime.decoding.drafter import Drafter
from metasd_runtime.decoding.loop import Query, decode
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.stopping import Stopping
from metasd_runtime.drafters.capped import Capped
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.drafters.suffix import Suffix
from metasd_runtime.generation.statistics import Statistics
from metasd_runtime.metasd import MetaSD

PROMPT = [5, 9, 3, 5, 9, 3, 7, 5, 9, 3, 5, 9]
EXACT = 1e-12


@pytest.fixture(scope="module")
def model():
    return build(*ATTENTION["granite"])


@pytest.fixture(scope="module")
def plain(model):
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, pad_token_id=0)
    return out[0].tolist()


def lm(name="lm"):
    return LanguageModel(small_lm(), VOCAB, name=name)


def generate(metasd, **arguments):
    arguments = {"max_new_tokens": 30, "seed": 2, "return_dict_in_generate": True, **arguments}
    return metasd.generate(torch.tensor([PROMPT]), **arguments)


# Per call


def test_draft_length_policy_and_pool_for_one_call(model, plain):
    pool = ["prompt-lookup", "suffix", "early-exit:2"]
    metasd = MetaSD(model, drafters=pool, policy="ucb", reward="bd")
    out = generate(metasd, draft_length=2)
    assert max(r.drafted for r in out.trace) == 2
    assert out.trace.header.draft_length == 2
    out = generate(metasd, pool=["early-exit:2", "suffix"])
    assert out.trace.header.arms[:2] == ("early-exit:2", "suffix")
    out = generate(metasd, policy="fixed:arm=1")
    assert {r.arm for r in out.trace} == {1}
    out = generate(metasd, speculate=False)
    assert out.statistics.rounds == 30
    assert all(r.drafted == 0 for r in out.trace)
    out = generate(metasd)
    assert out.trace.header.draft_length == 5
    assert out.sequences[0].tolist() == plain


def test_a_call_of_its_own_leaves_what_the_session_carries(model):
    metasd = MetaSD(model, drafters=["prompt-lookup", "early-exit:2"], reward="bd", scope="carried")
    generate(metasd)
    carried = metasd.router.policy.state_dict()["policy"]["buffer"]
    generate(metasd, pool=["early-exit:2"])
    generate(metasd, policy="uniform")
    generate(metasd, speculate=False)
    assert metasd.router.policy.state_dict()["policy"]["buffer"] == carried
    generate(metasd, draft_length=3)  # the same arms and the same policy: it goes on learning
    assert metasd.router.policy.state_dict()["policy"]["buffer"] != carried


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pool": ["prompt-lokup"]}, "did you mean 'prompt-lookup'"),
        ({"pool": []}, "selects nothing"),
        ({"pool": "prompt-lookup"}, "list of names"),
        ({"draft_length": 0}, "draft_length=0"),
        ({"draft_threshold": 1.0}, "draft_threshold"),
        ({"policy": "unifrom"}, "did you mean 'uniform'"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_mistakes_are_refused_before_any_token(model, wrong, message):
    metasd = MetaSD(model, drafters=["prompt-lookup"], reward="bd")
    with pytest.raises(ConfigError, match=message):
        generate(metasd, **wrong)


def test_on_round_sees_every_round(model):
    seen: list[Round] = []
    out = generate(MetaSD(model, drafters=["suffix"], reward="bd"), on_round=seen.append)
    assert seen == list(out.trace)


# Per-position counts


def test_acceptance_by_position():
    def one(drafted, accepted):
        return Round("q", 0, 0, drafted, accepted, accepted + 1, 0.0, 0.0, 0.0)

    rounds = [one(3, 3), one(3, 1), one(2, 2), one(1, 0), one(0, 0)]
    arm = Statistics.of(["a"], rounds, seconds=1.0).arms[0]
    assert arm.drafted_at == (4, 3, 2)
    assert arm.accepted_at == (3, 2, 1)
    assert arm.reached_at == (4, 3, 1)
    assert arm.acceptance_at == (3 / 4, 2 / 3, 1.0)
    assert Statistics.of(["a"], [], seconds=1.0).arms[0].acceptance_at == ()


# Lengths that adapt


class Coward(TableDrafter):
    """Leaves out the token that it was not confident of: this bends the output."""

    def propose(self, tokens, n, sampling):
        draft = super().propose(tokens, n, sampling)
        if len(draft.tokens) < n:
            draft.tokens, draft.probs = draft.tokens[:-1], draft.probs[:-1]
        return draft


def law(target, drafters, tokens, *, threshold=0.0, shadow=False, policy="fixed"):
    def run():
        router = Router(drafters, policy, "bd", draft_length=2)
        sampling = Sampling(None, True, draft_threshold=threshold)
        query = Query("0", [0, 1], sampling, Stopping(2 + tokens), plain_step=1.0, shadow=shadow)
        for _ in decode(query, target, router):
            pass
        return tuple(query.tokens[2:])

    return every_outcome(run)


@pytest.mark.parametrize("vocab", [2, 3])
@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
def test_stopping_by_confidence_is_lossless(vocab, threshold):
    target = TableTarget(table(1, vocab), vocab)
    drafters = [TableDrafter("d", table(2, vocab, 2.5))]
    found = law(target, drafters, 3, threshold=threshold)
    assert deviation(found, own_law(target, [0, 1], 3)) < EXACT


def test_leaving_out_the_doubtful_token_would_not_be():
    """The enumeration can tell: this is why the token that ends the block stays in it."""
    target = TableTarget(table(1, 3), 3)
    found = law(target, [Coward("d", table(2, 3, 2.5))], 3, threshold=0.6)
    assert deviation(found, own_law(target, [0, 1], 3)) > 0.01


class Turns(Policy):
    """Joint arms in an order that depends on the last reward."""

    name = "turns"

    def reset(self, n_arms, seed=None):
        self.n_arms, self.arm, self.last = n_arms, -1, 0.0

    def select(self, available=None):
        self.arm = (self.arm + 1 + (self.last > 0.5)) % self.n_arms
        return self.arm

    def update(self, arm, reward, **kwargs):
        self.last = reward if kwargs.get("rewards") is None else max(kwargs["rewards"])


def test_joint_arms_are_lossless():
    target = TableTarget(table(1, 2), 2)
    base = TableDrafter("d", table(2, 2, 2.5))
    found = law(target, [Capped(base, 1), Capped(base, 2)], 4, policy=Turns(), threshold=0.7)
    assert deviation(found, own_law(target, [0, 1], 4)) < EXACT


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
def test_confidence_shortens_drafts_and_changes_no_greedy_token(model, plain, threshold):
    metasd = MetaSD(model, drafters=[lm()], reward="bd", draft_length=6)
    full = generate(metasd)
    short = generate(metasd, draft_threshold=threshold)
    assert short.sequences[0].tolist() == plain
    drafted = [sum(r.drafted for r in out.trace) / len(out.trace) for out in (full, short)]
    assert drafted[1] < drafted[0]
    assert all(r.drafted >= 1 for r in short.trace if r.emitted > 1)


def test_joint_arms_share_one_drafter(model, plain):
    """One start and one commit for all its arms, and the cache is right under every length."""

    class Counted(LanguageModel):
        calls: list[str]

        def start(self, tokens):
            self.calls = ["start"]
            super().start(tokens)

        def commit(self, tokens, features=None):
            self.calls.append("commit")
            super().commit(tokens, features)

    counted = Counted(model, VOCAB, name="twin")
    metasd = MetaSD(model, drafters=[counted, Suffix()], reward="be", draft_length=[1, 3, 6])
    assert metasd.router.arms[:3] == ("twin@1", "twin@3", "twin@6")
    out = generate(metasd, policy="round-robin", max_new_tokens=60)
    assert out.sequences[0].tolist()[: len(plain)] == plain
    assert counted.calls == ["start"] + ["commit"] * out.statistics.rounds
    twins = [r for r in out.trace if r.arm < 3]
    assert {r.drafted for r in twins} >= {1, 3, 6}
    assert all(r.accepted == min(r.drafted, r.emitted) for r in twins)


def test_joint_arms_that_make_no_sense_are_refused(model):
    for lengths in ([], [3, 3], [2, 0]):
        with pytest.raises(ConfigError, match="draft_length"):
            MetaSD(model, drafters=["suffix"], draft_length=lengths)


# Shadow drafting


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("policy", ["ucb", "uniform", "exp3"])
def test_shadow_drafts_never_change_the_output(model, policy, do_sample):
    def outcome(shadow):
        pool = ["prompt-lookup", lm(), "early-exit:2", "none"]
        metasd = MetaSD(model, drafters=pool, policy=policy, reward="bd", shadow=shadow)
        return generate(metasd, do_sample=do_sample)

    bare, shadowed = outcome(False), outcome(True)
    assert shadowed.sequences.tolist() == bare.sequences.tolist()
    assert [r.arm for r in shadowed.trace] == [r.arm for r in bare.trace]
    for r in shadowed.trace:
        assert len(r.rewards) == len(r.tokens) == len(r.steps) == 4
        assert r.rewards[r.arm] == r.reward
        assert r.tokens[r.arm] == r.emitted
        assert r.rewards[3] == 0.0  # no draft scores 0 by definition
        assert r.tokens[3] == 1


def test_greedy_shadow_rewards_are_those_of_using_the_arm(model):
    """At the first round nothing has been learned, so each arm's own decode tells its reward."""
    pool = ["prompt-lookup", "early-exit:2", lm()]
    metasd = MetaSD(model, drafters=pool, policy="fixed", reward="bd")
    first = next(iter(generate(metasd, shadow=True).trace))
    for arm in range(3):
        alone = next(iter(generate(metasd, policy=f"fixed:arm={arm}").trace))
        assert first.rewards[arm] == pytest.approx(alone.block_divergence, abs=1e-5)
        assert first.tokens[arm] == alone.emitted


@pytest.mark.slow
def test_a_policy_that_learns_from_shadows_stays_lossless():
    target = TableTarget(table(1, 2), 2)
    drafters = [TableDrafter("a", table(2, 2, 2.5)), TableDrafter("b", table(3, 2))]
    found = law(target, drafters, 2, shadow=True, policy=Turns())
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    assert deviation(found, own_law(target, [0, 1], 2)) < EXACT


def test_hedge_learns_from_shadow_rounds(model, tmp_path):
    pool = ["prompt-lookup", lm(), LanguageModel(model, VOCAB, name="twin")]
    metasd = MetaSD(model, drafters=pool, policy="hedge:scale=2", reward="bd", shadow=True)
    out = generate(metasd, max_new_tokens=80, trace=tmp_path / "t.jsonl")
    assert [r.rewards for r in read_trace(tmp_path / "t.jsonl")] == [r.rewards for r in out.trace]
    twin = out.statistics.arms[2]
    assert twin.pulls == max(arm.pulls for arm in out.statistics.arms)
    assert metasd.router.policy.probabilities()[2] > 0.9


def test_a_shadow_that_breaks_is_disabled_and_the_record_says_so(model, plain, tmp_path):
    class Broken(Drafter):
        name = "broken"

        def propose(self, tokens, n, sampling):
            raise RuntimeError("out of order")

    metasd = MetaSD(model, drafters=["suffix", Broken()], policy="hedge", reward="bd", shadow=True)
    with pytest.warns(RuntimeWarning, match="out of order"):
        out = generate(metasd, trace=tmp_path / "t.jsonl")
    assert out.sequences[0].tolist() == plain
    assert all(math.isnan(r.rewards[1]) and r.tokens[1] == 0 for r in out.trace if r.arm != 1)
    assert len(read_trace(tmp_path / "t.jsonl")) == len(out.trace)
