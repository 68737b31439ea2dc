"""`metasd report` on stored results: the numbers, the page, and the page in a browser."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.image import imread

from metasd_bandits import ConfigError
from metasd_runtime import cli
from metasd_runtime.bench.page import write_report
from metasd_runtime.bench.results import Results, read_results
from metasd_runtime.bench.tables import arm_statistics, tables

STORED = Path(__file__).parent / "stored_bench"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> Results:
    folder = tmp_path_factory.mktemp("report") / "out"
    shutil.copytree(STORED, folder)
    results = read_results(folder)
    write_report(results)
    return results


@pytest.fixture(scope="module")
def rows(reported) -> dict[str, dict[str, list[str]]]:
    """Cells of each table by its title and the row's name, as tables.md has them."""
    text = (reported.folder / "tables.md").read_text(encoding="utf-8")
    parsed = {}
    for title, body in re.findall(r"^\*\*(.+)\*\*\n\n((?:\|.*\n)+)", text, re.MULTILINE):
        cells = [[c.strip() for c in line.strip("|").split("|")] for line in body.splitlines()]
        assert len({len(row) for row in cells}) == 1
        parsed[title] = {row[0]: row[1:] for row in [cells[0], *cells[2:]]}
    return parsed


def totals(results: Results, method: str, task: str) -> tuple[float, float]:
    some = [x for x in results.lines if (x["method"], x["task"]) == (method, task)]
    return sum(x["tokens"] for x in some), sum(x["seconds"] for x in some)


def test_speed_ups_are_ratios_of_totals(reported, rows):
    table = rows["Speed-up over plain decoding"]
    assert table["method"] == ["code", "qa", "mean"]
    for method in ("generate", "prompt-lookup", "suffix", "early-exit:2", "UCB"):
        expected = []
        for task in ("code", "qa"):
            n, s = totals(reported, method, task)
            plain_n, plain_s = totals(reported, "plain", task)
            expected.append(n / s / (plain_n / plain_s))
        shown = [cell.split()[0] for cell in table[method]]
        assert shown == [f"{x:.2f}" for x in [*expected, np.mean(expected)]]
        code, qa, mean = table[method]
        assert "[" in code  # ten prompts
        assert "[" in qa  # three
        assert "[" not in mean  # of several tasks each needs four
        low, high = (float(x) for x in code.partition("[")[2].strip("]").split(","))
        assert low <= expected[0] <= high
    best = {t: max(table[m][i].split()[0] for m in SINGLES) for i, t in enumerate(("code", "qa"))}
    hindsight = table["best single, in hindsight"]
    assert [cell.split()[0] for cell in hindsight[:2]] == list(best.values())


SINGLES = ("prompt-lookup", "suffix", "early-exit:2")


def test_tables_count_what_the_traces_hold(reported, rows):
    pulls: dict[str, int] = defaultdict(int)
    drafted, reached, accepted = (defaultdict(int) for _ in range(3))
    for slug, trace in reported.traces.items():
        for r in trace:
            name = trace.header.arms[r.arm]
            if slug.startswith("UCB"):
                pulls[name] += 1
            for j in range(r.drafted):
                drafted[name, j] += 1
                reached[name, j] += r.accepted >= j
                accepted[name, j] += r.accepted > j
    shares = rows["Shares of rounds, %"]
    for name, share in zip(shares["method"], shares["UCB"], strict=True):
        assert float(share) == pytest.approx(100 * pulls[name] / sum(pulls.values()), abs=0.51)
    positions = rows["Acceptance by position in the block, among rounds that came that far"]
    for name in SINGLES:
        for j, cell in enumerate(positions[name]):
            if reached[name, j]:
                assert float(cell) == pytest.approx(
                    accepted[name, j] / reached[name, j], abs=0.0051
                )
    assert sum(s.pulls for s in arm_statistics(reported, reported.lines).values()) == sum(
        len(trace) for trace in reported.traces.values()
    )


def test_the_parts_of_the_time_are_all_of_it(reported, rows):
    [table] = [cells for title, cells in rows.items() if title.startswith("Where the time goes")]
    for method in ("plain", "UCB"):
        some = [x for x in reported.lines if x["method"] == method]
        whole = 1e3 * sum(x["seconds"] for x in some) / sum(x["tokens"] for x in some)
        parts = [float(cell) for cell in table[method][:-1]]
        assert 0.7 * whole < sum(parts) <= whole + 0.01  # the rest is settling the call's arguments


def test_parquet_holds_the_lines(reported):
    table = pq.read_table(reported.folder / "results.parquet").to_pylist()
    assert len(table) == len(reported.lines)
    for row, line in zip(table, reported.lines, strict=True):
        assert row == {name: line[name] for name in row}
        assert {"task", "method", "tokens", "seconds", "seed"} <= row.keys()


def test_pictures_are_pictures(reported):
    names = {path.stem for path in (reported.folder / "pictures").iterdir()}
    expected = {"speed", "drafters", "time", "acceptance", "shares-0", "best-arm"}
    assert names == expected
    for name in names:
        pixels = imread(reported.folder / "pictures" / f"{name}.png")
        assert min(pixels.shape[:2]) > 200
        assert len(np.unique(pixels[..., :3].reshape(-1, 3), axis=0)) > 20


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_needs_nothing_else(reported):
    text = (reported.folder / "report.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    sources = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href")]
    assert len(sources) == 6
    assert all(source and source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"url\(|@import|<script", text)
    assert ("viewport", "width=device-width, initial-scale=1") in [
        (attrs.get("name"), attrs.get("content")) for _, attrs in page.tags
    ]
    assert all(attrs.get("alt") for tag, attrs in page.tags if tag == "img")
    assert "A stored run &amp; its &lt;report&gt;" in text
    assert "prefers-color-scheme: dark" in text
    for table in tables(reported):
        assert html.escape(table.title, quote=True).replace("&#x27;", "&#39;") in text


@pytest.mark.skipif(not BROWSER, reason="no Chromium here (apt-get install chromium)")
@pytest.mark.parametrize("width", [360, 1280])
def test_in_a_browser_the_page_never_scrolls_sideways(reported, tmp_path, width):
    page = (reported.folder / "report.html").read_text(encoding="utf-8")
    look = f"width:{width}px; height:800px; border:0"
    frame = f'<iframe id="f" style="{look}" srcdoc="{html.escape(page)}">'
    measure = """</iframe><p id="said"></p><script>
    const f = document.getElementById("f");
    f.onload = () => {
      const d = f.contentDocument, images = [...d.images];
      document.getElementById("said").textContent = JSON.stringify([
        d.documentElement.scrollWidth, images.filter(i => i.naturalWidth > 0).length,
        d.querySelectorAll("table").length,
        Math.max(...[...d.querySelectorAll("figure, .scroll")].map(e => e.offsetWidth))]);
    };</script>"""
    outer = tmp_path / "outer.html"
    outer.write_text(f"<!doctype html><meta charset=utf-8>{frame}{measure}", encoding="utf-8")
    dumped = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=10000", "--dump-dom", outer.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    said = re.search(r'<p id="said">\[(.*?)\]</p>', dumped.stdout)
    assert said, dumped.stderr[-2000:]
    scroll_width, images, n_tables, widest = (int(x) for x in said[1].split(","))
    assert scroll_width <= width
    assert images == 6
    assert n_tables == len(tables(reported))
    assert widest <= width


def test_the_command_reports_and_refuses(reported, monkeypatch, capsys, tmp_path):
    for folder, code, says in (
        (reported.folder, 0, "report.html"),
        (tmp_path, 2, "holds no results.jsonl"),
    ):
        monkeypatch.setattr("sys.argv", ["metasd", "report", str(folder)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert int(exit_.value.code or 0) == code
        captured = capsys.readouterr()
        assert says in (captured.out + captured.err).replace("\n", "")


def test_results_that_are_none_are_refused(tmp_path):
    stored = (STORED / "results.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "results.jsonl"
    path.write_text(stored[0].replace('"version":1', '"version":99'))
    with pytest.raises(ConfigError, match="version 1"):
        read_results(tmp_path)
    path.write_text(stored[0])
    with pytest.raises(ConfigError, match="no answer yet"):
        read_results(tmp_path)
    path.write_text("".join(stored[:3]) + stored[3][:50])
    some = read_results(tmp_path)
    assert len(some.lines) == 2
    assert not some.finished
