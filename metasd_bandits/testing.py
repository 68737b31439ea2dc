"""`check_policy`: does a policy keep the contract? One call, for anybody's class.

Each check is one function of this file. A check that fails raises `ContractError`, whose message
says what happened and what to fix; one that a policy need not support is reported as
"not offered".
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from metasd_bandits.policy import Policy

__all__ = ["CHECKS", "ContractError", "check_policy"]

K = 5
ROUNDS = 120


class ContractError(AssertionError):
    """A policy broke the contract; `check` names the check that found it."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


class NotOfferedError(Exception):
    """The policy does not implement an optional part of the contract."""


def check_policy(policy: Policy | type[Policy]) -> dict[str, str]:
    """Run the whole contract over a policy.

    Parameters
    ----------
    policy : Policy, or a subclass that can be made without arguments
        It must be able to run with 1, 2, 3 and 5 arms. What it had learned is lost.

    Returns
    -------
    dict
        Name of each check -> "passed" or "not offered".

    Raises
    ------
    ContractError
        At the first check that fails.

    Examples
    --------
    >>> from metasd_bandits import make_policy
    >>> report = check_policy(make_policy("ucb"))
    >>> set(report.values())
    {'passed'}
    """
    if isinstance(policy, type):
        policy = policy()
    report = {}
    for check in CHECKS:
        name = check.__name__.removeprefix("_").replace("_", " ")
        try:
            check(policy)
            report[name] = "passed"
        except NotOfferedError:
            report[name] = "not offered"
        except AssertionError as broken:
            raise ContractError(name, f"{policy!r} {broken}") from None
        except Exception as error:
            raise ContractError(
                name, f"{policy!r} raised {type(error).__name__}: {error}"
            ) from error
    return report


def _reward(t: int, arm: int) -> float:
    """A reward that differs by arm and wobbles over time, in [0, 1]."""
    wobble = (t * 37 + arm * 11) % 17 / 17
    return (0.1 + 0.15 * arm + 0.25 * wobble) % 1.0


def _play(policy: Policy, rounds: int, start: int = 0) -> list[int]:
    arms = []
    for t in range(start, start + rounds):
        arms.append(policy.select())
        policy.update(arms[-1], _reward(t, arms[-1]))
    return arms


def _offered(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call an optional method; the interface's own refusal is a TypeError that says "implement"."""
    try:
        return method(*arguments)
    except TypeError as error:
        if "implement" in str(error):
            raise NotOfferedError from None
        raise


def _arms_are_integers_in_range(policy: Policy) -> None:
    for n_arms in (1, 2, 3, K):
        if n_arms < _least_arms(policy):
            continue
        policy.reset(n_arms, seed=0)
        for arm in _play(policy, 30):
            assert isinstance(arm, int | np.integer), f"chose {arm!r}; select() must return an int"
            assert 0 <= arm < n_arms, f"chose arm {arm} of {n_arms}; arms are 0 .. K - 1"


def _least_arms(policy: Policy) -> int:
    """A policy that prefers an arm by its place needs that arm to exist."""
    return 1 if policy.symmetric else K


def _a_seed_fixes_the_run(policy: Policy) -> None:
    policy.reset(K, seed=7)
    first = _play(policy, ROUNDS)
    # A policy that reads the global generators is caught by moving them.
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        np.random.seed(1)  # noqa: NPY002
        random.seed(1)
        policy.reset(K, seed=7)
        again = _play(policy, ROUNDS)
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
    assert first == again, (
        "chose other arms after reset(seed=7) than the first time; forget everything in reset() "
        "and draw from a generator of your own that the seed restarts, not from np.random or random"
    )


def _reset_without_a_seed_lets_the_stream_run_on(policy: Policy) -> None:
    policy.reset(K, seed=3)
    for _ in range(3):
        _play(policy, 10)
        policy.reset(K)
    first = _play(policy, 20)
    policy.reset(K, seed=3)
    for _ in range(3):
        _play(policy, 10)
        policy.reset(K)
    assert first == _play(policy, 20), (
        "is not reproducible through reset(seed=None); keep the present stream there"
    )


def _ties_are_uniform(policy: Policy) -> None:
    if not policy.symmetric:
        raise NotOfferedError
    counts, seeds = np.zeros(K), 400
    for seed in range(seeds):
        policy.reset(K, seed=seed)
        counts[policy.select()] += 1
    limit = 5.0 * math.sqrt(seeds * (1 / K) * (1 - 1 / K))
    assert (np.abs(counts - seeds / K) < limit).all(), (
        f"chose its first arm with counts {counts.astype(int).tolist()} in {seeds} seeds; break "
        "ties uniformly with the seeded stream, not by index"
    )


def _bad_feedback_is_refused(policy: Policy) -> None:
    policy.reset(K, seed=0)
    _play(policy, 20)
    arm = policy.select()
    twin = copy.deepcopy(policy)
    bad: list[dict[str, Any]] = [
        {"arm": arm, "reward": r} for r in (math.nan, math.inf, -math.inf, -0.1, 1.1)
    ]
    bad += [{"arm": K, "reward": 0.5}, {"arm": -1, "reward": 0.5}]
    bad += [{"arm": arm, "reward": 0.5, "cost": c} for c in (math.nan, 0.0, -1.0, math.inf)]
    bad += [{"arm": arm, "reward": 0.5, "propensity": p} for p in (0.0, -0.5, 1.5)]
    bad += [{"arm": arm, "reward": 0.5, "rewards": r} for r in ([0.5], [math.nan] * K, [2.0] * K)]
    for feedback in bad:
        try:
            policy.update(**feedback)
        except ValueError:
            continue
        raise AssertionError(
            f"accepted update({', '.join(f'{k}={v}' for k, v in feedback.items())}); raise "
            "ValueError before any state changes, or one bad number decides every later choice"
        )
    for each in (policy, twin):
        each.update(arm, 0.5)
    assert _play(policy, ROUNDS) == _play(twin, ROUNDS), (
        "refused bad feedback but changed its state all the same; validate first, then learn"
    )


def _keywords_are_accepted(policy: Policy) -> None:
    policy.reset(K, seed=0)
    for t in range(20):
        arm = policy.select()
        rewards = [_reward(t, i) for i in range(K)]
        before = list(rewards)
        policy.update(arm, rewards[arm], cost=1.5, propensity=0.5, rewards=rewards)
        assert rewards == before, "changed the rewards it was given; copy them"


def _masked_arms_are_not_chosen(policy: Policy) -> None:
    policy.reset(K, seed=0)
    rng = np.random.default_rng(0)
    for t in range(ROUNDS):
        mask = rng.random(K) < 0.5
        mask[rng.integers(K)] = True
        given = mask.copy()
        arm = policy.select(given)
        assert mask[arm], f"chose arm {arm}, masked by available={mask.tolist()}; skip masked arms"
        assert (given == mask).all(), "changed the mask it was given; copy it"
        policy.update(arm, _reward(t, arm))
    try:
        policy.select([False] * K)
    except ValueError:
        pass
    else:
        raise AssertionError("chose an arm although all are masked; raise ValueError")


def _a_mask_lasts_one_round(policy: Policy) -> None:
    if not policy.symmetric:
        raise NotOfferedError
    policy.reset(K, seed=0)
    for _ in range(3):
        arm = policy.select([i == 0 for i in range(K)])
        policy.update(arm, 0.1)
    later = set(_play(policy, 10 * K))
    assert later != {0}, "kept choosing the one arm a past mask had left; a mask lasts one round"


def _probabilities_are_probabilities(policy: Policy) -> None:
    policy.reset(K, seed=1)
    for t in range(ROUNDS):
        mask = None if t % 3 else [i != t % K for i in range(K)]
        p = np.asarray(_offered(policy.probabilities, mask), dtype=float)
        assert p.shape == (K,), f"gave probabilities of shape {p.shape}; give one for each arm"
        assert (p >= 0.0).all(), f"gave probabilities {p}, which are not all finite and >= 0"
        assert abs(p.sum() - 1.0) < 1e-9, f"gave probabilities {p} that sum to {p.sum()}"
        if mask is not None:
            assert p[t % K] == 0.0, f"gave a masked arm the probability {p[t % K]}"
        arm = policy.select(mask)
        assert p[arm] > 0.0, f"chose arm {arm}, to which it had given probability 0"
        policy.update(arm, _reward(t, arm))


def _asking_changes_nothing(policy: Policy) -> None:
    policy.reset(K, seed=2)
    quiet = _play(policy, ROUNDS)
    policy.reset(K, seed=2)
    asked = []
    for t in range(ROUNDS):
        p = _offered(policy.probabilities)
        p[:] = math.nan
        asked.append(policy.select())
        policy.update(asked[-1], _reward(t, asked[-1]))
    assert quiet == asked, (
        "chose otherwise once probabilities() had been asked for or its answer written to; draw "
        "nothing there, and return a copy"
    )


def _probabilities_match_frequencies(policy: Policy) -> None:
    """Chosen arms minus their probabilities add up to noise of known variance."""
    excess, variance, rounds = np.zeros(K), np.zeros(K), 0
    for seed in range(10):
        policy.reset(K, seed=seed)
        for t in range(2 * K):
            p = _offered(policy.probabilities)
            arm = policy.select()
            excess += (np.arange(K) == arm) - p
            variance += p * (1.0 - p)
            policy.update(arm, _reward(t, arm))
            rounds += 1
    limit = 5.0 * np.sqrt(variance) + 1e-6 * rounds
    assert (np.abs(excess) <= limit).all(), (
        f"chose arms {excess.round(1).tolist()} times more often than its probabilities say in "
        f"{rounds} rounds (allowed: {limit.round(1).tolist()}); they must be those of select()"
    )


def _decide_tells_the_propensity(policy: Policy) -> None:
    policy.reset(K, seed=4)
    plain = _play(policy, ROUNDS)
    policy.reset(K, seed=4)
    for t in range(ROUNDS):
        p = _offered(policy.probabilities)
        arm, propensity = policy.decide()
        assert arm == plain[t], "chose another arm in decide() than in select()"
        assert abs(p[arm] - propensity) < 1e-9, (
            f"told propensity {propensity} in decide() but {p[arm]} in probabilities()"
        )
        policy.update(arm, _reward(t, arm))


def _permuting_arms_permutes_decisions(policy: Policy) -> None:
    """Two copies live through the same history under two namings of the arms."""
    if not policy.symmetric:
        raise NotOfferedError
    order = [3, 0, 4, 1, 2]
    policy.reset(K, seed=5)
    other = copy.deepcopy(policy)
    other.reset(K, seed=5)
    rng = np.random.default_rng(5)
    for t in range(ROUNDS // 2):
        p, q = _offered(policy.probabilities), _offered(other.probabilities)
        assert np.allclose(p, q[order], atol=1e-9), (
            f"gave arms the probabilities {p.round(6)}, and {q[order].round(6)} when they stood in "
            "another order; nothing but an arm's own record may distinguish it"
        )
        arm = int(rng.choice(K, p=p / p.sum()))
        for each, name in ((policy, arm), (other, order[arm])):
            each.select([i == name for i in range(K)])
            each.update(name, _reward(t, arm))


def _state_round_trips(policy: Policy) -> None:
    policy.reset(K, seed=6)
    _play(policy, 37)
    policy.select()  # one pull in flight
    try:
        state = json.loads(json.dumps(_offered(policy.state_dict)))
    except TypeError as error:
        raise AssertionError(f"gave a state that JSON cannot hold ({error}); use lists") from None
    twin = copy.deepcopy(policy)
    twin.reset(K, seed=999)
    _offered(twin.load_state_dict, state)
    assert _play(policy, ROUNDS, 37) == _play(twin, ROUNDS, 37), (
        "chose otherwise after load_state_dict(state_dict()); save all that select() reads, the "
        "random stream's position (not its seed) included"
    )


def _saved_state_is_a_copy(policy: Policy) -> None:
    policy.reset(K, seed=6)
    _play(policy, 20)
    saved = _offered(policy.state_dict)
    before = copy.deepcopy(saved)
    _play(policy, ROUNDS, 20)
    assert _same(saved, before), (
        "changed a state it had given away; copy arrays and lists in state_dict()"
    )
    _offered(policy.load_state_dict, saved)
    _play(policy, ROUNDS, 20)
    assert _same(saved, before), (
        "changed a state it had been given; copy arrays and lists in load_state_dict()"
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


def _pickle_round_trips(policy: Policy) -> None:
    policy.reset(K, seed=8)
    _play(policy, 20)
    twin = pickle.loads(pickle.dumps(policy))
    assert _play(policy, ROUNDS, 20) == _play(twin, ROUNDS, 20), (
        "chose otherwise after pickling; a sweep sends policies to other processes that way"
    )


def _memory_is_bounded(policy: Policy) -> None:
    policy.reset(K, seed=9)
    sizes = []
    for start in (0, 1500):
        _play(policy, 1500, start)
        sizes.append(len(pickle.dumps(policy)))
    assert sizes[1] < 1.2 * sizes[0], (
        f"took {sizes[0]} bytes after 1,500 rounds and {sizes[1]} after 3,000; keep sums or a "
        "window, not the history"
    )


def _feedback_may_be_late(policy: Policy) -> None:
    same = 0
    for seed in range(20):
        policy.reset(K, seed=seed)
        arms = [policy.select() for _ in range(2 * K)]
        same += len(set(arms)) == 1
        for t, arm in enumerate(reversed(arms)):
            policy.update(arm, _reward(t, arm))
        _play(policy, 10)
    if policy.symmetric:
        assert same < 20, (
            f"chose one arm {2 * K} times over while no reward had come back; count pulls in flight"
        )


def _many_at_once_are_learned_in_order(policy: Policy) -> None:
    policy.reset(K, seed=10)
    _play(policy, 10)
    arms = [policy.select() for _ in range(2 * K)]
    twin = copy.deepcopy(policy)
    rewards = [_reward(t, arm) for t, arm in enumerate(arms)]
    costs = [1.0 + t / K for t in range(len(arms))]
    # Whoever learns the sound part of it comes to prefer the arm that is worst.
    misleading: dict[str, Any] = {"arms": [0] * 50, "rewards": [1.0] * 50}
    bad: list[dict[str, Any]] = [
        {"rewards": [*[1.0] * 49, math.nan]},
        {"rewards": [1.0] * 49},
        {"costs": [*[1.0] * 49, 0.0]},
        {"propensities": [*[0.5] * 49, 2.0]},
        {"arms": [*[0] * 49, K]},
    ]
    for feedback in bad:
        try:
            policy.update_many(**(misleading | feedback))
        except ValueError:
            continue
        raise AssertionError(
            f"accepted update_many() with bad {', '.join(feedback)} in the last round; raise "
            "ValueError before any state changes"
        )
    policy.update_many([], [])
    chances = [(1.0 + t) / (1.0 + len(arms)) for t in range(len(arms))]
    policy.update_many(arms, rewards, costs=costs, propensities=chances)
    for arm, reward, cost, chance in zip(arms, rewards, costs, chances, strict=True):
        twin.update(arm, reward, cost=cost, propensity=chance)
    assert _play(policy, ROUNDS) == _play(twin, ROUNDS), (
        "chose otherwise after update_many() than after the same updates one by one, or after "
        "refusing bad ones; learn in order, and from all rounds or from none"
    )


def _extreme_rewards_are_survived(policy: Policy) -> None:
    for reward in (0.0, 1.0):
        policy.reset(K, seed=0)
        for _ in range(1000):
            policy.update(policy.select(), reward)
        try:
            p = _offered(policy.probabilities)
        except NotOfferedError:
            continue
        assert np.isfinite(p).all(), f"gave probabilities {p} after 1,000 rewards of {reward}"


def _hyperparameters_stay(policy: Policy) -> None:
    if not dataclasses.is_dataclass(policy) or isinstance(policy, type):
        raise NotOfferedError
    before = dataclasses.asdict(policy)
    policy.reset(K, seed=0)
    _play(policy, ROUNDS)
    assert dataclasses.asdict(policy) == before, (
        "changed its own hyperparameters while running; keep state beside them"
    )


CHECKS: tuple[Callable[[Policy], None], ...] = (
    _arms_are_integers_in_range,
    _a_seed_fixes_the_run,
    _reset_without_a_seed_lets_the_stream_run_on,
    _ties_are_uniform,
    _bad_feedback_is_refused,
    _keywords_are_accepted,
    _feedback_may_be_late,
    _many_at_once_are_learned_in_order,
    _masked_arms_are_not_chosen,
    _a_mask_lasts_one_round,
    _probabilities_are_probabilities,
    _asking_changes_nothing,
    _probabilities_match_frequencies,
    _decide_tells_the_propensity,
    _permuting_arms_permutes_decisions,
    _saved_state_is_a_copy,
    _state_round_trips,
    _pickle_round_trips,
    _memory_is_bounded,
    _extreme_rewards_are_survived,
    _hyperparameters_stay,
)
