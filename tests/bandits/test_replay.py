"""Full and rejection replay: the same decisions as live, and the truth within the interval."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import scipy.stats

from metasd_bandits import POLICIES, ConfigError, Policy, Round, Trace, TraceHeader, make_policy
from metasd_bandits.carried import Carried
from metasd_bandits.intervals import Bootstrap, ReplayError, UnitSums
from metasd_bandits.replay.full import decisions, full_replay, in_order
from metasd_bandits.replay.players import _Interpreted, make_player
from metasd_bandits.replay.rejection import rejection_replay
from metasd_bandits.replay.results import difference
from metasd_bandits.traces.columns import ColumnReader
from metasd_bandits.traces.parquet import write_parquet
from metasd_bandits.traces.synthetic import SyntheticLog, SyntheticReader

SETTINGS = {"fixed": "fixed:arm=1", "ucb": "ucb:beta=0.2"}
NAMES = [SETTINGS.get(name, name) for name in sorted(POLICIES)]
LAW = SyntheticLog(queries=12, rounds=40, seed=5, steps=(1.0, 1.2, 1.6))


class Plain(Policy):
    """Epsilon-greedy as a user would write it, in Python only."""

    name = "plain"

    def reset(self, n_arms, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.pulls, self.total, self.cost = np.zeros(n_arms), np.zeros(n_arms), 0.0

    def forget(self, keep, seed=None):
        self.pulls, self.total = keep * self.pulls, keep * self.total

    def select(self, available=None):
        usable = np.flatnonzero(np.ones(len(self.pulls), bool) if available is None else available)
        if self.rng.random() < 0.3:
            return int(self.rng.choice(usable))
        return int(usable[np.argmax((self.total / np.maximum(self.pulls, 1))[usable])])

    def update(self, arm, reward, *, cost=1.0, propensity=math.nan, rewards=None):
        assert 0.0 <= reward <= 1.0
        self.pulls[arm] += 1
        self.total[arm] += reward
        self.cost += cost


def live_arms(policy, rounds, n_arms, scope, seed):
    """The decoder's loop: begin each query, select, update."""
    policy = make_policy(policy)
    policy = Carried(copy.deepcopy(policy)) if scope == "carried" else policy
    arms, last = [], None
    for r in rounds:
        if last != r.query:
            policy.begin(n_arms, seed if last is None else None)
        last = r.query
        usable = [not math.isnan(x) for x in r.rewards]
        arm = policy.select(None if all(usable) else usable)
        every = r.rewards if all(usable) else None
        policy.update(arm, r.rewards[arm], cost=r.steps[arm], rewards=every)
        arms.append(arm)
    return arms


def replayed(source, policy, scope, seed):
    parts = [arms for _, arms in decisions(source, policy, scope=scope, seed=seed)]
    return np.concatenate(parts).tolist()


@pytest.mark.filterwarnings("ignore:policy 'plain'")
@pytest.mark.parametrize("scope", ["query", "carried"])
@pytest.mark.parametrize("policy", [*NAMES, "plain"])
def test_full_replay_takes_the_decisions_of_the_live_policy(policy, scope):
    policy = Plain() if policy == "plain" else policy
    reader = SyntheticReader(LAW)
    rounds = list(reader.rounds())
    for seed in (0, 11):
        live = live_arms(policy, rounds, 3, scope, seed)
        assert replayed(reader, policy, scope, seed) == live


@pytest.mark.filterwarnings("ignore:policy 'plain'")
@pytest.mark.parametrize("policy", ["ucb", "uniform", "hedge", "plain"])
def test_arms_that_could_not_serve_are_masked_as_they_are_live(policy):
    policy = Plain() if policy == "plain" else policy
    rng = np.random.default_rng(1)
    rounds = []
    for r in SyntheticReader(LAW).rounds():
        broken = rng.integers(0, 3) if rng.random() < 0.2 else -1
        rewards = tuple(math.nan if i == broken else x for i, x in enumerate(r.rewards))
        rounds.append(dataclasses.replace(r, rewards=rewards))
    trace = Trace(LAW.header, rounds)
    arms = replayed(trace, policy, "query", 3)
    assert arms == live_arms(policy, rounds, 3, "query", 3)
    assert all(not math.isnan(r.rewards[arm]) for r, arm in zip(rounds, arms, strict=True))


@pytest.mark.filterwarnings("ignore:policy 'plain'")
@pytest.mark.parametrize("name", ["ucb", "sw-ucb", "sh:budget=20", "plain"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_a_carried_policy_follows_its_own_rule(name, keep):
    rounds = list(SyntheticReader(LAW).rounds())
    carried = Carried(Plain() if name == "plain" else make_policy(name), keep)
    live = live_arms(copy.deepcopy(carried), rounds, 3, "query", 3)
    assert replayed(SyntheticReader(LAW), carried, "query", 3) == live
    assert replayed(SyntheticReader(LAW), carried, "carried", 3) == live


def test_what_cannot_be_carried_is_refused():
    class Stubborn(Plain):
        forget = Policy.forget

    with pytest.raises(ReplayError, match=r"cannot be carried; implement forget\(\)"):
        full_replay(SyntheticReader(LAW), Stubborn(), scope="carried")


def test_a_query_drops_the_decision_that_waits():
    """Carried through rejection replay, the compiled and the interpreted engine agree."""
    law = dataclasses.replace(LAW, full=False, queries=200, rounds=5)
    for name in ("ucb", "sw-ucb"):
        compiled = make_player(Carried(make_policy(name)), 3, 1)
        plain = _Interpreted(Carried(make_policy(name)), 3, 1)
        for batch, starts in in_order(SyntheticReader(law), (), Carried(make_policy(name)), None):
            keep = np.random.default_rng(0).random(len(batch)) < 0.5
            logged = (starts, batch["arm"], batch["reward"], np.ones(1), keep)
            taken = compiled.match(*logged)
            assert taken.tolist() == plain.match(*logged).tolist()
            assert 50 < taken.sum() < 400


def test_storage_and_batch_cuts_do_not_change_decisions(tmp_path):
    law = dataclasses.replace(LAW, queries=4000)  # more than one batch
    write_parquet(SyntheticReader(law), tmp_path / "t.parquet")
    for scope in ("query", "carried"):
        a = replayed(tmp_path / "t.parquet", "ucb", scope, 2)
        assert a == replayed(SyntheticReader(law), "ucb", scope, 2)


def test_a_fixed_arm_earns_its_column():
    rounds = list(SyntheticReader(LAW).rounds())
    result = full_replay(SyntheticReader(LAW), "fixed:arm=2", tokens=60)
    table = np.array([r.rewards for r in rounds])
    tokens = np.array([r.tokens for r in rounds])
    assert result["reward per round"].value == pytest.approx(table[:, 2].mean(), rel=1e-12)
    assert result["tokens per round"].value == pytest.approx(tokens[:, 2].mean(), rel=1e-12)
    assert result["tokens per step"].value == pytest.approx(tokens[:, 2].mean() / 1.6, rel=1e-12)
    by_query = tokens[:, 2].reshape(12, 40).cumsum(axis=1)
    first = (by_query < 60).sum(axis=1) + 1
    assert result["rounds to 60 tokens"].value == pytest.approx(first.mean(), rel=1e-12)
    assert result["steps to 60 tokens"].value == pytest.approx(1.6 * first.mean(), rel=1e-12)
    assert result.shares.tolist() == [0.0, 0.0, 1.0]
    assert result["reward per round"].accepted == 480
    assert result["reward per round"].unit == "query"


def test_tokens_follow_from_the_reward_where_it_tells_them():
    full = full_replay(SyntheticReader(LAW), "ucb")
    for reward in ("be", "tokens"):
        law = dataclasses.replace(LAW, reward=reward)
        rounds = [dataclasses.replace(r, tokens=None) for r in SyntheticReader(law).rounds()]
        a = full_replay(Trace(law.header, rounds), "fixed:arm=1")["tokens per round"]
        assert a.value == full_replay(SyntheticReader(law), "fixed:arm=1")["tokens per round"].value
    law = dataclasses.replace(LAW, reward="bd")
    rounds = [dataclasses.replace(r, tokens=None) for r in SyntheticReader(law).rounds()]
    result = full_replay(Trace(law.header, rounds), "ucb", tokens=5)
    with pytest.raises(ReplayError, match="does not tell every arm's tokens"):
        result["rounds to 5 tokens"]
    assert full["tokens per round"].value > 1.0


def test_many_seeds_are_their_average():
    each = [full_replay(SyntheticReader(LAW), "uniform", seeds=[s]) for s in (1, 2, 3)]
    together = full_replay(SyntheticReader(LAW), "uniform", seeds=(1, 2, 3))
    q = "reward per round"
    assert together[q].value == pytest.approx(np.mean([r[q].value for r in each]), rel=1e-12)
    assert together.shares == pytest.approx(np.mean([r.shares for r in each], axis=0))


def test_a_plain_policy_is_warned_about_and_never_changed():
    policy = Plain()
    with pytest.warns(UserWarning, match=r"interpreted.*CompiledPolicy"):
        full_replay(SyntheticReader(LAW), policy)
    assert not hasattr(policy, "rng")
    compiled = make_policy("ucb")
    full_replay(SyntheticReader(LAW), compiled)
    assert not hasattr(compiled, "_buffer")


def simple_trace(rounds, n_arms=2):
    header = TraceHeader(tuple("abcde"[:n_arms]), 5, "uniform", "be")
    return Trace(header, [Round(**{**BASE, **r}) for r in rounds])


BASE = {
    "query": "q",
    "index": 0,
    "arm": 0,
    "drafted": 5,
    "accepted": 1,
    "emitted": 2,
    "block_efficiency": 0.2,
    "block_divergence": 0.2,
    "reward": 0.2,
    "propensity": 0.5,
}


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ([], "no rounds"),
        ([{}], "record with --shadow"),
        ([{"rewards": (0.1, 0.2)}, {}], "1 of 2 rounds"),
        ([{"rewards": (0.1, 1.2)}], "reward of 1.2"),
        ([{"rewards": (math.nan, math.nan)}], "no arm could serve"),
        ([{"rewards": (0.1, 0.2), "steps": (0.0, 1.0)}], "step that is not positive"),
        (
            [{"rewards": (0.1, 0.2), "query": q} for q in ("a", "b", "a")],
            "query 'a' goes on after another began",
        ),
    ],
)
def test_full_replay_refuses_with_the_reason(rounds, message):
    with pytest.raises(ReplayError, match=message):
        full_replay(simple_trace(rounds), "ucb")


@pytest.mark.parametrize(
    ("rounds", "options", "message"),
    [
        ([], {}, "no rounds"),
        ([{"propensity": math.nan}], {}, "lacks propensities"),
        ([{"propensity": 1.0}, {"arm": 1, "propensity": 1.0}], {}, "deterministic logger"),
        ([{"propensity": 1.5}], {}, "propensity of 1.5"),
        ([{"reward": math.nan}], {}, "reward of nan"),
        ([{}], {}, "'b' was never logged"),
        ([{}, {"arm": 1}], {"floor": 0.6}, "above the least propensity"),
    ],
)
def test_rejection_replay_refuses_with_the_reason(rounds, options, message):
    with pytest.raises(ReplayError, match=message):
        rejection_replay(simple_trace(rounds), "ucb", **options)


def test_options_are_checked():
    for call in (full_replay, rejection_replay):
        for options in ({"scope": "never"}, {"seeds": ()}, {"tokens": 0}, {"level": 1.0}):
            with pytest.raises(ConfigError):
                call(SyntheticReader(LAW), "ucb", **options)


def test_rounds_to_too_many_tokens_are_refused_with_the_most_that_works():
    result = full_replay(SyntheticReader(LAW), "fixed:arm=0", tokens=70)
    with pytest.raises(ReplayError, match=r"of 12 queries end before 70 tokens; one has (\d+)"):
        result["rounds to 70 tokens"]
    most = int(result.unanswered["rounds to 70 tokens"].split(" has ")[1].split()[0])
    assert full_replay(SyntheticReader(LAW), "fixed:arm=0", tokens=most).unanswered == {}
    assert full_replay(SyntheticReader(LAW), "fixed:arm=0", tokens=most + 1).unanswered


def test_rejection_keeps_the_matching_rounds_only():
    log = SyntheticReader(dataclasses.replace(LAW, full=False))
    rounds = list(log.rounds())
    result = rejection_replay(log, "fixed:arm=1")
    kept = [r for r in rounds if r.arm == 1]
    assert result["reward per round"].accepted == len(kept)
    assert result["reward per round"].value == pytest.approx(np.mean([r.reward for r in kept]))
    assert result["tokens per round"].value == pytest.approx(np.mean([r.emitted for r in kept]))
    with pytest.warns(UserWarning, match="interpreted"):
        plain = rejection_replay(log, Plain())
    assert 0 < plain["reward per round"].accepted < len(rounds)


def test_rejection_decides_as_live_on_the_rounds_it_keeps():
    """Feed the live policy the kept rewards in order: it must choose exactly the kept arms."""
    law = dataclasses.replace(LAW, full=False, queries=1, rounds=3000)
    rounds = list(SyntheticReader(law).rounds())
    policy = make_policy("ucb:beta=0.5")
    policy.reset(3, seed=4)
    arms = np.zeros(3)
    waiting = policy.select()
    for r in rounds:
        if r.arm == waiting:
            policy.update(waiting, r.reward)
            arms[waiting] += 1
            waiting = policy.select()
    result = rejection_replay(SyntheticReader(law), "ucb:beta=0.5", seeds=[4])
    assert result.shares == pytest.approx(arms / arms.sum(), rel=1e-12)


def test_acceptance_by_propensity_undoes_a_lopsided_logger():
    """Uniform target: after thinning, all arms are kept equally often whatever the logger did."""
    law = SyntheticLog(queries=300, rounds=100, logger=(0.6, 0.3, 0.1), seed=2, full=False)
    result = rejection_replay(SyntheticReader(law), "uniform", floor=0.1)
    assert result["reward per round"].accepted == pytest.approx(30_000 * 0.1, rel=0.06)
    assert result.shares == pytest.approx([1 / 3] * 3, abs=0.03)


def test_the_difference_of_two_policies_is_paired():
    good = full_replay(SyntheticReader(LAW), "fixed:arm=2", tokens=40)
    bad = full_replay(SyntheticReader(LAW), "fixed:arm=0", tokens=40)
    gap = difference(good, bad, "tokens per round")
    a, b = good["tokens per round"], bad["tokens per round"]
    assert gap.value == a.value - b.value
    assert 0.0 < gap.low < gap.value < gap.high
    assert difference(good, good, "tokens per round").high == 0.0
    assert difference(good, bad, "rounds to 40 tokens").high < 0.0
    logged = rejection_replay(SyntheticReader(LAW), "fixed:arm=2")
    with pytest.raises(ReplayError, match="one method"):
        difference(good, logged, "tokens per round")


def test_units_pool_without_losing_a_thing():
    rng = np.random.default_rng(0)
    ids, x = rng.integers(0, 5000, 20_000), rng.random(20_000)
    small, large = UnitSums(2, most=64), UnitSums(2, most=8192)
    for part in np.array_split(np.arange(20_000), 7):
        small.add(ids[part], 1.0, x[part])
        large.add(ids[part], 1.0, x[part])
    assert len(small.sums) <= 64
    assert small.sums.sum(axis=0) == pytest.approx([20_000, x.sum()])
    assert large.sums[:, 0].tolist() == np.bincount(ids).tolist()
    width = -(-5000 // len(small.sums)) if len(small.sums) else 0
    pooled = [large.sums[i : i + 128, 1].sum() for i in range(0, 5000, 128)]
    assert width <= 128
    assert small.sums[:, 1] == pytest.approx(pooled)


def test_the_bootstrap_of_a_mean_is_the_textbook_interval():
    rng = np.random.default_rng(3)
    x = rng.exponential(size=(400, 1))
    sums = np.hstack([np.ones_like(x), x])
    low, high = Bootstrap(sums, 0.95, resamples=4000).interval(lambda t: t[:, 1] / t[:, 0])
    half = 1.96 * x.std(ddof=1) / math.sqrt(400)
    assert (high - low) / 2 == pytest.approx(half, rel=0.06)
    assert low == pytest.approx(x.mean() - half, abs=0.25 * half)
    assert all(np.isnan(Bootstrap(sums[:1]).interval(lambda t: t[:, 1])))


def test_one_query_resamples_blocks_of_rounds_and_says_so():
    law = SyntheticLog(queries=1, rounds=6000, seed=1)
    one = full_replay(SyntheticReader(law), "fixed:arm=1")["reward per round"]
    assert (one.unit, one.n_units) == ("block of rounds", 1500)
    assert one.low < one.value < one.high
    assert "one query" in one.notes[0]


def test_a_column_reader_names_what_it_lacks():
    batch = next(SyntheticReader(LAW).batches(()))
    del batch.columns["propensity"]
    with pytest.raises(ValueError, match="no column propensity"):
        rejection_replay(ColumnReader(LAW.header, batch), "ucb")


def test_few_units_give_the_textbook_student_interval():
    x = np.random.default_rng(3).exponential(size=(5, 1))
    sums = np.hstack([np.ones_like(x), x])
    got = Bootstrap(sums, 0.9).interval(lambda t: t[:, 1] / t[:, 0])
    want = scipy.stats.t.interval(0.9, 4, x.mean(), scipy.stats.sem(x[:, 0]))
    assert got == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("stretch", [1, 100])
def test_rejection_refuses_a_log_whose_arms_had_no_chance_in_some_queries(stretch):
    """Arm 0 has no chance in some queries and arm 1 none in the others, p = 1/2 all the same."""
    batch = next(SyntheticReader(SyntheticLog(queries=200, rounds=30)).batches(()))
    lacking = (batch.query // stretch) % 2
    coin = np.random.default_rng(0).integers(0, 2, len(batch))
    batch.columns["arm"] = np.where(coin == 1, 2, 1 - lacking)
    batch.columns["propensity"] = np.full(len(batch), 0.5)
    with pytest.raises(ReplayError, match="so rarely that the logger"):
        rejection_replay(ColumnReader(LAW.header, batch), "ucb", floor=0.25)


def test_rejection_refuses_when_the_kept_rounds_are_not_what_the_floor_promises():
    batch = next(SyntheticReader(SyntheticLog(queries=200, rounds=30)).batches(()))
    batch.columns["propensity"] = np.full(len(batch), 0.2)  # the logger's own are 1/3
    with pytest.raises(ReplayError, match=r"of 6000 rounds were kept.* about 1200"):
        rejection_replay(ColumnReader(LAW.header, batch), "ucb")


def test_a_policy_that_learns_across_queries_has_no_interval_and_says_why():
    """A trace is one run of it; runs differ by more than queries do."""
    reader = SyntheticReader(LAW)
    for policy in ("ucb", Carried(make_policy("ucb"), keep=0.5)):
        for replay in (full_replay, rejection_replay):
            carried = replay(reader, policy, scope="carried")
            for e in carried.estimates.values():
                assert math.isnan(e.low)
                assert math.isnan(e.high)
                assert "learns across queries" in e.notes[0]
    gap = difference(carried, rejection_replay(reader, "uniform"), "reward per round")
    assert math.isnan(gap.low)
    assert math.isfinite(gap.value)


def test_a_policy_with_nothing_to_carry_keeps_its_interval():
    reader, ucb = SyntheticReader(LAW), make_policy("ucb")
    for policy, same in ((make_policy("fixed:arm=1"),) * 2, (Carried(ucb, keep=0.0), ucb)):
        e = full_replay(reader, policy, scope="carried")["reward per round"]
        assert e.low < e.value < e.high
        assert e == full_replay(reader, same)["reward per round"]
    e = full_replay(reader, "uniform", scope="carried")["reward per round"]
    assert e.low < e.value < e.high
