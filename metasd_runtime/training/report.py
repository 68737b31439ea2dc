"""The drafter x domain matrix, as a table and as a heat map."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from metasd_runtime.training.evaluate import Acceptance

__all__ = ["heat_map", "matrix_table", "write_matrix"]

Matrix = Mapping[str, Mapping[str, Acceptance]]


def matrix_table(matrix: Matrix, what: str = "held-out prompts") -> Table:
    """Block divergence and tokens per round of each drafter (row) on each domain (column)."""
    domains = list(next(iter(matrix.values())))
    table = Table(title=f"{what}: block divergence (tokens per round)")
    table.add_column("drafter")
    for domain in domains:
        table.add_column(domain, justify="right")
    for name, row in matrix.items():
        best = {
            domain: all(
                row[domain].block_divergence >= other[domain].block_divergence
                for other in matrix.values()
            )
            for domain in domains
        }
        cells = [
            f"{'[bold]' if best[d] else ''}{row[d].block_divergence:.3f} "
            f"({row[d].tokens_per_round:.2f})"
            for d in domains
        ]
        table.add_row(name, *cells)
    return table


def write_matrix(matrix: Matrix, path: Path) -> None:
    """All that was measured, one line per drafter and domain, as CSV."""
    beside = path.with_suffix(".partial")
    with beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        depths = len(next(iter(next(iter(matrix.values())).values())).agreement)
        positions = range(1, depths + 1)
        writer.writerow(
            ["drafter", "domain", "block_divergence", "tokens_per_round"]
            + [f"agreement_{i}" for i in positions]
            + [f"divergence_{i}" for i in positions]
        )
        for name, row in matrix.items():
            for domain, result in row.items():
                numbers = [
                    result.block_divergence,
                    result.tokens_per_round,
                    *result.agreement,
                    *result.divergence,
                ]
                writer.writerow([name, domain, *(f"{x:.4f}" for x in numbers)])
    os.replace(beside, path)


def heat_map(matrix: Matrix, path: Path) -> None:
    """Block divergence as a picture; each domain's best drafter is framed."""
    from metasd_bandits.plotting import save_figure
    from metasd_runtime.plot import plot_heat_map

    names, domains = list(matrix), list(next(iter(matrix.values())))
    values = [[matrix[name][domain].block_divergence for domain in domains] for name in names]
    label = "block divergence, mean of 1 - TV"
    save_figure(
        plot_heat_map(values, names, domains, label, "domain of the held-out prompts"), path
    )
