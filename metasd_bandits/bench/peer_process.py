"""Times other libraries' UCB from Python; run by `decisions` in their environment.

It imports nothing of ours, so that the peers need not share our dependencies. Prints one JSON
object: library -> arms -> microseconds of one select + update.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable

Round = Callable[[], None]


def best_microseconds(round_: Round, warmup: int, seconds: float = 1.0) -> float:
    """Least mean time of a round over many short batches, so that other load counts little."""
    for _ in range(warmup):
        round_()
    best, batch, end = float("inf"), 20, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(batch):
            round_()
        spent = time.perf_counter() - start
        best = min(best, spent / batch)
        batch = max(1, min(2000, int(batch * 0.005 / max(spent, 1e-9))))
    return best * 1e6


def river(n_arms: int) -> Round:
    policy = importlib.import_module("river.bandit").UCB(delta=1.0, seed=0)
    arms = list(range(n_arms))

    def round_() -> None:
        policy.update(policy.pull(arms), 0.5)

    return round_


def pymab(n_arms: int) -> Round:
    policy = importlib.import_module("pymab.policies.ucb").UCBPolicy(n_arms=n_arms)
    rng = importlib.import_module("numpy").random.default_rng(0)

    def round_() -> None:
        policy.update(action=policy.select_action(rng=rng), reward=0.5)

    return round_


def mabwiser(n_arms: int) -> Round:
    module = importlib.import_module("mabwiser.mab")
    policy = module.MAB(list(range(n_arms)), module.LearningPolicy.UCB1(alpha=1.0))
    policy.fit(list(range(n_arms)), [0.5] * n_arms)

    def round_() -> None:
        policy.partial_fit([policy.predict()], [0.5])

    return round_


def smpybandits(n_arms: int) -> Round:
    special = importlib.import_module("scipy.special")
    if not hasattr(special, "btdtri"):  # the library predates this function's removal
        vars(special)["btdtri"] = special.betaincinv
    policy = importlib.import_module("SMPyBandits.Policies.UCB").UCB(n_arms)
    policy.startGame()

    def round_() -> None:
        policy.getReward(policy.choice(), 0.5)

    return round_


def main() -> None:
    results: dict[str, dict[str, float | str]] = {}
    for make in (river, pymab, mabwiser, smpybandits):
        results[make.__name__] = {}
        for n_arms in (5, 1000):
            try:
                microseconds = best_microseconds(make(n_arms), 2 * n_arms)
                results[make.__name__][str(n_arms)] = microseconds
            except Exception as error:
                results[make.__name__][str(n_arms)] = f"{type(error).__name__}: {error}"
    sys.stdout.write("\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
