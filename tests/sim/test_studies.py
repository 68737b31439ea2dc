"""The studies: same numbers anywhere, fits that recover what was put in, published values."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from metasd_bandits.checks import ConfigError
from metasd_bandits.round import Round
from metasd_bandits.traces.jsonl import Trace, TraceHeader, TraceWriter
from sim import IID, Clustered, Costs, Environment, calibration, paper, sample_rounds
from sim.calibration import calibrate, load_environment, run_law, save_environment
from sim.cli import app
from sim.jobs import Jobs, Task
from sim.paper import (
    TABLES,
    environment_of,
    environments_of,
    load_fitted,
    load_table,
    round_cost,
)
from sim.report import Interval, Report, mean_interval
from sim.simulate import simulate
from sim.studies import fit as fit_study
from sim.studies.fit import GRIDS, correlation_errors, fit_correlation
from sim.studies.regret import growth_exponent
from sim.studies.reproduce import Prediction, predict_table, reproduce, score, speedup


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def tasks() -> list[Task]:
    environment = Environment(IID([0.3, 0.7], 4), 200, costs=Costs(switch=0.1))
    return [Task(environment, p, 10, {"seed": 3}) for p in ("ucb", "exp3")]


def steps(jobs: Jobs) -> list[list[float]]:
    return [runs.steps.tolist() for runs in jobs.run(tasks())]


def test_any_number_of_jobs_gives_the_same_numbers() -> None:
    alone = [simulate(t.environment, t.policy, replications=10, seed=3) for t in tasks()]
    expected = [runs.steps.tolist() for runs in alone]
    assert steps(Jobs()) == expected
    assert steps(Jobs(2, "threading")) == expected


@pytest.mark.slow
def test_two_processes_and_a_dask_cluster_of_two_workers_give_the_same_numbers() -> None:
    from distributed import LocalCluster

    expected = steps(Jobs())
    assert steps(Jobs(2)) == expected
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        assert steps(Jobs(backend="dask", scheduler=cluster.scheduler_address)) == expected


def recorded(alphas: list[float], spread: float, persistence: float, queries: int) -> Trace:
    """A uniform log of the fitted family itself, in queries of 60 rounds."""
    rng = np.random.default_rng(0)
    arms = [Clustered([a], 5, spread=spread, cluster=1.0, persistence=persistence) for a in alphas]
    drawn = [sample_rounds(m, 0, rounds=60 * queries, seed=8, in_a_row=60) for m in arms]
    rounds = []
    for m in range(60 * queries):
        arm = int(rng.integers(len(alphas)))
        k, bd = int(drawn[arm].accepted[m]), float(drawn[arm].bd[m])
        rounds.append(
            Round(str(m // 60), m % 60, arm, 5, k, k + 1, k / 5, bd, k / 5, 1 / len(alphas))
        )
    names = tuple(f"drafter {i}" for i in range(len(alphas)))
    return Trace(TraceHeader(names, 5, "uniform", "be"), rounds)


def test_calibration_recovers_what_made_the_trace() -> None:
    fitted = calibrate(recorded([0.3, 0.7], 0.4, 0.8, queries=120), draws=30)
    model = fitted.environment.acceptance
    assert isinstance(model, Clustered)
    for name, truth in (("alpha of drafter 0", 0.3), ("alpha of drafter 1", 0.7), ("spread", 0.4)):
        interval = fitted.intervals[name]
        width = interval.high - interval.low
        assert interval.low - 0.5 * width <= truth <= interval.high + 0.5 * width
        assert width < 0.15
    assert model.persistence == pytest.approx(0.8, abs=0.15)
    runs = simulate(fitted.environment, fitted.policy, reward=fitted.reward, replications=400)
    simulated = runs.tokens.sum() / runs.rounds.sum()
    assert fitted.tokens_per_round.low <= simulated <= fitted.tokens_per_round.high


def test_calibration_of_a_geometric_trace_finds_no_spread_and_a_good_fit() -> None:
    fitted = calibrate(recorded([0.5], 0.0, 0.0, queries=80), draws=20)
    assert fitted.intervals["spread"].low < 0.03
    assert fitted.p_values[0] > 1e-3


@pytest.mark.parametrize("spread", [0.0, 0.3, 0.9])
def test_beta_geometric_law_is_that_of_the_clustered_model(spread: float) -> None:
    law = Clustered([0.6], 5, spread=spread, cluster=1.0).run_law()[0, 0]
    assert run_law(0.6, spread, 5) == pytest.approx(law, abs=2e-3)
    if spread:
        m = 1 / spread - 1
        beta = stats.beta(0.6 * m, 0.4 * m)
        assert run_law(0.6, spread, 5)[3] == pytest.approx(beta.moment(3))


def test_a_drafter_without_rounds_cannot_be_fitted() -> None:
    trace = recorded([0.5, 0.6], 0.0, 0.0, queries=2)
    only = Trace(trace.header, [r for r in trace.rounds if r.arm == 0])
    with pytest.raises(ConfigError, match="'drafter 1' has no whole round"):
        calibrate(only)


def test_none_that_only_catches_falls_is_no_arm() -> None:
    """Under be and bd the decoder's header names it, and no round can use it."""
    trace = recorded([0.5, 0.6], 0.0, 0.0, queries=3)
    header = dataclasses.replace(trace.header, arms=(*trace.header.arms, "none"))
    with_none = calibrate(Trace(header, trace.rounds), draws=3)
    assert with_none.arms == trace.header.arms
    assert with_none.intervals == calibrate(trace, draws=3).intervals


def test_calibrate_and_what_if_from_the_command_line(tmp_path) -> None:
    trace = recorded([0.3, 0.7], 0.3, 0.0, queries=20)
    path, saved = tmp_path / "t.jsonl", tmp_path / "env.json"
    with TraceWriter(path, trace.header) as writer:
        for r in trace.rounds:
            writer.write(r)
    picture = tmp_path / "fit.png"
    options = ["--replications", "200", "--draws", "10", "--json", "--plot", str(picture)]
    out = run("calibrate", str(path), "--save", str(saved), *options)
    assert out.exit_code == 0, out.output
    assert json.loads(out.stdout)["tokens per round"]["agree"] is True
    assert picture.stat().st_size > 5000
    environment, content = load_environment(saved)
    assert content["arms"] == ["drafter 0", "drafter 1"]
    assert environment.n_arms == 2
    out = run("what-if", str(saved), "--draft-length", "2", "--replications", "50", "--json")
    rows = json.loads(out.stdout)["rows"]
    assert {row["policy"] for row in rows} == {"uniform", "ucb", "exp3"}
    assert all(row["tokens per round"]["value"] <= 3.0 for row in rows)
    saved.write_text("{}")
    out = run("what-if", str(saved))
    assert out.exit_code == 2
    assert "no saved environment" in out.output


def test_save_and_load_are_inverse(tmp_path) -> None:
    fitted = calibrate(recorded([0.4, 0.6], 0.2, 0.0, queries=5), draws=3)
    save_environment(fitted, tmp_path / "e.json")
    again, _ = load_environment(tmp_path / "e.json")
    one, two = (simulate(e, "ucb", replications=5) for e in (fitted.environment, again))
    np.testing.assert_array_equal(one.steps, two.steps)


def test_every_table_is_kept_whole() -> None:
    for number in TABLES:
        table = load_table(number)
        assert table["table"] == number
        for row in table["rows"].values():
            if table["kind"] != "rewards":
                assert len(row["drafters"]) == 5
    assert load_table(3)["rows"]["Math"]["ucb"] == 2.280
    assert load_table(16)["rows"]["Sum"]["drafters"][2] == 2.289
    assert set(load_fitted().tokens) == set(load_table(3)["rows"])
    with pytest.raises(ConfigError, match="table=6"):
        load_table(6)


def test_a_single_drafter_comes_back_with_its_own_speedup() -> None:
    """The inversion is right: simulate what was inferred, find what was published."""
    speedups = load_table(4)["rows"]["Code"]["drafters"]
    environment = environment_of(speedups, 400, load_fitted())
    for arm, published in enumerate(speedups):
        runs = simulate(environment, f"fixed:arm={arm}", replications=400)
        ratio = runs.whole_tokens(5).sum() / runs.steps.sum()
        assert ratio == pytest.approx(published, rel=0.02)


def test_rounds_of_a_setting_are_as_dear_as_its_slowest_drafter_tells() -> None:
    fitted = load_fitted()
    assert round_cost(4, "Sum", fitted) == fitted.round_cost  # no head is slower than 1.303
    least = load_table(2)["rows"]["Fr"]["zero"]
    for row in ("Code", "Trans"):  # one machine, whatever the task
        assert round_cost(3, row, fitted) == pytest.approx((2.0 - least) / 0.95)
    assert round_cost(7, "Code SpS", fitted) == round_cost(3, "Code", fitted)
    assert round_cost(7, "Code EAGLE", fitted) == round_cost(4, "Code", fitted)
    assert round_cost(14, "QA", fitted) == round_cost(3, "QA", fitted)  # the same GPU and drafters


@pytest.mark.slow
def test_correlation_is_fitted_to_table_2() -> None:
    fitted = load_fitted()
    assert fit_correlation() == (fitted.spread, fitted.cluster)
    errors = np.array(list(correlation_errors(fitted.spread, fitted.cluster).values()))
    assert np.sqrt(np.mean(errors**2)) < 0.17
    uncorrelated = np.array(list(correlation_errors(fitted.spread, 0.0).values()))
    assert np.mean(errors**2) < np.mean(uncorrelated**2)  # positions of a block do correlate


@pytest.mark.slow
def test_the_papers_bandit_columns_are_predicted_within_eight_percent() -> None:
    report = reproduce([t for t in TABLES if t != 2], replications=200)
    found = report.data["score"]
    assert found["UCB, tables not fitted: mean |error| % (goal 4)"] < 6.5
    assert found["all bandit columns, tables not fitted: mean |error| % (goal 8)"] < 6.5
    assert found["rows with the right order of policies % (goal 90)"] >= 80.0


def test_draft_all_is_as_slow_as_the_paper_says() -> None:
    """Published: 0.35 to 0.54; to 3 % for the better bound, which takes drafters as independent."""
    rows = [row for row in reproduce([5], replications=1).rows if row["column"] == "draft-all"]
    assert len(rows) == 5
    assert all(abs(row["error %"]) < 3.0 for row in rows)


def test_scores_are_computed_as_stated() -> None:
    def cell(table: int, column: str, paper: float, predicted: float) -> Prediction:
        return Prediction(table, "row", column, paper, Interval(predicted, 0.0, 0.0))

    cells = [
        cell(3, "ucb", 2.0, 3.0),
        cell(4, "ucb", 2.0, 1.9),
        cell(4, "exp3", 1.0, 1.1),
        cell(4, "rand", 1.0, 1.15),
        cell(5, "exp3", 1.2, 1.0),
        cell(5, "ucb", 1.1, 1.1),
    ]
    found = score(cells)
    assert found["UCB, tables not fitted: mean |error| % (goal 4)"] == pytest.approx(2.5)
    assert found["rows with the right order of policies % (goal 90)"] == 50.0
    assert found["rows in another order"] == ["5 row"]
    assert "outliers" not in found
    odd = [
        Prediction(5, "Ja-En", c, p, Interval(1.0, 0, 0)) for c, p in (("ucb", 2.0), ("sh", 3.0))
    ]
    found = score([*cells, *odd])
    assert found["outliers"] == ["5 Ja-En"]
    assert found["UCB, tables not fitted: mean |error| % (goal 4)"] == pytest.approx(18.33)
    assert found["without them: UCB, tables not fitted: mean |error| %"] == pytest.approx(2.5)
    assert found["without them: rows with the right order of policies %"] == 50.0
    found = score(cells, fitted_on=(3, 4, 5))  # then nothing is predicted
    assert not any("not fitted" in key for key in found)
    assert found["UCB: mean |error| %"] == pytest.approx(18.33)


def test_outliers_are_rows_of_their_tables() -> None:
    for number in TABLES:
        table = load_table(number)
        assert set(table.get("outliers", ())) <= set(table["rows"])


def test_fit_finds_the_parameters_that_made_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandit columns simulated from known parameters, under other random numbers."""
    truth = dataclasses.replace(
        load_fitted(), switch=0.1, beta=0.3, gamma=0.5, budget=30, tokens={"Code": 192, "QA": 64}
    )
    made = {**load_table(3), "rows": {t: dict(load_table(3)["rows"][t]) for t in truth.tokens}}
    for name, row in made["rows"].items():
        for column in GRIDS:
            policy, reward = truth.policies()[column]
            runs = [
                simulate(each, policy, reward=reward, replications=4000, seed=9)
                for each in environments_of(3, name, truth)
            ]
            row[column] = speedup(runs).value
    for module in (paper, fit_study):
        monkeypatch.setattr(module, "load_table", lambda n: made if n == 3 else load_table(n))
    monkeypatch.setattr(fit_study, "SWITCHES", (0.04, 0.1, 0.16))
    monkeypatch.setattr(fit_study, "TOKENS", (32, 64, 128, 192, 384))
    coarse = {"exp3": (0.1, 0.5), "sh": (15, 30, 60), "ucb": (0.05, 0.3, 0.6)}
    for column, values in coarse.items():
        monkeypatch.setitem(fit_study.GRIDS, column, (fit_study.GRIDS[column][0], values))
    assert fit_study.fit(1000) == truth


def test_non_stationary_table_mixes_the_languages_of_table_5() -> None:
    cells = predict_table(19, load_fitted(), 50, 0, Jobs())
    assert len(cells) == 1
    single = max(load_table(19)["rows"]["Mixed"]["drafters"])
    assert cells[0].predicted.value > single  # a bandit beats every fixed drafter there


def test_growth_exponent_of_known_curves() -> None:
    B = np.geomspace(100, 1e6, 12).astype(int)
    for power in (0.5, 1.0):
        curves = np.outer([0.9, 1.0, 1.1], B**power)
        assert growth_exponent(B, curves).value == pytest.approx(power, abs=1e-6)
    assert growth_exponent(B, np.outer([0.9, 1.1], np.log(B))).value < 0.12


def test_a_report_is_strict_json() -> None:
    report = Report("t", [{"a": mean_interval([1.0, 2.0]), "b": float("nan"), "c": np.int64(3)}])
    row = json.loads(report.to_json())["rows"][0]
    assert row["a"]["value"] == 1.5
    assert row["b"] is None
    assert row["c"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["regret", "--policy", "ucbb"], "did you mean 'ucb'"),
        (["regret", "--alphas", "0.3,x"], "no list of numbers"),
        (["regret", "--alphas", "0.3,1.3"], "alphas=1.3"),
        (["regret", "--draft-length", "0"], "draft_length=0"),
        (["regret", "--tokens", "0"], "tokens=0"),
        (["reproduce", "6"], "unknown table '6'"),
        (
            ["reproduce", "3", "--refit", "x.json", "--refit-on", "7"],
            "unknown refit-on '7'. Known: 3, all",
        ),
        (["reproduce", "3", "--refit-on", "all"], "--refit-on all fits nothing without --refit"),
        (["ablate", "bet"], "did you mean 'beta'"),
        (["verify", "--only", "growh"], "did you mean 'growth'"),
        (["calibrate", "nowhere.jsonl"], "no such file"),
        (["regret", "--jobs", "0"], "jobs=0"),
        (["regret", "--backend", "dusk"], "did you mean 'dask'"),
    ],
)
def test_bad_arguments_are_one_sentence_and_exit_status_2(arguments, message) -> None:
    out = run(*arguments)
    assert out.exit_code == 2
    assert message in out.output
    assert "Traceback" not in out.output


def test_regret_from_the_command_line(tmp_path) -> None:
    picture = tmp_path / "r.png"
    arguments = ["regret", "--tokens", "2000", "--replications", "20", "--reward", "be"]
    out = run(*arguments, "--policy", "ucb:beta=1", "--plot", str(picture), "--json")
    assert out.exit_code == 0, out.output
    row = json.loads(out.stdout)["rows"][0]
    assert row["pseudo-regret"]["low"] < row["regret at B = 2000"]["high"]
    assert row["pseudo-regret"]["high"] < row["upper bound"]
    assert picture.stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize(
    "subject", ["best-arm", "rewards", "switch", "drafters", "gap", "draft-length"]
)
def test_ablations_run(subject: str, tmp_path) -> None:
    picture = tmp_path / "a.png"
    out = run("ablate", subject, "--replications", "30", "--json", "--plot", str(picture))
    assert out.exit_code == 0, out.output
    rows = json.loads(out.stdout)["rows"]
    assert picture.stat().st_size > 5000
    if subject == "switch":  # dearer switches help nobody; a fixed drafter has none
        best = [row["best drafter"]["value"] for row in rows]
        rand = [row["Rand"]["value"] for row in rows]
        assert best == [best[0]] * len(best)
        assert rand == sorted(rand, reverse=True)


def test_goodness_of_fit_merges_small_cells_into_their_neighbour() -> None:
    counts, expected = np.array([25, 14, 9, 5]), np.array([20.0, 20.0, 10.0, 3.0])
    merged = (np.array([25, 14, 14]), np.array([20.0, 20.0, 13.0]))
    by_hand = stats.chisquare(*merged, ddof=1).pvalue
    assert calibration._p_value(counts, expected / expected.sum()) == pytest.approx(by_hand)
    # one cell is left, or two with the fitted rate: nothing to test
    assert math.isnan(calibration._p_value(np.array([19, 1]), np.array([0.95, 0.05])))
    assert math.isnan(calibration._p_value(np.array([20, 0]), np.array([1.0, 0.0])))
