"""Every claim of the theory as a line: statement, where tested, estimate, verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from metasd_bandits.replay.regret import expected_rounds, pseudo_regret, stopping_regret
from metasd_bandits.round import Round
from metasd_bandits.theory import acceptance, bounds
from metasd_bandits.traces.jsonl import Trace, TraceHeader
from sim.acceptance import IID, AcceptanceModel, Clustered, Language, Recorded
from sim.arms import Bernoulli, against_ucb
from sim.environment import Environment
from sim.jobs import BanditTask, Jobs, Task
from sim.lengths import EndOfText
from sim.report import Report, mean_interval
from sim.schedules import Piecewise
from sim.simulate import Runs, sample_rounds

__all__ = ["CLAIMS", "Claim", "verify"]

ALPHAS, N = (0.3, 0.4, 0.5, 0.6, 0.7), 5
Z = 4.5  # standard errors that a formula may be off; seeds are fixed


@dataclass(frozen=True)
class Claim:
    """A statement and what simulation says of it.

    Attributes
    ----------
    statement, where, estimate : str
    verdict : str
        ``holds``, ``fails``, or ``holds only if`` and the condition.
    """

    statement: str
    where: str
    estimate: str
    verdict: str


@dataclass(frozen=True)
class Setting:
    """How much to simulate, and where."""

    replications: int
    seed: int
    jobs: Jobs

    def decode(
        self, environment: Environment, policies: Sequence[str], reward: str, **options: object
    ) -> list[Runs]:
        """One `Runs` for each policy, all on the same random numbers."""
        given = {"reward": reward, "seed": self.seed, **options}
        return self.jobs.run([Task(environment, p, self.replications, given) for p in policies])


def verify(
    *, replications: int = 200, seed: int = 0, jobs: Jobs | None = None, only: str | None = None
) -> Report:
    """Test every claim; the report fails where one does.

    Parameters
    ----------
    replications, seed : int
    jobs : Jobs, optional
    only : str, optional
        One key of `CLAIMS`.
    """
    setting = Setting(replications, seed, jobs or Jobs())
    chosen = CLAIMS if only is None else {only: CLAIMS[only]}
    claims = [claim for test in chosen.values() for claim in test(setting)]
    rows = [vars(claim) for claim in claims]
    failed = [c.statement for c in claims if c.verdict.startswith("fails")]
    notes = [f"{len(claims) - len(failed)} of {len(claims)} claims hold, some under conditions"]
    return Report("Claims of the theory, simulated", rows, notes, passed=not failed)


def _verdict(holds: bool, otherwise: str = "fails") -> str:
    return "holds" if holds else otherwise


def _worst_z(pairs: Sequence[tuple[NDArray[np.float64], float]]) -> float:
    """Largest distance of a sample mean from its formula, in standard errors."""
    worst = 0.0
    for values, expected in pairs:
        error = values.std() / math.sqrt(values.size)
        distance = abs(float(values.mean()) - expected)
        worst = max(worst, distance / error if error > 0.0 else (0.0 if distance < 1e-9 else 99.0))
    return worst


def rewards(setting: Setting) -> list[Claim]:
    """Means and variances of BE and BD."""
    rounds = 500 * setting.replications
    grid = [(a, n) for a in (0.1, 0.3, 0.5, 0.7, 0.9) for n in (1, 3, 5, 10)]
    means, variances = [], []
    for a, n in grid:
        k = sample_rounds(IID([a], n), 0, rounds=rounds, seed=setting.seed).accepted
        means.append((k.astype(float), float(acceptance.mean_accepted(a, n))))
        centred = (k - acceptance.mean_accepted(a, n)) ** 2
        variances.append((centred, float(acceptance.var_accepted(a, n))))
    bd_means, bd_variances = [], []
    for a, n in grid:
        model = Clustered([a], n, spread=0.5, cluster=0.0)
        bd = sample_rounds(model, 0, rounds=rounds, seed=setting.seed).bd
        bd_means.append((bd, a))
        bd_variances.append(((bd - a) ** 2, float(model.cells().var(-1)[0, 0]) / n))
    where = f"{len(grid)} pairs (alpha, N), {rounds} rounds each"
    out = []
    for statement, pairs in (
        ("E[N_acc] = (alpha - alpha^(N+1)) / (1 - alpha)", means),
        ("Var[N_acc], the closed form of section 2", variances),
        ("E[r_BD] = alpha where positions are independent", bd_means),
        ("Var[r_BD] = sigma^2 / N where positions are independent", bd_variances),
    ):
        z = _worst_z(pairs)
        out.append(Claim(statement, where, f"largest |z| {z:.2f}", _verdict(z < Z)))
    return out


def feedback_signal(setting: Setting) -> list[Claim]:
    """Theorem 1: BD's feedback signal Delta^2 / max Var beats BE's."""
    out = []
    for spread, cluster in ((0.5, 0.0), (1.0, 0.0), (0.6, 0.1), (0.9, 0.9), (1.0, 1.0)):
        grid = np.arange(0.05, 0.96, 0.05)
        m = Clustered(grid, N, spread=spread, cluster=cluster).moments()
        i, j = np.triu_indices(grid.size, 1)
        signal = {}
        for reward in ("be", "bd"):
            mean, var = m[f"{reward}_mean"][0], m[f"{reward}_var"][0]
            signal[reward] = (mean[j] - mean[i]) ** 2 / np.maximum(var[i], var[j])
        ratio = signal["bd"] / signal["be"]
        share = float((ratio >= 1.0 - 1e-9).mean())
        lost = "" if share > 0.999 else f"; BE wins for alphas up to {grid[j][ratio < 1].max():.2f}"
        lost += "" if share > 0.999 else f" from {grid[i][ratio < 1].min():.2f}"
        estimate = f"BD wins {100 * share:.0f} % of pairs, median ratio {np.median(ratio):.2f}"
        positions = "independent" if cluster == 0.0 else f"cluster {cluster:g}"
        verdict = "holds" if share >= 0.95 else "holds only if positions are not all one"
        if 0.5 < share < 0.95:
            verdict = "holds only if alphas are outside the region named"
        out.append(
            Claim(
                "BD's feedback signal is at least BE's (theorem 1)",
                f"{i.size} pairs of alphas, rates of spread {spread:g}, positions {positions}",
                estimate + lost,
                verdict,
            )
        )
    return out


def decomposition(setting: Setting) -> list[Claim]:
    """Reg = sum of (Delta^g_i / g*) E[n_i], up to one round."""
    B = 2000
    oracle = expected_rounds(acceptance.accepted_pmf(max(ALPHAS), N), B)
    g = acceptance.tokens_per_round(ALPHAS, N)
    estimates, worst = [], 0.0
    policies = ("ucb:beta=1", "kl-ucb", "uniform")
    for policy, runs in zip(
        policies,
        setting.decode(Environment(IID(ALPHAS, N), B), policies, "be"),
        strict=True,
    ):
        direct = stopping_regret(runs.rounds, oracle)
        by_pulls = pseudo_regret(runs.pulls[:, 0], g.tolist())
        gap = mean_interval(runs.rounds - oracle - runs.pulls[:, 0] @ (1.0 - g / g.max()))
        worst = max(worst, abs(gap.value) - (gap.high - gap.value))
        estimates.append(f"{policy} {direct.value:.1f} = {by_pulls.value:.1f} {gap.value:+.2f}")
    return [
        Claim(
            "Reg = sum_i (Delta^g_i / g*) E[n_i], within one round",
            f"B = {B}, exact E[tau] of the best drafter",
            ", ".join(estimates),
            _verdict(worst < 1.0),
        )
    ]


def growth(setting: Setting) -> list[Claim]:
    """Logarithmic growth, and the bounds on either side."""
    grid = np.array([10**3, 10**4, 10**5, 10**6])
    runs_of: dict[str, Runs] = {}
    few = Setting(max(10, setting.replications // 10), setting.seed, setting.jobs)
    model = IID(ALPHAS, N)
    policies = ("ucb:beta=1", "kl-ucb")
    for policy, runs in zip(
        policies, few.decode(Environment(model, 10**6), policies, "be", marks=grid), strict=True
    ):
        runs_of[policy] = runs
    lost = 1.0 - model.tokens_per_round()[0] / model.tokens_per_round().max()
    regret = {p: r.curve_pulls @ lost for p, r in runs_of.items()}
    uppers = [bounds.metasd_ucb_upper(ALPHAS, N, int(B), reward="be") for B in grid]
    increments = np.diff(regret["ucb:beta=1"], axis=1)
    ratio = mean_interval(increments[:, 2] / increments[:, 1].mean())
    means = regret["ucb:beta=1"].mean(0)
    out = [
        Claim(
            "MetaSD-UCB's regret grows like ln B",
            "BE, B = 10^3 .. 10^6",
            f"growth 10^5 -> 10^6 over 10^4 -> 10^5: {ratio} (ln B 1, square root 3.2)",
            _verdict(ratio.high < 1.6),
        ),
        Claim(
            "regret of MetaSD-UCB (beta = 1) is below its upper bound",
            "BE, B = 10^3 .. 10^6",
            "bound / regret: "
            + ", ".join(f"{u / m:.1f}" for u, m in zip(uppers, means, strict=True)),
            _verdict(bool((means < np.array(uppers)).all())),
        ),
    ]
    bd = setting.decode(Environment(model, 10**5), ("ucb:beta=1",), "bd")[0]
    bd_regret = mean_interval(bd.pulls[:, 0] @ lost)
    bound = bounds.metasd_ucb_upper(ALPHAS, N, 10**5, reward="bd")
    out.append(
        Claim(
            "learning from BD, too; and BD's bound is tighter than BE's",
            "noiseless BD, B = 10^5",
            f"regret {bd_regret}, bound {bound:.0f} (BE's {uppers[2]:.0f})",
            _verdict(bd_regret.high < bound < uppers[2]),
        )
    )
    return [*out, *_lower(few, grid)]


def _lower(setting: Setting, grid: NDArray[np.int64]) -> list[Claim]:
    """KL-UCB's slope against the lower bound: for N = 1 BE is Bernoulli, and it is optimal."""
    out = []
    for n, otherwise in (
        (1, "fails"),
        (N, "holds only if N = 1: BE is no Bernoulli reward"),
    ):
        model = IID(ALPHAS, n)
        runs = setting.decode(Environment(model, 10**6), ("kl-ucb",), "be", marks=grid)[0]
        lost = 1.0 - model.tokens_per_round()[0] / model.tokens_per_round().max()
        per_log = (runs.curve_pulls[:, 3] - runs.curve_pulls[:, 1]) @ lost / math.log(100.0)
        slope, least = mean_interval(per_log), bounds.lower_bound(ALPHAS, n)
        near = slope.high / least
        out.append(
            Claim(
                "KL-UCB comes within a factor of 2 of the lower bound, per ln B",
                f"BE, N = {n}, growth from 10^4 to 10^6 tokens",
                f"per ln B: {slope}, bound {least:.2f}, ratio {slope.value / least:.2f}",
                _verdict(slope.high > least and near < 2.0, otherwise),
            )
        )
    return out


def adversarial(setting: Setting) -> list[Claim]:
    """EXP3 keeps its bound against any sequence; UCB does not."""
    T, K = 20_000, 3
    table = against_ucb(K, T)
    gamma = min(1.0, math.sqrt(K * math.log(K) / ((math.e - 1.0) * T)))
    best = float(table.rewards.sum(0).max())
    options = {"horizon": T, "seed": setting.seed}
    exp3, ucb = setting.jobs.run(
        [
            BanditTask(table, p, setting.replications, options)
            for p in (f"exp3:gamma={gamma}", "ucb:beta=1")
        ]
    )
    lost, bound = mean_interval(best - exp3.reward), bounds.exp3_upper(K, T)
    ucb_lost = mean_interval(best - ucb.reward)
    where = f"an oblivious adversary who computed UCB's choices, K = {K}, T = {T}"
    return [
        Claim(
            "EXP3's regret is below 2.63 sqrt(T K ln K) against any sequence",
            where,
            f"{lost}, bound {bound:.0f}",
            _verdict(lost.high < bound),
        ),
        Claim(
            "UCB fails there: regret linear in T",
            where,
            f"{ucb_lost}, {ucb_lost.value / T:.2f} T",
            _verdict(ucb_lost.low > 0.5 * T),
        ),
    ]


def non_stationary(setting: Setting) -> list[Claim]:
    """Garivier and Moulines (2011): an arm that is best for a while."""
    T, means = 10_000, [[0.5, 0.3, 0.4], [0.5, 0.3, 0.9]]
    schedule = Piecewise([0, 3000, 5000], [0, 1, 0])
    policies = {
        "ucb": "ucb:beta=1",
        "sliding window": f"sw-ucb:window={int(4 * math.sqrt(T * math.log(T) / 2))}",
        "discounted": f"d-ucb:gamma={1 - 0.25 * math.sqrt(2 / T)}",
        "restarts": "cd-ucb",
    }
    options = {"horizon": T, "seed": setting.seed, "schedule": schedule}
    tasks = [
        BanditTask(Bernoulli(means), p, setting.replications, options) for p in policies.values()
    ]
    gaps = np.array(means).max(1, keepdims=True) - np.array(means)
    lost = {
        name: mean_interval((runs.pulls * gaps).sum((1, 2)))
        for name, runs in zip(policies, setting.jobs.run(tasks), strict=True)
    }
    estimate = ", ".join(f"{name} {value}" for name, value in lost.items())
    best_windowed = min(lost["sliding window"].high, lost["discounted"].high)
    return [
        Claim(
            "forgetting (window, discount, restarts) beats UCB when the best arm changes",
            f"Bernoulli .5/.3/.4, the third .9 from 3000 to 5000, T = {T}",
            "regret: " + estimate,
            _verdict(
                min(best_windowed, lost["restarts"].high) < lost["ucb"].low,
                "holds only if changes are larger or more frequent",
            ),
        )
    ]


def objections(setting: Setting) -> list[Claim]:
    """The reviewers' objections, each with numbers."""
    return [*_prefixes(setting), _random_length(setting), _wrong_arm(setting)]


def _prefixes(setting: Setting) -> list[Claim]:
    out = []
    for unevenness in (0.0, 1.0):
        model = Language([0.5], N, vocabulary=8, unevenness=unevenness, seed=4)
        drawn = sample_rounds(
            model, 0, rounds=500 * setting.replications, seed=setting.seed, in_a_row=1000
        )
        bd, first = mean_interval(drawn.bd), mean_interval((drawn.accepted > 0).astype(float))
        gap = abs(bd.value - first.value)
        noise = (bd.high - bd.low) / 2 + (first.high - first.low) / 2
        verdict = _verdict(gap < noise, "holds only if d_TV is the same in every context")
        out.append(
            Claim(
                "E[r_BD] equals the acceptance rate, though a block's prefixes are the drafter's",
                f"explicit distributions, d_TV .5 on average, unevenness {unevenness:g}",
                f"E[r_BD] {bd}, P(first accepted) {first}",
                verdict,
            )
        )
    return out


def _random_length(setting: Setting) -> Claim:
    g = np.asarray(acceptance.tokens_per_round(ALPHAS, N))
    B, lost = 2000.0, 1.0 - g / g.max()
    fixed, random = (
        setting.decode(Environment(IID(ALPHAS, N), length), ("ucb:beta=1",), "be")[0]
        for length in (int(B), EndOfText(B))
    )
    fixed_regret, random_regret = (mean_interval(r.pulls[:, 0] @ lost) for r in (fixed, random))
    bound = bounds.metasd_ucb_upper(ALPHAS, N, B, reward="be")
    return Claim(
        "the bound survives a random B (end of text), with E[B] in its place",
        f"B geometric of mean {B:.0f}, against B = {B:.0f}",
        f"regret {random_regret}, fixed {fixed_regret}, bound {bound:.0f}",
        _verdict(random_regret.high < bound),
    )


def _wrong_arm(setting: Setting) -> Claim:
    """A drafter with the higher alpha but the shorter runs: BD prefers it, and loses rounds."""
    even, lumpy = IID([0.55], N), Clustered([0.5], N, spread=1.0, cluster=1.0)
    rounds = []
    for arm, model in enumerate((even, lumpy)):
        drawn = sample_rounds(model, 0, rounds=5000, seed=setting.seed)
        for k, bd in zip(drawn.accepted.tolist(), drawn.bd.tolist(), strict=True):
            rounds.append(Round("q", 0, arm, N, k, k + 1, k / N, bd, bd))
    header = TraceHeader(("even", "lumpy"), N, "uniform", "bd")
    world: AcceptanceModel = Recorded(Trace(header, rounds))
    by_bd, by_be = (
        mean_interval(setting.decode(Environment(world, 2000), ("ucb:beta=1",), reward)[0].rounds)
        for reward in ("bd", "be")
    )
    return Claim(
        "fewer mistakes under BD mean fewer rounds",
        "alpha .55 independent against alpha .5 all-or-nothing, B = 2000",
        f"rounds learning from BD {by_bd}, from BE {by_be}",
        _verdict(
            by_bd.high < by_be.low, "holds only if E[BD] orders drafters as tokens per round do"
        ),
    )


CLAIMS: dict[str, Callable[[Setting], list[Claim]]] = {
    "rewards": rewards,
    "feedback-signal": feedback_signal,
    "decomposition": decomposition,
    "growth": growth,
    "adversarial": adversarial,
    "non-stationary": non_stationary,
    "objections": objections,
}
