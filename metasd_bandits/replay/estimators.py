r"""Off-policy estimation: the worth of a stationary policy, from a randomised log of used arms.

With logged propensities p and the target's probabilities pi, the weight of a round is
w = pi(a) / p(a), and with m(a) a model of the outcome x (reward, or tokens):

``ips``
    :math:`\frac1n \sum w x` (Horvitz and Thompson 1952). Unbiased.
``snips``
    :math:`\sum w x / \sum w` (Swaminathan and Joachims 2015). Unchanged when x shifts.
``clipped-ips``
    :math:`\frac1n \sum \min(w, M) x` (Ionides 2008, M = sqrt(n) by default). Biased low by at most
    the weight cut off times the largest x; the interval's upper end is raised by that.
``dr``
    :math:`\frac1n \sum [\sum_a \pi(a) m(a) + w (x - m(a_t))]` (Dudik, Langford and Li 2011).
    Unbiased whatever the model; precise where the model is good. Default model: each
    arm's mean in the log.

Rounds to B tokens follow from the first two moments of a round's tokens Y by the renewal theorem:
E[tau] = (B + E[Y (Y - 1)] / (2 E[Y])) / E[Y], exact but for a term that vanishes exponentially in
B where rounds are independent. The rounds' durations T, in plain target steps, give the speed
E[Y] / E[T], in tokens per step, and the steps to B tokens, E[tau] E[T] by Wald's equation. Both
take numerator and denominator from one resample.

A learning policy is refused here: its probabilities depend on what *it* has seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from metasd_bandits import checks
from metasd_bandits.intervals import (
    FEWEST_UNITS,
    ONE_QUERY,
    Bootstrap,
    Estimate,
    ReplayError,
    UnitSums,
)
from metasd_bandits.policies.fixed import Fixed
from metasd_bandits.policies.uniform import Uniform
from metasd_bandits.policy import Policy
from metasd_bandits.registry import make_policy
from metasd_bandits.replay.full import UNTIMED, Progress, Source, check_rewards
from metasd_bandits.traces.columns import Batch, Reader, ahead, open_trace

__all__ = ["ESTIMATORS", "estimate", "target_probabilities"]

ESTIMATORS = ("ips", "snips", "clipped-ips", "dr")
Target = str | Policy | Mapping[str, float] | Sequence[float] | Callable[[Batch], ArrayLike]
Model = Callable[[Batch], ArrayLike]

# Columns of the sums: n, w, cut weight, then for each estimator's numerator (all but snips share
# w x) the outcomes reward, Y, Y^2, T.
N, WEIGHT, EXCESS, WX, CLIPPED, DR, COLUMNS = 0, 1, 2, 3, 7, 11, 15
REWARD, TOKENS, SQUARE, STEPS = range(4)
_LOGGED = ("arm", "reward", "propensity", "emitted", "step")
_ALIKE = {
    "rounds to": "rounds to B tokens takes queries as alike; where they differ, the true mean is "
    "larger",
    "steps to": "steps to B tokens takes queries as alike; where they differ, the true mean is "
    "larger, unless slow queries have short rounds",
}
_UNTIMED = f"tokens per step and steps to B tokens are not told: {UNTIMED}"


def estimate(
    source: Source,
    target: Target,
    *,
    methods: Sequence[str] = ESTIMATORS,
    tokens: int | None = None,
    clip: float | None = None,
    model: Model | None = None,
    level: float = 0.95,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Estimate]:
    """Reward, tokens and speed, and rounds and steps to B tokens, under a stationary target.

    Parameters
    ----------
    source : path, Trace or Reader
        Its rounds need ``propensity``.
    target : str, Policy, mapping, sequence or callable
        ``"uniform"``, ``"fixed:arm=1"``, an arm's name, probabilities by name or in order, or a
        function of a `Batch` that returns probabilities, shape (K,) or (K, n).
    methods : sequence of str
        Of `ESTIMATORS`.
    tokens : int, optional
        B; asks for the rounds and steps to B tokens.
    clip : float, optional
        M, above 0; default sqrt(n).
    model : callable, optional
        Function of a `Batch` that predicts each arm's reward, shape (K,) or (K, n), for ``dr``
        on reward; other outcomes use each arm's mean in the log.
    level : float
        Coverage of the intervals.
    seed : int
        Of the bootstrap, which resamples queries, or the rounds (or blocks of them) of a log of
        one query, numerator and denominator together. With 2 to 9 queries the interval is
        Student's over queries.
    progress : callable, optional
        Told the number of rounds after each batch.

    Returns
    -------
    list of Estimate
        By method, then quantity: ``reward per round``, and where the log tells ``tokens per
        round``, ``tokens per step``, ``rounds to B tokens``, ``steps to B tokens``. Where rounds
        are untimed a note at the tokens per round says so.

    Raises
    ------
    ReplayError
        If propensities are missing or impossible; if the target gives weight to an arm that the
        logger gave none (never logged, or a deterministic choice of another); or if the weights'
        mean is far from 1, as it is where propensities are not the logger's.
    """
    reader = open_trace(source)
    for method in methods:
        checks.choice("method", method, ESTIMATORS)
    if tokens is not None:
        checks.integer("tokens", tokens, 1)
    checks.number("level", level, 0.0, 1.0, open_low=True, open_high=True)
    probabilities = target_probabilities(target, reader)
    log = _survey(reader, probabilities)
    M = math.sqrt(log.rounds) if clip is None else checks.number("clip", clip, 0.0, open_low=True)
    sums, unit = _summed(reader, probabilities, log, M, model, progress)
    quantities = _quantities(reader.header.draft_length, tokens, log.timed)
    lost = float(sums[:, EXCESS].sum()) / log.rounds
    gain = lost * np.array([1.0, reader.header.draft_length + 1.0, math.nan, log.longest])
    bootstrap, total, result = Bootstrap(sums, level, seed), sums.sum(axis=0)[None], []
    for method in methods:
        for quantity in quantities:
            statistic = _statistic(method, quantity, tokens)
            low, high = bootstrap.interval(statistic)
            notes = tuple(note for start, note in _ALIKE.items() if quantity.startswith(start))
            notes += (_UNTIMED,) if quantity == "tokens per round" and not log.timed else ()
            notes += () if unit == "query" else (ONE_QUERY,)
            if method == "clipped-ips" and lost > 0.0:
                means = total[0, CLIPPED : CLIPPED + 4] / log.rounds
                low, high = _widened(low, high, quantity, gain, means, tokens)
                notes += (
                    f"clipping at {M:g} cut {lost:.2%} of the weight; the interval allows it",
                )
            result.append(
                Estimate(
                    quantity, float(statistic(total)[0]), low, high, level, method, unit,
                    len(sums), log.rounds, log.used, log.effective, log.largest, notes,
                )
            )  # fmt: skip
    return result


def _summed(
    reader: Reader,
    probabilities: Callable[[Batch], NDArray[np.float64]],
    log: _Log,
    M: float,
    model: Model | None,
    progress: Progress | None,
) -> tuple[NDArray[np.float64], str]:
    """The sums that all estimators are ratios of, by unit of resampling, and the unit's name."""
    by_query, by_round, done = UnitSums(COLUMNS), UnitSums(COLUMNS), 0
    for batch in ahead(reader.batches(_LOGGED)):
        columns = _columns(batch, probabilities(batch), log, M, model)
        by_query.add(batch.query, *columns)
        by_round.add(np.arange(done, done + len(batch)), *columns)
        done += len(batch)
        if progress:
            progress(len(batch))
    unit = "query" if len(reader.query_names) > 1 else "round"
    sums = (by_query if unit == "query" else by_round).sums
    _check_weights(by_round.sums)
    return sums, "block of rounds" if unit == "round" and len(sums) < done else unit


def _quantities(draft_length: int, tokens: int | None, timed: bool) -> list[str]:
    """What can be told; a log that was imported has a draft length of 0 and no tokens."""
    if not draft_length:
        if tokens is not None:
            raise ReplayError("this log holds no tokens (it was imported); leave tokens out")
        return ["reward per round"]
    found = ["reward per round", "tokens per round"]
    found += ["tokens per step"] if timed else []
    if tokens is not None:
        found += [f"{what} to {tokens} tokens" for what in ("rounds", "steps")[: 1 + timed]]
    return found


def target_probabilities(target: Target, reader: Reader) -> Callable[[Batch], NDArray[np.float64]]:
    """A function that gives the target's probabilities, (K, n), for a batch."""
    arms = reader.header.arms
    K = len(arms)
    if callable(target) and not isinstance(target, Policy):
        function = target
        return lambda batch: _table(function(batch), K, len(batch))
    if isinstance(target, str) and target in arms:
        p = np.eye(K)[arms.index(target)]
    elif isinstance(target, (str, Policy)):
        p = _of_policy(make_policy(target), K)
    elif isinstance(target, Mapping):
        for name in target:
            checks.choice("arm", name, arms)
        p = np.array([target.get(arm, 0.0) for arm in arms], dtype=float)
    else:
        p = np.asarray(target, dtype=float)
    table = _table(p, K, 1)
    return lambda batch: np.broadcast_to(table, (K, len(batch)))


def _of_policy(policy: Policy, K: int) -> NDArray[np.float64]:
    if not isinstance(policy, (Fixed, Uniform)):
        raise ReplayError(
            f"policy {policy.name!r} learns, so it has no probabilities of its own before it has "
            "run; estimation answers for stationary targets (fixed, uniform, given "
            "probabilities), full and rejection replay for learning ones"
        )
    policy.reset(K, 0)
    return policy.probabilities()


def _table(p: ArrayLike, K: int, n: int) -> NDArray[np.float64]:
    table = np.asarray(p, dtype=float)
    if table.ndim == 1 and len(table) == K:
        table = np.repeat(table[:, None], n, axis=1)
    if table.shape != (K, n):
        raise checks.ConfigError(
            f"target probabilities have shape {np.shape(p)}; give ({K},) or ({K}, {n})"
        )
    if not ((table >= 0.0).all() and np.allclose(table.sum(axis=0), 1.0, atol=1e-9)):
        raise checks.ConfigError("target probabilities must be at least 0 and sum to 1")
    return table


class _Log:
    """What one pass tells about a log: means by arm, and the size of the weights."""

    def __init__(self, K: int) -> None:
        self.n = np.zeros(K)
        self.totals = np.zeros((4, K))
        self.timed, self.longest = True, 0.0  # longest round, in plain target steps
        self.rounds = self.used = 0
        self.weight = self.squared = self.largest = 0.0

    @property
    def effective(self) -> float:
        return self.weight**2 / self.squared if self.squared else 0.0

    @property
    def means(self) -> NDArray[np.float64]:
        """Mean reward, tokens, squared tokens and steps of each arm, (4, K)."""
        return self.totals / np.maximum(self.n, 1.0)


def _survey(reader: Reader, probabilities: Callable[[Batch], NDArray[np.float64]]) -> _Log:
    """Read the log once and refuse it where it does not support the target."""
    K = len(reader.header.arms)
    log, wanted = _Log(K), np.zeros(K, dtype=bool)
    for batch in ahead(reader.batches(_LOGGED)):
        p, arm, pi = batch["propensity"], batch["arm"], probabilities(batch)
        chosen = pi[arm, np.arange(len(arm))]
        _check_propensities(p, chosen)
        check_rewards(batch["reward"])
        if np.isnan(batch["reward"]).any():
            raise ReplayError("the log holds a reward of nan")
        wanted |= (pi > 0.0).any(axis=1)
        w = chosen / p
        step = batch["step"]
        log.timed &= bool((np.isfinite(step) & (step > 0.0)).all())
        log.longest = max(log.longest, float(np.nanmax(step, initial=0.0)))
        log.n += np.bincount(arm, minlength=K)
        for row, x in zip(log.totals, _outcomes(batch), strict=True):
            row += np.bincount(arm, x, minlength=K)
        log.rounds += len(arm)
        log.used += int((w > 0.0).sum())
        log.weight += float(w.sum())
        log.squared += float((w**2).sum())
        log.largest = max(log.largest, float(w.max(initial=0.0)))
    if not log.rounds:
        raise ReplayError("the trace holds no rounds")
    never = [reader.header.arms[i] for i in np.flatnonzero(wanted & (log.n == 0.0))]
    if never:
        raise ReplayError(
            f"the target chooses arm {', '.join(map(repr, never))}, which the logger never used; "
            "nothing in the log tells its worth"
        )
    return log


def _check_propensities(p: NDArray[np.float64], chosen: NDArray[np.float64]) -> None:
    if np.isnan(p).any():
        raise ReplayError(
            f"{int(np.isnan(p).sum())} rounds lack a propensity; log with a policy that tells its "
            "probabilities"
        )
    if ((p <= 0.0) | (p > 1.0)).any():
        raise ReplayError(f"the log holds a propensity of {p[(p <= 0.0) | (p > 1.0)][0]}")
    hopeless = (p > 1.0 - 1e-9) & (chosen < 1.0 - 1e-9)
    if hopeless.any():
        raise ReplayError(
            f"in {int(hopeless.sum())} of {len(p)} rounds the logger was certain of its arm and "
            "the target wants others: a deterministic logger cannot tell their worth; log with a "
            "randomised policy"
        )


def _outcomes(batch: Batch) -> tuple[NDArray[np.float64], ...]:
    tokens = batch["emitted"].astype(np.float64)
    step = np.nan_to_num(batch["step"], posinf=0.0)  # unused where a round is untimed
    return batch["reward"], tokens, tokens**2, step


def _columns(
    batch: Batch, pi: NDArray[np.float64], log: _Log, M: float, model: Model | None
) -> list[NDArray[np.float64] | float]:
    arm = batch["arm"]
    each = np.arange(len(arm))
    w = pi[arm, each] / batch["propensity"]
    cut = np.minimum(w, M)
    outcomes = _outcomes(batch)
    predicted = [np.repeat(m[:, None], len(arm), axis=1) for m in log.means]
    if model is not None:
        given = np.asarray(model(batch), dtype=float)
        predicted[0] = np.broadcast_to(given[:, None] if given.ndim == 1 else given, pi.shape)
    columns: list[NDArray[np.float64] | float] = [1.0, w, w - cut]
    columns += [w * x for x in outcomes]
    columns += [cut * x for x in outcomes]
    columns += [
        (pi * m).sum(axis=0) + w * (x - m[arm, each])
        for x, m in zip(outcomes, predicted, strict=True)
    ]
    return columns


def _statistic(
    method: str, quantity: str, tokens: int | None
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    first = {"ips": WX, "snips": WX, "clipped-ips": CLIPPED, "dr": DR}[method]
    bottom = WEIGHT if method == "snips" else N

    def value(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            means = totals[:, first : first + 4].T / totals[:, bottom]
            if quantity == "reward per round":
                return means[REWARD]
            if quantity == "tokens per round":
                return means[TOKENS]
            if quantity == "tokens per step":
                return means[TOKENS] / means[STEPS]
            assert tokens is not None
            rounds = _rounds_to(tokens, means[TOKENS], means[SQUARE])
            return rounds * means[STEPS] if quantity.startswith("steps") else rounds

    return value


def _rounds_to(
    B: int, mean: NDArray[np.float64], square: NDArray[np.float64]
) -> NDArray[np.float64]:
    return (B + (square - mean) / (2.0 * mean)) / mean


def _widened(
    low: float,
    high: float,
    quantity: str,
    gain: NDArray[np.float64],
    means: NDArray[np.float64],
    tokens: int | None,
) -> tuple[float, float]:
    """Room for what clipping may have lost: each outcome's mean may be larger by its `gain`."""
    if quantity == "reward per round":
        return low, high + gain[REWARD]
    if quantity == "tokens per round":
        return low, high + gain[TOKENS]
    if quantity.startswith("rounds"):
        assert tokens is not None
        return 1.0 / (1.0 / low + gain[TOKENS] / tokens), high
    more_tokens, longer = (1.0 + gain[i] / means[i] for i in (TOKENS, STEPS))
    if quantity == "tokens per step":
        return low / longer, high * more_tokens
    return low / more_tokens, high * longer


def _check_weights(sums: NDArray[np.float64]) -> None:
    """The mean weight is 1 when propensities are the logger's own, whatever the queries are."""
    U = len(sums)
    if U < FEWEST_UNITS:
        return
    mean = sums[:, WEIGHT].sum() / sums[:, N].sum()
    error = np.std(sums[:, WEIGHT] - sums[:, N], ddof=1) * math.sqrt(U) / sums[:, N].sum()
    if abs(mean - 1.0) > 6.0 * error + 1e-9:
        raise ReplayError(
            f"the weights average {mean:.3f}, {abs(mean - 1.0) / max(error, 1e-300):.0f} standard "
            "errors from 1: the propensities in the log are not the logger's, or the target "
            "relies on arms that it hardly ever used"
        )
