"""Tables of what decoding did, for the terminal."""

from __future__ import annotations

from rich.table import Table

from metasd_runtime.generation.statistics import Statistics

__all__ = ["arm_table", "summary_line"]


def arm_table(statistics: Statistics, title: str | None = None) -> Table:
    """Per drafter: pulls, accepted of drafted tokens, mean BE and BD, tokens and ms per round."""
    table = Table(title=title, title_justify="left")
    table.add_column("drafter", overflow="fold")
    for column in ("pulls", "accepted", "BE", "BD", "tok/round", "ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for arm in statistics.arms:
        if not arm.pulls:
            table.add_row(arm.name, "0", *["-"] * 5)
            continue
        table.add_row(
            arm.name,
            str(arm.pulls),
            f"{arm.accepted}/{arm.drafted}",
            f"{arm.block_efficiency:.3f}",
            f"{arm.block_divergence:.3f}",
            f"{arm.tokens_per_round:.2f}",
            f"{1e3 * arm.seconds / arm.pulls:.1f}",
        )
    return table


def summary_line(statistics: Statistics) -> str:
    """One line: tokens, rounds, speed."""
    s = statistics
    return (
        f"{s.tokens} tokens in {s.rounds} rounds ({s.tokens_per_round:.2f} per round), "
        f"{s.target_forwards} target forwards, {s.seconds:.2f} s, "
        f"{s.tokens_per_second:.1f} tokens/s"
    )
