"""The report: tables as Markdown, pictures, and one page of HTML that needs nothing else."""

from __future__ import annotations

import base64
import os
from importlib import resources
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from metasd_bandits.traces.parquet import beside
from metasd_runtime.bench.pictures import Picture, draw_all
from metasd_runtime.bench.results import Results, write_parquet
from metasd_runtime.bench.tables import Table, tables

__all__ = ["write_report"]


def write_report(results: Results) -> tuple[Path, list[Table]]:
    """Write ``results.parquet``, ``tables.md``, ``pictures/`` and ``report.html`` into the folder.

    Returns
    -------
    (Path, list of Table)
        The page and the tables.
    """
    write_parquet(results)
    made = tables(results)
    _replace(results.folder / "tables.md", "\n".join(table.markdown() for table in made))
    page = results.folder / "report.html"
    _replace(page, _html(results, made, draw_all(results)))
    return page, made


def _html(results: Results, made: list[Table], pictures: list[Picture]) -> str:
    source = resources.files("metasd_runtime.bench").joinpath("page.html.j2").read_text("utf-8")
    suite = results.suite
    return (
        Environment(autoescape=True)
        .from_string(source)
        .render(
            title=suite["title"] or suite["name"],
            suite=suite,
            machine=results.header["machine"],
            dtype=results.header["dtype"],
            answers=len(results.lines),
            finished=results.finished,
            tables=made,
            pictures=pictures,
            figure=_figure,
        )
    )


def _figure(picture: Picture) -> Markup:
    data = base64.b64encode(picture.path.read_bytes()).decode()
    return Markup(
        '<figure><img alt="{0}" src="data:image/png;base64,{1}">'
        "<figcaption>{0}</figcaption></figure>"
    ).format(picture.caption, data)


def _replace(path: Path, text: str) -> None:
    temporary = beside(path)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
