"""``metasd-replay``: what would another policy have earned on this trace?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from metasd_bandits import checks
from metasd_bandits.command import plainly
from metasd_bandits.intervals import Estimate
from metasd_bandits.replay.estimators import ESTIMATORS, estimate
from metasd_bandits.replay.full import full_replay
from metasd_bandits.replay.regret import regret_against_best
from metasd_bandits.replay.rejection import rejection_replay
from metasd_bandits.replay.results import ReplayResult, difference
from metasd_bandits.replay.summary import summarize as summarize_trace
from metasd_bandits.traces.columns import Reader, by_query, open_trace
from metasd_bandits.traces.importers import open_bandit_reader, vowpal_wabbit_reader
from metasd_bandits.traces.parquet import convert as convert_trace

__all__ = ["app", "main"]

METHODS = ("full", "rejection", *ESTIMATORS)
app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)

TracePath = Annotated[Path, typer.Argument(metavar="TRACE", help="A .parquet or .jsonl trace.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Method = Annotated[
    str,
    typer.Option(
        help="full (every arm's reward was logged), rejection (a randomised log of used arms), or "
        "an estimator for a stationary policy: ips, snips, clipped-ips, dr."
    ),
]
ScopeOption = Annotated[
    str, typer.Option(help="query (forget at each query) or carried (never forget).")
]
Seeds = Annotated[int, typer.Option(help="Runs of the policy, seeds 0, 1, ...")]
Tokens = Annotated[int | None, typer.Option(help="B: also report rounds and steps to B tokens.")]
Level = Annotated[float, typer.Option(help="Coverage of the intervals.")]
Floor = Annotated[float | None, typer.Option(help="Least propensity, for rejection.")]
Clip = Annotated[float | None, typer.Option(help="Largest weight, for clipped-ips.")]


def main() -> None:
    """The entry point of ``metasd-replay``."""
    app()


@app.command()
@plainly
def summarize(trace: TracePath, as_json: AsJson = False) -> None:
    """Show what a trace holds, and which questions it can answer."""
    reader = open_trace(trace)
    with _progress(reader, "reading", quiet=as_json) as step:
        summary = summarize_trace(reader, step)
    header = reader.header
    if as_json:
        about = {
            "policy": header.policy,
            "reward": header.reward,
            "draft length": header.draft_length,
        }
        _print_json({**about, **summary.as_dict(header.arms)})
        return
    title = (
        f"{summary.rounds:,} rounds, {summary.queries:,} queries; logged by {header.policy}, "
        f"reward {header.reward}, N = {header.draft_length}"
    )
    table = _table(title, "arm", "rounds", "share", "reward", "tokens/round", "steps/round",
                   "propensity")  # fmt: skip
    for i, arm in enumerate(header.arms):
        low, high = summary.propensity[:, i]
        table.add_row(
            arm, f"{summary.pulls[i]:,}", f"{summary.pulls[i] / max(1, summary.rounds):.1%}",
            _number(summary.reward[i]), _number(summary.tokens[i]), _number(summary.step[i]),
            _number(low) if low == high else f"{_number(low)} to {_number(high)}",
        )  # fmt: skip
    console = _console()
    console.print(table)
    for question, why_not in summary.answers.items():
        console.print(f"{question}: {'no, ' + why_not if why_not else 'yes'}")
    if summary.interleaved:
        console.print("queries interleave: convert --by-query sorts them")


@app.command()
@plainly
def evaluate(
    trace: TracePath,
    policy: Annotated[str, typer.Argument(help='As in "ucb:beta=0.5"; an arm\'s name; uniform.')],
    method: Method,
    scope: ScopeOption = "query",
    seeds: Seeds = 1,
    tokens: Tokens = None,
    level: Level = 0.95,
    floor: Floor = None,
    clip: Clip = None,
    regret: Annotated[
        bool, typer.Option("--regret", help="Also against the best drafter (full, with --tokens).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate what one policy earns, with intervals."""
    reader, result = open_trace(trace), None
    checks.choice("method", method, METHODS)
    if regret and (method != "full" or tokens is None):
        raise checks.ConfigError("--regret needs --method full and --tokens B")
    if method in ESTIMATORS:
        with _progress(reader, method, quiet=as_json) as step:
            estimates = estimate(reader, policy, methods=[method], tokens=tokens, clip=clip,
                                 level=level, progress=step)  # fmt: skip
    else:
        result = _replay(reader, policy, method, scope, seeds, tokens, level, floor, quiet=as_json)
        estimates = list(result.estimates.values())
    if regret and result and tokens is not None:
        estimates += regret_against_best(reader, result, tokens)
    if as_json:
        found: dict[str, Any] = {"policy": policy, "estimates": [e.as_dict() for e in estimates]}
        if result:
            found |= {
                "shares": dict(zip(reader.header.arms, result.shares.tolist(), strict=True)),
                "unanswered": result.unanswered,
            }
        _print_json(found)
        return
    _print_estimates(policy, estimates)
    console = _console()
    if result:
        shares = zip(reader.header.arms, result.shares, strict=True)
        console.print("shares: " + ", ".join(f"{arm} {share:.1%}" for arm, share in shares))
        for quantity, reason in result.unanswered.items():
            console.print(f"{quantity}: not told, {reason}")


@app.command()
@plainly
def compare(
    trace: TracePath,
    policies: Annotated[list[str], typer.Argument(help="Two or more; the first is the reference.")],
    method: Annotated[str, typer.Option(help="full or rejection.")] = "full",
    scope: ScopeOption = "query",
    seeds: Seeds = 1,
    tokens: Tokens = None,
    level: Level = 0.95,
    floor: Floor = None,
    as_json: AsJson = False,
) -> None:
    """Compare policies on the same rounds; differences are paired query by query."""
    checks.choice("method", method, ("full", "rejection"))
    if len(policies) < 2:
        raise checks.ConfigError("compare needs two policies or more; evaluate takes one")
    reader = open_trace(trace)
    results = [
        _replay(reader, p, method, scope, seeds, tokens, level, floor, quiet=as_json)
        for p in policies
    ]
    quantities = [q for q in results[0].estimates if all(q in r.estimates for r in results)]
    gaps = {q: [difference(r, results[0], q) for r in results[1:]] for q in quantities}
    if as_json:
        rows = [
            {
                "policy": policy,
                "estimates": [e.as_dict() for e in r.estimates.values()],
                "unanswered": r.unanswered,
                "minus first": [gaps[q][i - 1].as_dict() for q in quantities] if i else [],
            }
            for i, (policy, r) in enumerate(zip(policies, results, strict=True))
        ]
        _print_json({"method": method, "policies": rows})
        return
    for q in quantities:
        table = _table(q, "policy", "estimate", f"{level:.0%} interval", f"minus {policies[0]}",
                       f"{level:.0%} interval")  # fmt: skip
        for i, (policy, r) in enumerate(zip(policies, results, strict=True)):
            e = r[q]
            gap = gaps[q][i - 1] if i else None
            table.add_row(
                policy, _number(e.value), _interval(e),
                f"{gap.value:+.4f}" if gap else "", _interval(gap) if gap else "",
            )  # fmt: skip
        _console().print(table)
    _print_notes([e for r in results for e in r.estimates.values()])
    for quantity, reason in results[0].unanswered.items():
        _console().print(f"{quantity}: not told, {reason}")


@app.command()
@plainly
def convert(
    source: Annotated[Path, typer.Argument(help="A trace, or a log to import.")],
    target: Annotated[Path, typer.Argument(help="Ends in .parquet or .jsonl.")],
    of: Annotated[
        Literal["trace", "obd", "vw"],
        typer.Option("--from", help="obd: Open Bandit Dataset CSV; vw: Vowpal Wabbit text."),
    ] = "trace",
    position: Annotated[int | None, typer.Option(help="obd: keep this position only.")] = None,
    costs: Annotated[str | None, typer.Option(help="vw: LEAST,LARGEST cost.")] = None,
    sort: Annotated[bool, typer.Option("--by-query", help="Bring queries' rounds together.")] = (
        False
    ),
    as_json: AsJson = False,
) -> None:
    """Convert a trace between JSON Lines and Parquet, or import another system's log."""
    if of == "obd":
        reader = open_bandit_reader(source, position)
    elif of == "vw":
        reader = vowpal_wabbit_reader(source, _pair("costs", costs) if costs else None)
    else:
        reader = open_trace(source)
    rounds = convert_trace(by_query(reader) if sort else reader, target)
    if as_json:
        _print_json({"rounds": rounds, "path": str(target)})
    else:
        _console().print(f"{rounds:,} rounds in {target}", highlight=False)


@app.command()
@plainly
def plot(
    trace: TracePath,
    picture: Annotated[Path, typer.Argument(help="Ends in .png, .pdf or .svg.")],
    policies: Annotated[list[str] | None, typer.Argument(help="What to draw.")] = None,
    kind: Annotated[
        Literal["reward", "regret", "shares", "coverage", "support"],
        typer.Option(
            help="reward, regret, shares: curves of full replay. coverage: how often the "
            "estimators' intervals hold the truth, tried on this trace. support: the arms a log "
            "can speak about."
        ),
    ] = "regret",
    scope: ScopeOption = "query",
    seeds: Seeds = 1,
    logs: Annotated[int, typer.Option(help="coverage: trial logs.")] = 200,
    queries: Annotated[int, typer.Option(help="coverage: queries of each trial log.")] = 60,
    as_json: AsJson = False,
) -> None:
    """Draw curves of full replay, the intervals' coverage, or the log's support."""
    from metasd_bandits.replay import pictures

    checks.choice("ending of the picture", picture.suffix, (".png", ".pdf", ".svg"))
    reader = open_trace(trace)
    checks.integer("seeds", seeds, 1)
    chosen = policies or []
    if kind in ("reward", "regret", "shares") and not chosen:
        raise checks.ConfigError(f"plot --kind {kind} needs at least one policy")
    with _progress(None, kind, quiet=as_json, total=logs if kind == "coverage" else None) as step:
        numbers = pictures.draw(reader, picture, kind, chosen, scope, seeds, logs, queries, step)
    if as_json:
        _print_json({"picture": str(picture), **numbers})
    else:
        _console().print(f"drawn: {picture}", highlight=False)


def _replay(
    reader: Reader, policy: str, method: str, scope: str, seeds: int, tokens: int | None,
    level: float, floor: float | None, *, quiet: bool,
) -> ReplayResult:  # fmt: skip
    checks.choice("scope", scope, ("query", "carried"))
    options: dict[str, Any] = {
        "scope": scope,
        "seeds": range(checks.integer("seeds", seeds, 1)),
        "tokens": tokens,
        "level": level,
    }
    if policy in reader.header.arms:
        policy = f"fixed:arm={reader.header.arms.index(policy)}"
    with _progress(reader, policy, quiet=quiet) as step:
        if method == "full":
            return full_replay(reader, policy, progress=step, **options)
        return rejection_replay(reader, policy, floor=floor, progress=step, **options)


@contextmanager
def _progress(
    reader: Reader | None, what: str, *, quiet: bool, total: int | None = None
) -> Iterator[Callable[[int], None] | None]:
    """A bar on standard error, where somebody looks at it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=reader.n_rounds if reader else total)
        yield lambda n: bar.update(task, advance=n)


def _print_estimates(policy: str, estimates: list[Estimate]) -> None:
    table = _table(policy, "quantity", "method", "estimate", f"{estimates[0].level:.0%} interval",
                   "accepted", "effective", "largest weight", "resampled")  # fmt: skip
    for e in estimates:
        table.add_row(
            e.quantity, e.method, _number(e.value), _interval(e), f"{e.accepted:,} of {e.rounds:,}",
            f"{e.effective:,.0f}", f"{e.largest_weight:.3g}", f"{e.n_units:,} {e.unit}",
        )  # fmt: skip
    _console().print(table)
    _print_notes(estimates)


def _print_notes(estimates: list[Estimate]) -> None:
    for note in dict.fromkeys(note for e in estimates for note in e.notes):
        _console().print(f"note: {note}")


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    return console


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _number(x: float) -> str:
    return "-" if x != x else f"{x:.4f}"


def _interval(e: Estimate) -> str:
    return "none" if e.low != e.low else f"{e.low:.4f} to {e.high:.4f}"


def _pair(name: str, text: str) -> tuple[float, float]:
    parts = text.split(",")
    if len(parts) != 2:
        raise checks.ConfigError(f"{name}={text!r} must be two numbers, as in 0,1")
    return checks.number(name, parts[0]), checks.number(name, parts[1])


def _print_json(values: dict[str, Any]) -> None:
    typer.echo(json.dumps(values, allow_nan=False))


if __name__ == "__main__":
    main()
