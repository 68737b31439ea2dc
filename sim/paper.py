"""The paper's tables as data, and how a table's single-drafter columns become an environment.

Tables of MetaSD (arXiv 2604.05417) stand in ``sim/tables``; each file names its table. A drafter's
speedup s over plain decoding is g / c: tokens per round over what a round costs, in plain steps.
c = 1.15 is what table 19 measures (block efficiency over speedup, 1.13 to 1.17 in every column).
But no drafter of table 2, however foreign the text, has fewer than 1.257 tokens per round (the
first draft is accepted in 25.7 % of them), and drafters of one table share architecture and
machine: where a table's slowest drafter would have fewer, all its rounds are dearer (`round_cost`).
g then gives the acceptance rate, by inverting the model's tokens per round. Texts end by chance
(`sim.lengths.EndOfText`), and speedups are means over prompts, as the paper says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks
from sim.acceptance import Clustered
from sim.costs import Costs
from sim.environment import Environment
from sim.files import save_json
from sim.lengths import EndOfText, Lengths
from sim.report import Interval, mean_interval
from sim.simulate import Runs

__all__ = [
    "DRAFT_LENGTH",
    "FITTED_TABLE",
    "TABLES",
    "Fitted",
    "environment_of",
    "environments_of",
    "load_fitted",
    "load_table",
    "round_cost",
    "speedup",
    "task_of",
    "was_fitted",
]

DRAFT_LENGTH = 5  # fits table 2's block efficiencies best
FITTED_TABLE = 3
TABLES = (2, 3, 4, 5, 7, 8, 10, 11, 12, 14, 15, 16, 19)
_FOLDER = Path(__file__).parent / "tables"
_LEAST_TOKENS = 1.257  # per round: one, and the least P(N_acc > 0) of table 2


@dataclass(frozen=True)
class Fitted:
    """What the paper leaves open.

    Attributes
    ----------
    spread, cluster : float
        Of `sim.acceptance.Clustered`; from table 2's fifteen moments.
    round_cost : float
        Plain steps of a round, at least; from table 19.
    switch, beta, gamma, budget, tokens
        Cost of a switch in plain steps, MetaSD-UCB's beta, MetaSD-EXP3's gamma, MetaSD-SH's
        budget, and one mean output length for each task.
    tables : tuple of int
        Where the last five come from; what is not `was_fitted` is predicted.
    """

    spread: float = 0.6
    cluster: float = 0.1
    round_cost: float = 1.15
    switch: float = 0.1
    beta: float = 0.1
    gamma: float = 0.3
    budget: int = 15
    tokens: dict[str, int] = field(default_factory=dict)
    tables: tuple[int, ...] = (FITTED_TABLE,)

    def policies(self) -> dict[str, tuple[str, str]]:
        """Bandit column -> policy and the reward it learns from."""
        return {
            "rand": ("uniform", "bd"),
            "exp3": (f"exp3:gamma={self.gamma}", "bd"),
            "sh": (f"sh:budget={self.budget}", "bd"),
            "ucb-be": (f"ucb:beta={self.beta}", "be"),
            "ucb": (f"ucb:beta={self.beta}", "bd"),
        }


def load_table(number: int) -> dict[str, Any]:
    """A table's file; ``rows`` maps a task to its columns."""
    if number not in TABLES:
        raise checks.ConfigError(f"table={number} is not kept; give one of {TABLES}")
    return json.loads((_FOLDER / f"table{number:02d}.json").read_text())


def load_fitted() -> Fitted:
    """The frozen parameters."""
    values = json.loads((_FOLDER / "fitted.json").read_text())
    return Fitted(**values | {"tables": tuple(values["tables"])})


def save_fitted(fitted: Fitted, path: Path) -> None:
    """Write parameters as `load_fitted` reads them, beside the name and then renamed."""
    save_json(asdict(fitted), path)


def round_cost(number: int, row: str, fitted: Fitted) -> float:
    """Plain steps of a round in the setting of a table's row.

    Rows that share what follows their task's name ("EAGLE" in "Code EAGLE") share a setting. A
    table names, by setting, another one with the same drafters on the same machine.
    """
    setting, table = row.partition(" ")[2], load_table(number)
    rows = table["rows"]
    slowest = min(min(rows[r]["drafters"]) for r in rows if r.partition(" ")[2] == setting)
    same = table.get("drafters_and_machine_of", {}).get(setting)
    least = fitted.round_cost
    if same is not None:
        least = round_cost(same, next(iter(load_table(same)["rows"])), fitted)
    return max(least, _LEAST_TOKENS / slowest)


def was_fitted(number: int, row: str, fitted: Fitted) -> bool:
    """Whether the parameters were fitted to this row's drafters, so that it is no prediction.

    Table 7's SpS rows are table 3's drafters measured again: fitted together with them.
    """
    drafters = load_table(number)["rows"][row].get("drafters")
    return any(
        drafters == known["drafters"]
        for table in fitted.tables
        for known in load_table(table)["rows"].values()
    )


def task_of(number: int, row: str) -> str:
    """The task of a table's row: what tokens are fitted for."""
    task: str = load_table(number).get("task", row.split()[0])
    return task


def environments_of(number: int, row: str, fitted: Fitted) -> list[Environment]:
    """What a table's row was measured in: one environment, or one for each mixed language."""
    table = load_table(number)
    texts = [table["rows"][row]["drafters"]]
    if table["kind"] == "mixture":
        texts = _languages(np.array(texts[0]))
    lengths = EndOfText(fitted.tokens[task_of(number, row)])
    cost = round_cost(number, row, fitted)
    return [environment_of(text, lengths, fitted, cost) for text in texts]


def _languages(speedups: NDArray[np.float64]) -> list[list[float]]:
    """Table 5's drafters on each language, scaled to table 19's columns: one text per language.

    A drafter's speedup over equal shares of the languages is their mean, as over any prompts.
    """
    matrix = np.array([row["drafters"] for row in load_table(5)["rows"].values()])
    scale = speedups / matrix.mean(0)
    return [list(row) for row in matrix * scale]


def environment_of(
    speedups: Sequence[float],
    lengths: int | Lengths,
    fitted: Fitted,
    cost: float | None = None,
    switch: float | None = None,
) -> Environment:
    """Drafters of the given single-drafter speedups; `cost` is their `round_cost`."""
    alphas, block = infer(np.asarray(speedups, dtype=float), fitted, cost)
    acceptance = Clustered(alphas, DRAFT_LENGTH, spread=fitted.spread, cluster=fitted.cluster)
    costs = Costs(
        draft=(block - 1.0) / DRAFT_LENGTH, switch=fitted.switch if switch is None else switch
    )
    return Environment(acceptance, lengths, costs=costs)


def speedup(parts: Sequence[Runs]) -> Interval:
    """Mean speedup of all queries together, as the paper averages over prompts.

    Blocks count whole, because the published single-drafter speedups, from which acceptance was
    inferred, already hold what a last block overshoots.
    """
    return mean_interval(
        np.concatenate([runs.whole_tokens(DRAFT_LENGTH) / runs.steps for runs in parts])
    )


def infer(
    speedups: NDArray[np.float64], fitted: Fitted, cost: float | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Acceptance rate and round cost of each drafter, from its speedup alone."""
    tokens = np.maximum(speedups * (cost or fitted.round_cost), _LEAST_TOKENS)
    grid, g = _tokens_by_alpha(fitted.spread, fitted.cluster)
    return np.interp(tokens, g, grid), tokens / speedups


@lru_cache(maxsize=4)
def _tokens_by_alpha(
    spread: float, cluster: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens per round over a grid of acceptance rates."""
    grid = np.linspace(0.0, 1.0, 201)
    g = Clustered(grid, DRAFT_LENGTH, spread=spread, cluster=cluster).tokens_per_round()[0]
    return grid, g
