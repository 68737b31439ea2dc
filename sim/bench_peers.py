"""Other libraries' bandits on the benchmark's job; run by `sim.bench` in an environment of its own.

Imports nothing of ours: ``python bench_peers.py HORIZON REPLICATIONS`` prints one JSON object,
library -> policy -> million pulls per CPU-second (null where a library lacks the policy).
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

MEANS = (0.3, 0.4, 0.5, 0.6, 0.7)


def river_runs(horizon: int, replications: int) -> dict[str, Any]:
    from river import bandit, proba

    makers = {
        "ucb": lambda seed: bandit.UCB(delta=1.0, seed=seed),
        "exp3": lambda seed: bandit.Exp3(gamma=0.1, seed=seed),
        "thompson": lambda seed: bandit.ThompsonSampling(reward_obj=proba.Beta(), seed=seed),
    }

    def play(make: Callable[[int], Any]) -> None:
        for seed in range(replications):
            policy, rng = make(seed), random.Random(seed)
            for _ in range(horizon):
                arm = policy.pull(range(len(MEANS)))
                policy.update(arm, rng.random() < MEANS[arm])

    return {name: lambda m=make: play(m) for name, make in makers.items()}


def pymab_runs(horizon: int, replications: int) -> dict[str, Any]:
    import numpy as np
    import pymab
    from pymab.policies import adversarial, thompson_sampling, ucb

    makers = {
        "ucb": ucb.UCBPolicy,
        "exp3": adversarial.EXP3Policy,
        "thompson": thompson_sampling.BernoulliThompsonSamplingPolicy,
    }

    def play(make: Callable[..., Any]) -> None:
        pymab.Experiment(
            environment=pymab.BanditEnvironment(
                means=np.array(MEANS), reward_model=pymab.BernoulliReward()
            ),
            policies={"policy": make(n_arms=len(MEANS))},
            config=pymab.ExperimentConfig(horizon=horizon, n_replicates=replications, seed=0),
        ).run()

    return {name: lambda m=make: play(m) for name, make in makers.items()}


def mabwiser_runs(horizon: int, replications: int) -> dict[str, Any]:
    from mabwiser.mab import MAB, LearningPolicy

    makers = {
        "ucb": lambda: LearningPolicy.UCB1(alpha=1.0),
        "thompson": lambda: LearningPolicy.ThompsonSampling(),
    }

    def play(make: Callable[[], Any]) -> None:
        for seed in range(replications):
            rng = random.Random(seed)
            policy = MAB(list(range(len(MEANS))), make(), seed=seed)
            policy.fit(list(range(len(MEANS))), [int(rng.random() < m) for m in MEANS])
            for _ in range(horizon):
                arm = policy.predict()
                policy.partial_fit([arm], [int(rng.random() < MEANS[arm])])

    return {name: lambda m=make: play(m) for name, make in makers.items()}


def smpybandits_runs(horizon: int, replications: int) -> dict[str, Any]:
    import scipy.special

    # the library was written for an older SciPy, which called this function so
    if not hasattr(scipy.special, "btdtri"):
        scipy.special.btdtri = scipy.special.betaincinv  # type: ignore[attr-defined]
    from SMPyBandits.Policies import UCB, Exp3, Thompson

    makers = {
        "ucb": lambda: UCB(len(MEANS)),
        "exp3": lambda: Exp3(len(MEANS), gamma=0.1),
        "thompson": lambda: Thompson(len(MEANS)),
    }

    def play(make: Callable[[], Any]) -> None:
        for seed in range(replications):
            rng, policy = random.Random(seed), make()
            policy.startGame()
            for _ in range(horizon):
                arm = policy.choice()
                policy.getReward(arm, float(rng.random() < MEANS[arm]))

    return {name: lambda m=make: play(m) for name, make in makers.items()}


def main() -> None:
    horizon, replications = int(sys.argv[1]), int(sys.argv[2])
    libraries = {
        "river": river_runs,
        "pymab": pymab_runs,
        "mabwiser": mabwiser_runs,
        "SMPyBandits": smpybandits_runs,
    }
    rates: dict[str, dict[str, float | str]] = {}
    for library, prepare in libraries.items():
        rates[library] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                runs = prepare(horizon, replications)
            except Exception as error:  # a peer that is missing or broken is a line in the table
                rates[library] = {"error": f"{type(error).__name__}: {error}"}
                continue
            for policy, run in runs.items():
                began = time.process_time()
                run()
                seconds = time.process_time() - began
                rates[library][policy] = horizon * replications / seconds / 1e6
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
