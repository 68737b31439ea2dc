"""The environments obey the laws that their files state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from metasd_bandits.checks import ConfigError
from metasd_bandits.round import Round
from metasd_bandits.theory.acceptance import (
    accepted_pmf,
    mean_accepted,
    tokens_per_round,
    var_accepted,
)
from metasd_bandits.traces.jsonl import Trace, TraceHeader
from sim import IID, Clustered, Environment, Language, Recorded, sample_rounds, simulate
from sim.acceptance.clustered import beta_cells
from sim.acceptance.language import at_distance
from sim.lengths import Empirical, EndOfText
from sim.report import mean_interval

R = 200_000
Z = 4.5  # standard errors; the seeds are fixed, so a test passes always or never


def close(values: np.ndarray, expected: float) -> bool:
    """The mean of independent values agrees with the expected one."""
    error = values.std() / np.sqrt(values.size)
    return abs(values.mean() - expected) <= Z * error + 1e-12


@pytest.mark.parametrize("alpha", [0.0, 0.15, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("N", [1, 5])
def test_iid_is_the_truncated_geometric_law(alpha: float, N: int) -> None:
    drawn = sample_rounds(IID([alpha], N), 0, rounds=R, seed=1)
    counts = np.bincount(drawn.accepted, minlength=N + 1)
    law = accepted_pmf(alpha, N)
    assert counts.size == N + 1
    assert (counts[law == 0.0] == 0).all()
    if (law > 0).sum() > 1:
        assert stats.chisquare(counts[law > 0], R * law[law > 0]).pvalue > 1e-4
    assert close(drawn.be, mean_accepted(alpha, N) / N)
    assert drawn.accepted.var() == pytest.approx(var_accepted(alpha, N), rel=0.02, abs=1e-12)
    assert (drawn.bd == alpha).all()
    assert IID([alpha], N).tokens_per_round()[0, 0] == pytest.approx(tokens_per_round(alpha, N))


def test_iid_drifts_linearly() -> None:
    model = IID([[0.2], [0.8]], 4)
    drawn = sample_rounds(model, 0, rounds=R, domain=0, to=1, weight=0.25)
    assert close(drawn.be, mean_accepted(0.35, 4) / 4)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("cluster", [0.0, 0.6, 1.0])
def test_clustered_keeps_its_means_whatever_the_correlation(spread: float, cluster: float) -> None:
    N, alpha = 5, 0.6
    model = Clustered([alpha], N, spread=spread, cluster=cluster)
    drawn = sample_rounds(model, 0, rounds=R, seed=2)
    assert close(drawn.bd, alpha)
    assert close((drawn.accepted == 0).astype(float), 1.0 - alpha)
    beyond = model.run_law()[0, 0]
    for k in range(1, N + 1):
        assert close((drawn.accepted >= k).astype(float), beyond[k])
    if cluster == 0.0:  # independent positions: the paper's law and Var[r_BD] = sigma^2 / N
        assert beyond == pytest.approx(alpha ** np.arange(N + 1), abs=1e-9)
        sigma2 = beta_cells(alpha, spread).var()
        assert drawn.bd.var() == pytest.approx(sigma2 / N, rel=0.02, abs=1e-12)
    elif spread > 0.0:  # correlation makes runs longer and rewards more variable
        assert model.tokens_per_round()[0, 0] > tokens_per_round(alpha, N) + 0.05


@pytest.mark.parametrize("spread", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.5, 0.97, 1.0])
def test_beta_cells_have_the_beta_laws_moments(alpha: float, spread: float) -> None:
    cells = beta_cells(alpha, spread)
    assert cells.mean() == pytest.approx(alpha, abs=1e-9)
    assert cells.var() == pytest.approx(spread * alpha * (1 - alpha), rel=0.01, abs=1e-12)


def test_persistence_correlates_neighbouring_rounds() -> None:
    for rho in (0.0, 0.8):
        model = Clustered([0.5], 5, spread=1.0, cluster=1.0, persistence=rho)
        bd = sample_rounds(model, 0, rounds=R, seed=3, in_a_row=R).bd
        # a coin of latent normals with correlation rho: the arcsine law (Sheppard 1899)
        expected = 2.0 / np.pi * np.arcsin(rho)
        assert np.corrcoef(bd[:-1], bd[1:])[0, 1] == pytest.approx(expected, abs=0.015)


def test_drafters_share_as_much_ease_as_asked() -> None:
    def together(shared: float) -> float:
        model = Clustered([0.5, 0.5], 5, spread=1.0, cluster=1.0, shared=shared)
        bd = [sample_rounds(model, arm, rounds=R, seed=4).bd for arm in (0, 1)]
        return float(np.corrcoef(bd)[0, 1])

    assert together(1.0) == pytest.approx(1.0)
    assert together(0.5) == pytest.approx(2.0 / np.pi * np.arcsin(0.5), abs=0.015)
    assert together(0.0) == pytest.approx(0.0, abs=0.015)


@pytest.mark.parametrize("distance", [0.0, 0.3, 0.75, 1.0])
def test_explicit_distributions_accept_one_minus_their_distance(distance: float) -> None:
    model = Language([distance], 4, vocabulary=6, seed=5)
    assert model.parameters().overlap == pytest.approx(np.full((1, 1, 6), 1 - distance), abs=1e-9)
    drawn = sample_rounds(model, 0, rounds=R, seed=5)
    assert close((drawn.accepted == 0).astype(float), distance)
    counts, law = np.bincount(drawn.accepted, minlength=5), accepted_pmf(1 - distance, 4)
    assert (counts[law < 1e-9] == 0).all()
    if 0.0 < distance < 1.0:
        assert stats.chisquare(counts, R * law).pvalue > 1e-4
    assert drawn.bd == pytest.approx(np.full(R, 1 - distance), abs=1e-9)


@pytest.mark.parametrize("policy", ["fixed:arm=0", "fixed:arm=1", "uniform"])
def test_decoding_in_the_simulator_is_lossless(policy: str) -> None:
    """Transitions of the emitted text have the target's law, whichever drafters wrote it."""
    model = Language([0.2, 0.9], 3, vocabulary=5, unevenness=1.0, seed=6)
    runs = simulate(Environment(model, 20_000), policy, replications=10, seed=6)
    counts = runs.memories[:, 1:].reshape(-1, 5, 5).sum(0)
    p = model.parameters().p
    assert counts.sum() == pytest.approx(200_000, abs=40)
    assert (counts[:, -1] == 0).all()
    for context in range(4):
        row = counts[context, :4]
        assert stats.chisquare(row, row.sum() * p[context, :4]).pvalue > 1e-4


@given(st.integers(2, 12), st.floats(0.0, 1.0), st.integers(0, 2**32 - 1))
def test_at_distance_reaches_every_distance(V: int, distance: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = np.append(rng.dirichlet(np.ones(V - 1)), 0.0), rng.dirichlet(np.ones(V))
    made = at_distance(p, q, distance)
    assert made.min() >= -1e-12
    assert made.sum() == pytest.approx(1.0)
    assert 0.5 * np.abs(p - made).sum() == pytest.approx(distance, abs=1e-9)


def test_recorded_rounds_come_back_with_their_frequencies() -> None:
    def made(arm: int, accepted: int) -> Round:
        return Round("q", 0, arm, 4, accepted, accepted + 1, accepted / 4, 0.3 + 0.1 * arm, 0.5)

    header = TraceHeader(("a", "b"), 4, "uniform", "be")
    trace = Trace(header, [made(0, 0), made(0, 4), made(0, 4), made(1, 1)])
    drawn = sample_rounds(Recorded(trace), 0, rounds=R)
    assert close((drawn.accepted == 4).astype(float), 2 / 3)
    assert set(drawn.bd) == {0.3}
    assert Recorded(trace).tokens_per_round() == pytest.approx(np.array([[11 / 3, 2.0]]))
    with pytest.raises(ConfigError, match="arm 'b' has no round"):
        Recorded(Trace(header, trace.rounds[:3]))


def test_wald_identity_at_the_stopping_time() -> None:
    """E[tokens emitted at the stop] = E[rounds] g, with the last block counted whole."""
    model = IID([0.7], 5)
    runs = simulate(Environment(model, 500), "fixed", replications=20_000, seed=7)
    whole = np.rint(runs.be * 5) + runs.rounds
    assert close(whole - runs.rounds * tokens_per_round(0.7, 5), 0.0)
    assert (whole >= 500).all()
    assert (whole <= 505).all()


@pytest.mark.parametrize(("cluster", "persistence"), [(0.6, 0.0), (1.0, 0.0), (1.0, 0.995)])
def test_what_pseudo_regret_leaves_out_is_bounded_only_without_persistence(
    cluster: float, persistence: float
) -> None:
    """Two drafters of one mean: pseudo-regret is 0, so R is all of the regret (theorem 1)."""
    model = Clustered(
        [0.5, 0.5], 5, spread=0.8, cluster=cluster, persistence=persistence, shared=0.0
    )
    bound = 5 / model.tokens_per_round().max()
    found = {}
    for tokens in (2_000, 20_000):
        window, fixed = (
            simulate(Environment(model, tokens), p, reward="bd", replications=60).rounds
            for p in ("sw-ucb:window=20", "fixed:arm=0")
        )
        found[tokens] = mean_interval(window - fixed, level=0.999)
    if persistence == 0.0:
        assert all(i.low < bound and i.high > -bound for i in found.values())
    else:
        assert found[20_000].high < -100 * bound
        assert found[20_000].high < found[2_000].low  # it grows with B


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_limits_of_alpha(alpha: float) -> None:
    runs = simulate(Environment(IID([alpha], 4), 100), "ucb", replications=3)
    assert (runs.rounds == (100 if alpha == 0.0 else 20)).all()


def test_random_lengths() -> None:
    u = (np.arange(R) + 0.5) / R
    B = EndOfText(mean=50.0, longest=10_000).quantile(u)
    assert B.min() == 1
    assert B.mean() == pytest.approx(50.0, rel=1e-3)
    assert np.mean(B == 1) == pytest.approx(1 / 50, rel=1e-3)
    assert EndOfText(mean=50.0, longest=30).quantile(u).max() == 30
    assert (EndOfText(mean=1.0).quantile(u) == 1).all()
    assert np.bincount(Empirical([3, 8]).quantile(u))[[3, 8]].tolist() == [R // 2, R // 2]
    runs = simulate(Environment(IID([0.5], 2), EndOfText(20.0)), "fixed", replications=4000)
    assert close(runs.tokens, 20.0)


def test_the_longest_of_all_runs_has_its_closed_form() -> None:
    """P(max >= k) = 1 - prod(1 - a_i^k) where rates are constant; one drafter alone is itself."""
    alphas, N = [0.3, 0.6, 0.5], 4
    reached = 1.0 - np.prod([[1.0 - a**k for k in range(N + 1)] for a in alphas], axis=0)
    constant = Clustered(alphas, N, spread=0.0, cluster=0.4)
    assert constant.tokens_of_all() == pytest.approx([reached.sum()])
    for cluster in (0.0, 0.5, 1.0):
        alone = Clustered([0.6], N, spread=0.5, cluster=cluster)
        assert alone.tokens_of_all() == pytest.approx(alone.tokens_per_round()[0])


def test_quadrature_of_the_run_law_is_exact_for_a_coin() -> None:
    """spread = cluster = 1: the whole block is accepted or rejected together."""
    model = Clustered([0.5], 3, spread=1.0, cluster=1.0)
    assert model.run_law()[0, 0] == pytest.approx([1.0, 0.5, 0.5, 0.5], abs=1e-9)
    half = Clustered([0.5], 2, spread=1.0, cluster=0.5)
    # P(both) of two coins with latent correlation 1/2: 1/4 + arcsin(1/2) / (2 pi)
    both = 0.25 + np.arcsin(0.5) / (2 * np.pi)
    assert half.run_law()[0, 0, 2] == pytest.approx(both, abs=1e-6)
