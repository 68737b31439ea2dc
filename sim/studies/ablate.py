"""One thing varied at a time (``metasd-sim ablate``), and sweeps that end in defaults.

The setting that is varied is the paper's: five drafters of table 3 (acceptance inferred from their
speedups), N = 5, a round of 1.15 plain steps, a switch at the fitted cost, outputs of 256 tokens,
rewards with the noise and correlation of table 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from metasd_bandits import checks
from metasd_bandits.plotting import COLOURS, line_styles, new_figure
from sim.acceptance import Clustered
from sim.environment import Environment
from sim.jobs import Jobs, Task
from sim.paper import Fitted, environment_of, load_fitted, load_table, round_cost
from sim.report import Interval, Report, line_with_interval, mean_interval
from sim.simulate import sample_rounds

__all__ = ["SUBJECTS", "ablate"]

TOKENS = 256
DRAFT_COST = 0.03  # plain steps of one drafted token: 5 of them and one verification make 1.15
BETAS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.7, 1.0)
GAMMAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
_AXES = {
    "N": "draft length N",
    "K": "number of drafters K",
    "gap": "gap in acceptance rate",
    "switch": "cost of a switch (plain steps)",
}


def ablate(
    subject: str, *, replications: int = 500, seed: int = 0, jobs: Jobs | None = None
) -> Report:
    """Run one ablation.

    Parameters
    ----------
    subject : str
        ``draft-length`` (Figure 2), ``best-arm`` (Figure 3), ``rewards`` (Figures 5 to 7),
        ``drafters``, ``gap``, ``switch``, ``beta`` or ``gamma``.
    replications, seed : int
    jobs : Jobs, optional
    """
    study = SUBJECTS[checks.choice("ablation", subject, SUBJECTS)]
    return study(replications, seed, jobs or Jobs())


def _math() -> Environment:
    fitted = load_fitted()
    drafters = load_table(3)["rows"]["Math"]["drafters"]
    return environment_of(drafters, TOKENS, fitted, round_cost(3, "Math", fitted))


def _with(environment: Environment, **acceptance: Any) -> Environment:
    """Other drafters; whatever they are, a drafted token costs `DRAFT_COST`."""
    model = environment.acceptance
    assert isinstance(model, Clustered)
    return dataclasses.replace(
        environment,
        acceptance=dataclasses.replace(model, **acceptance),
        costs=dataclasses.replace(environment.costs, draft=DRAFT_COST),
    )


def _sweep(
    title: str,
    what: str,
    settings: Sequence[tuple[float, Environment]],
    policies: dict[str, tuple[str, str]],
    replications: int,
    seed: int,
    jobs: Jobs,
    notes: Sequence[str] = (),
) -> Report:
    """Speedup of each policy (label -> policy and reward) at each value."""
    tasks = []
    for _, environment in settings:
        for policy, reward in policies.values():
            named = policy
            if policy == "best":
                model = environment.acceptance
                named = f"fixed:arm={int(model.tokens_per_round()[0].argmax())}"
            tasks.append(Task(environment, named, replications, {"reward": reward, "seed": seed}))
    runs = iter(jobs.run(tasks))
    rows = [
        {what: value, **{label: mean_interval(next(runs).speedup) for label in policies}}
        for value, _ in settings
    ]
    note = "speedup over plain decoding; mean over queries with its 95 % interval"
    return Report(title, rows, [note, *notes], draw=lambda: _draw_sweep(rows, what, list(policies)))


def _draw_sweep(rows: list[dict[str, Any]], what: str, labels: list[str]) -> Figure:
    figure, axes = new_figure(width=8.0)
    x = [row[what] for row in rows]
    for label, line in zip(labels, line_styles(len(labels)), strict=True):
        cells: list[Interval] = [row[label] for row in rows]
        line_with_interval(axes, x, cells, label, line)
    axes.set(xlabel=_AXES[what], ylabel="speedup over plain decoding")
    if all(isinstance(value, int) for value in x):
        axes.set_xticks(x)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _main_policies(fitted: Fitted) -> dict[str, tuple[str, str]]:
    named = fitted.policies()
    return {
        "best drafter": ("best", "bd"),
        "UCB, BD": named["ucb"],
        "UCB, BE": named["ucb-be"],
        "SH": named["sh"],
        "EXP3": named["exp3"],
        "Rand": named["rand"],
    }


def _draft_length(replications: int, seed: int, jobs: Jobs) -> Report:
    base = _math()
    settings = [(N, _with(base, draft_length=N)) for N in (1, 2, 3, 4, 5, 6, 8, 10, 13)]
    policies = _main_policies(load_fitted())
    return _sweep(
        "Draft length (the paper's Figure 2)", "N", settings, policies, replications, seed, jobs,
        [f"a drafted token costs {DRAFT_COST} plain steps, a verification 1"],
    )  # fmt: skip


def _drafters(replications: int, seed: int, jobs: Jobs) -> Report:
    base, rng = _math(), np.random.default_rng(seed)
    others = rng.uniform(0.1, 0.35, 19)
    settings = [(K, _with(base, alphas=[0.7, *others[: K - 1]])) for K in (1, 2, 3, 5, 8, 12, 20)]
    policies = {k: v for k, v in _main_policies(load_fitted()).items() if k != "SH"}
    return _sweep(
        "Number of drafters", "K", settings, policies, replications, seed, jobs,
        ["the best has alpha 0.7, the others between 0.1 and 0.35"],
    )  # fmt: skip


def _gap(replications: int, seed: int, jobs: Jobs) -> Report:
    base = _math()
    settings = [
        (gap, _with(base, alphas=[0.7] + [0.7 - gap] * 4))
        for gap in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    ]
    return _sweep(
        "Gap between the best drafter and the others", "gap", settings,
        _main_policies(load_fitted()), replications, seed, jobs,
    )  # fmt: skip


def _switch(replications: int, seed: int, jobs: Jobs) -> Report:
    base = _math()
    settings = [
        (s, dataclasses.replace(base, costs=dataclasses.replace(base.costs, switch=s)))
        for s in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
    ]
    policies = {**_main_policies(load_fitted()), "UCB2 (few switches)": ("ucb2", "bd")}
    return _sweep(
        "Cost of a switch, in plain steps", "switch", settings, policies, replications, seed, jobs
    )


def _best_arm(replications: int, seed: int, jobs: Jobs) -> Report:
    rows, rounds = [], np.arange(5, 101, 5)
    base = dataclasses.replace(_math(), lengths=1000)
    model = base.acceptance
    best = int(model.tokens_per_round()[0].argmax())
    named = load_fitted().policies()
    wanted = {"UCB, BD": named["ucb"], "UCB, BE": named["ucb-be"], "EXP3": named["exp3"]}
    tasks = [
        Task(
            base,
            policy,
            replications,
            {"reward": reward, "seed": seed, "marks": rounds, "mark_unit": "rounds"},
        )
        for policy, reward in wanted.values()
    ]
    curves: dict[str, list[Interval]] = {}
    for label, runs in zip(wanted, jobs.run(tasks), strict=True):
        since = np.diff(runs.curve_pulls[..., best], axis=1, prepend=0.0) / 5.0
        curves[label] = [mean_interval(column) for column in since.T]
    for m, t in enumerate(rounds):
        rows.append({"round": int(t), **{label: c[m] for label, c in curves.items()}})
    report = Report(
        "Share of the best drafter in the last five rounds (the paper's Figure 3)", rows
    )
    report.draw = lambda: _draw_shares(rounds, curves)
    return report


def _draw_shares(rounds: Any, curves: dict[str, list[Interval]]) -> Figure:
    figure, axes = new_figure()
    for (label, cells), line in zip(curves.items(), line_styles(len(curves)), strict=True):
        line_with_interval(axes, rounds, cells, label, line)
    axes.set(xlabel="round", ylabel="share of the best drafter", ylim=(0, 1))
    axes.legend()
    return figure


def _rewards(replications: int, seed: int, jobs: Jobs) -> Report:
    table, fitted = load_table(2)["rows"], load_fitted()
    alphas = [row["bd_mean"] for row in table.values()]
    model = Clustered(alphas, 5, spread=fitted.spread, cluster=fitted.cluster)
    rows, drawn = [], {}
    for arm, name in enumerate(table):
        sample = sample_rounds(model, arm, rounds=40 * replications, seed=seed)
        for reward, values in (("BE", sample.be), ("BD", sample.bd)):
            q = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])
            ends = dict(zip(("5 %", "25 %", "50 %", "75 %", "95 %"), q.tolist(), strict=True))
            rows.append(
                {"drafter": name, "reward": reward, **ends, "zero": float((values == 0).mean())}
            )
            drawn[name, reward] = values
    report = Report(
        "Distribution of the rewards, drafters of table 2 (the paper's Figures 5 to 7)", rows
    )
    report.draw = lambda: _draw_boxes(list(table), drawn)
    return report


def _draw_boxes(names: list[str], drawn: dict[tuple[str, str], Any]) -> Figure:
    figure, panels = new_figure(1, 2, 7.2, 3.6)
    for axes, reward in zip(panels, ("BE", "BD"), strict=True):
        boxes = axes.boxplot(
            [drawn[name, reward] for name in names],
            tick_labels=names,
            whis=(5, 95),
            showfliers=False,
            showmeans=True,
            meanprops={"markerfacecolor": COLOURS[0], "markeredgecolor": COLOURS[0]},
            medianprops={"color": COLOURS[1], "linewidth": 2.0},
        )
        axes.set(title=reward, ylim=(-0.03, 1.03), xlabel="drafter")
    panels[0].set(ylabel="reward of a round (whiskers: 5 to 95 %)")
    panels[1].legend(
        [boxes["means"][0], boxes["medians"][0]], ["mean", "median"], loc="upper right"
    )
    return figure


def _tune(
    name: str, values: Sequence[float], write: Callable[[float], str], reward: str
) -> Callable[[int, int, Jobs], Report]:
    """A sweep of one hyperparameter over the tasks of table 3 and four output lengths."""

    def study(replications: int, seed: int, jobs: Jobs) -> Report:
        fitted, rows3 = load_fitted(), load_table(3)["rows"]
        settings = [(task, B) for task in rows3 for B in (64, 128, 256, 1024)]
        tasks = []
        for task, B in settings:
            environment = environment_of(
                rows3[task]["drafters"], B, fitted, round_cost(3, task, fitted)
            )
            arm = int(np.argmax(rows3[task]["drafters"]))
            options = {"reward": reward, "seed": seed}
            for policy in (f"fixed:arm={arm}", *map(write, values)):
                tasks.append(Task(environment, policy, replications, options))
        runs = iter(jobs.run(tasks))
        lost = np.empty((len(settings), len(values), replications))
        for s in range(len(settings)):
            best = next(runs).steps
            for v in range(len(values)):
                steps = next(runs).steps
                lost[s, v] = 100.0 * (steps - best) / best.mean()
        return _tuned(name, values, lost, [B for _, B in settings])

    return study


def _tuned(name: str, values: Sequence[float], lost: Any, lengths: Sequence[int]) -> Report:
    """The table of time lost to the best drafter, and the value that loses least."""
    over_all = lost.mean(0)  # (values, replications): mean over settings, paired by replication
    rows = []
    for v, value in enumerate(values):
        by_length = {
            f"B = {B}": float(lost[[b == B for b in lengths], v].mean())
            for B in dict.fromkeys(lengths)
        }
        rows.append({name: value, "time lost %": mean_interval(over_all[v]), **by_length})
    best = int(np.argmin(over_all.mean(1)))
    same = [
        value
        for v, value in enumerate(values)
        if mean_interval(over_all[v] - over_all[best]).low <= 0.25
    ]
    notes = [
        f"recommended: {name} = {values[best]:g}; within a quarter of a percent of it: "
        + ", ".join(f"{v:g}" for v in same),
        "time lost to always the best drafter, mean over table 3's tasks and four lengths",
    ]
    report = Report(f"Sweep of {name}", rows, notes, {"recommended": values[best]})
    report.draw = lambda: _draw_tuned(name, rows)
    return report


def _draw_tuned(name: str, rows: list[dict[str, Any]]) -> Figure:
    figure, axes = new_figure()
    x = [row[name] for row in rows]
    labels = [key for key in rows[0] if key.startswith("B = ")]
    for label, line in zip(labels, line_styles(len(labels)), strict=True):
        axes.plot(x, [row[label] for row in rows], label=label, **line)
    axes.set(xlabel=name, ylabel="time lost to the best drafter (%)", ylim=(0, None))
    axes.legend()
    return figure


SUBJECTS: dict[str, Callable[[int, int, Jobs], Report]] = {
    "draft-length": _draft_length,
    "best-arm": _best_arm,
    "rewards": _rewards,
    "drafters": _drafters,
    "gap": _gap,
    "switch": _switch,
    "beta": _tune("beta", BETAS, lambda b: f"ucb:beta={b}", "bd"),
    "beta-be": _tune("beta", BETAS, lambda b: f"ucb:beta={b}", "be"),
    "gamma": _tune("gamma", GAMMAS, lambda g: f"exp3:gamma={g}", "bd"),
}
