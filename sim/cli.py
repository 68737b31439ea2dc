"""``metasd-sim``: what a bandit over drafters would gain, simulated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from metasd_bandits import checks
from metasd_bandits.command import plainly
from sim.acceptance import IID, AcceptanceModel, Clustered, Language
from sim.calibration import load_environment
from sim.jobs import Jobs
from sim.paper import save_fitted
from sim.report import Report
from sim.studies.ablate import SUBJECTS
from sim.studies.ablate import ablate as ablation
from sim.studies.calibrate import calibrate_study
from sim.studies.calibrate import what_if as what_if_study
from sim.studies.fit import REFITS, fit
from sim.studies.regret import regret_study
from sim.studies.reproduce import check_numbers
from sim.studies.reproduce import reproduce as reproduction
from sim.studies.verify import CLAIMS, groups
from sim.studies.verify import verify as verification

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)

JobCount = Annotated[int, typer.Option("--jobs", help="Worker processes.")]
Backend = Annotated[str, typer.Option(help="joblib's backend: loky, threading, dask or ray.")]
Scheduler = Annotated[str | None, typer.Option(help="Address of a Dask scheduler.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Plot = Annotated[Path | None, typer.Option(help="Save the picture here (png, pdf or svg).")]
Seed = Annotated[int, typer.Option(help="Everything random follows from it.")]
Replications = Annotated[int, typer.Option(help="Independent runs of each setting.")]
Policies = Annotated[
    list[str] | None, typer.Option("--policy", help="As in ucb:beta=0.5; repeat for several.")
]
Reward = Annotated[str, typer.Option(help="be, bd, tokens or throughput.")]
Alphas = Annotated[str, typer.Option(help="Acceptance rate of each drafter, comma-separated.")]
DraftLength = Annotated[int, typer.Option(help="N, tokens drafted in a round.")]
Model = Annotated[str, typer.Option(help="Acceptance model: iid, clustered or language.")]


def main() -> None:
    """The entry point of ``metasd-sim``."""
    app()


def present(report: Report, as_json: bool, plot: Path | None) -> None:
    """Print a report, save its picture; exit status 1 where something checked failed."""
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        report.show(Console())
    if plot is not None and report.save_picture(plot) and not as_json:
        typer.echo(f"picture: {plot}")
    if not report.passed:
        raise typer.Exit(1)


def numbers(name: str, text: str) -> list[float]:
    """Numbers from a comma-separated list."""
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise checks.ConfigError(
            f"{name}={text!r} is no list of numbers; write as 0.3,0.5"
        ) from None


def acceptance_model(model: str, alphas: str, draft_length: int) -> AcceptanceModel:
    """The acceptance model that the options name."""
    rates = numbers("alphas", alphas)
    checks.choice("model", model, ("iid", "clustered", "language"))
    if model == "iid":
        return IID(rates, draft_length)
    if model == "clustered":
        return Clustered(rates, draft_length)
    return Language([1.0 - a for a in rates], draft_length)


def workers(jobs: int, backend: str, scheduler: str | None) -> Jobs:
    """Workers, with a progress bar where someone watches."""
    return Jobs(jobs, backend, scheduler, progress=sys.stderr.isatty())


@app.command()
@plainly
def regret(
    policy: Policies = None,
    alphas: Alphas = "0.3,0.4,0.5,0.6,0.7",
    draft_length: DraftLength = 5,
    model: Model = "iid",
    reward: Reward = "bd",
    tokens: Annotated[int, typer.Option(help="Largest B.")] = 100_000,
    points: Annotated[int, typer.Option(help="How many values of B.")] = 12,
    replications: Replications = 200,
    seed: Seed = 0,
    jobs: JobCount = 1,
    backend: Backend = "loky",
    scheduler: Scheduler = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Stopping-time regret against B, with upper and lower bounds."""
    chosen = policy or ["ucb:beta=1", "kl-ucb", "exp3", "uniform"]
    acceptance = acceptance_model(model, alphas, draft_length)
    report = regret_study(
        acceptance,
        chosen,
        tokens=tokens,
        points=points,
        reward=reward,
        replications=replications,
        seed=seed,
        jobs=workers(jobs, backend, scheduler),
    )
    present(report, as_json, plot)


@app.command()
@plainly
def reproduce(
    table: Annotated[str, typer.Argument(help="2, 3, 4, 5, 7, 12, 14, 15, 16, 19 or all.")] = "all",
    replications: Replications = 1000,
    seed: Seed = 0,
    refit: Annotated[
        Path | None, typer.Option(help="Fit the free parameters anew and write them here.")
    ] = None,
    refit_on: Annotated[
        str,
        typer.Option(
            help="What --refit looks at: table 3, or UCB in all tables, which predicts nothing any "
            "more but tells how near the model can come."
        ),
    ] = "3",
    jobs: JobCount = 1,
    backend: Backend = "loky",
    scheduler: Scheduler = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Predict the paper's bandit columns from its single-drafter columns."""
    where, numbers = workers(jobs, backend, scheduler), check_numbers(table)
    fitted = None
    looked_at = REFITS[checks.choice("refit-on", refit_on, REFITS)]
    if refit is None and looked_at:
        raise checks.ConfigError(f"--refit-on {refit_on} fits nothing without --refit FILE; add it")
    if refit is not None:
        fitted = fit(jobs=where, **looked_at)
        save_fitted(fitted, refit)
    report = reproduction(numbers, replications=replications, seed=seed, jobs=where, fitted=fitted)
    present(report, as_json, plot)


@app.command()
@plainly
def ablate(
    subject: Annotated[str, typer.Argument(help=", ".join(SUBJECTS))],
    replications: Replications = 500,
    seed: Seed = 0,
    jobs: JobCount = 1,
    backend: Backend = "loky",
    scheduler: Scheduler = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Vary one thing; sweep beta and gamma to recommended defaults."""
    where = workers(jobs, backend, scheduler)
    present(ablation(subject, replications=replications, seed=seed, jobs=where), as_json, plot)


@app.command()
@plainly
def calibrate(
    trace: Annotated[Path, typer.Argument(help="A trace that decoding has recorded.")],
    save: Annotated[Path | None, typer.Option(help="Keep the environment here (JSON).")] = None,
    replications: Replications = 1000,
    draws: Annotated[int, typer.Option(help="Bootstrap samples of queries.")] = 100,
    seed: Seed = 0,
    jobs: JobCount = 1,
    backend: Backend = "loky",
    scheduler: Scheduler = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Fit an environment to a trace, with intervals and goodness of fit."""
    report = calibrate_study(
        trace,
        save=save,
        replications=replications,
        draws=draws,
        seed=seed,
        jobs=workers(jobs, backend, scheduler),
    )
    present(report, as_json, plot)


@app.command("what-if")
@plainly
def what_if(
    environment: Annotated[Path, typer.Argument(help="An environment that calibrate saved.")],
    policy: Policies = None,
    reward: Annotated[str | None, typer.Option(help="Default: the trace's own.")] = None,
    draft_length: Annotated[int | None, typer.Option(help="Another N.")] = None,
    switch: Annotated[float | None, typer.Option(help="Another cost of a switch.")] = None,
    replications: Replications = 1000,
    seed: Seed = 0,
    jobs: JobCount = 1,
    backend: Backend = "loky",
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Other policies, draft lengths or switching costs in a fitted environment."""
    made, saved = load_environment(environment)
    report = what_if_study(
        made,
        saved["arms"],
        policy or [saved["policy"], "uniform", "ucb", "exp3"],
        reward=reward or saved["reward"],
        draft_length=draft_length,
        switch=switch,
        replications=replications,
        seed=seed,
        jobs=workers(jobs, backend, scheduler),
    )
    present(report, as_json, None)


@app.command()
@plainly
def verify(
    only: Annotated[
        str | None, typer.Option(help="A group or line: " + ", ".join(groups()))
    ] = None,
    replications: Replications = 200,
    seed: Seed = 0,
    jobs: JobCount = 1,
    backend: Backend = "loky",
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Test the theory's claims, one line each; exit status 1 if one fails, 0 if undecided."""
    if only is not None:
        checks.choice("group of claims", only, [*groups(), *CLAIMS])
    where = workers(jobs, backend, scheduler)
    report = verification(replications=replications, seed=seed, jobs=where, only=only)
    present(report, as_json, None)


if __name__ == "__main__":
    main()
