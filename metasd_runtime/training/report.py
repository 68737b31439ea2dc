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


def matrix_table(matrix: Matrix) -> Table:
    """Block divergence and tokens per round of each drafter (row) on each domain (column)."""
    domains = list(next(iter(matrix.values())))
    table = Table(title="held-out prompts: block divergence (tokens per round)")
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
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    names, domains = list(matrix), list(next(iter(matrix.values())))
    values = [[matrix[name][domain].block_divergence for domain in domains] for name in names]
    figure = Figure(figsize=(1.2 * len(domains) + 2, 0.6 * len(names) + 1.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap="cividis", aspect="auto")
    axes.set_xticks(range(len(domains)), domains, rotation=20, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("domain of the held-out prompts")
    axes.set_ylabel("drafter")
    low, high = min(map(min, values)), max(map(max, values))
    for j in range(len(domains)):
        best = max(range(len(names)), key=lambda i: values[i][j])
        for i in range(len(names)):
            dark = values[i][j] < (low + high) / 2
            axes.text(
                j,
                i,
                f"{values[i][j]:.2f}",
                ha="center",
                va="center",
                color="white" if dark else "black",
                fontweight="bold" if i == best else "normal",
            )
        axes.add_patch(
            Rectangle(
                (j - 0.47, best - 0.47), 0.94, 0.94, fill=False, edgecolor="white", linewidth=2
            )
        )
    figure.colorbar(image, label="block divergence, mean of 1 - TV")
    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, format=path.suffix.removeprefix("."), dpi=150)
    os.replace(beside, path)
