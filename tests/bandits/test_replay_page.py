"""Every command of docs/replay.md gives what the page shows.

``python tests/bandits/test_replay_page.py`` writes the page's outputs and pictures anew.
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "replay.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def output(command):
    """Standard output and error of one command, run in this process."""
    import typer

    from metasd_bandits.replay import cli
    from metasd_bandits.traces import synthetic

    words = shlex.split(command)
    if words[:3] == ["python", "-m", "metasd_bandits.traces.synthetic"]:
        app = typer.Typer(add_completion=False)
        app.command()(synthetic._command)
        result = CliRunner().invoke(app, words[3:])
    else:
        assert words[0] == "metasd-replay"
        result = CliRunner().invoke(cli.app, words[1:])
    lines = result.output.splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def filled(page):
    """The page with the output of every command below it."""

    def fill(block):
        commands = [line for line in block[1].splitlines() if line.startswith("$ ")]
        parts = (f"{command}\n{output(command[2:])}" for command in commands)
        return "```console\n" + "".join(parts) + "```"

    return BLOCK.sub(fill, page)


@pytest.mark.slow
def test_the_page_shows_what_its_commands_print(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert filled(PAGE.read_text()) == PAGE.read_text()


@pytest.mark.slow
def test_the_python_on_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = re.search(r"\$ (python -m metasd_bandits.traces.synthetic demo.*)", PAGE.read_text())
    output(first[1])
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code[1], {})
    assert "rounds to 50 tokens: " in capsys.readouterr().out


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    PAGE.write_text(filled(PAGE.read_text()))
    for name in ("regret", "shares", "coverage"):
        shutil.copy(f"{name}.png", ROOT / "docs" / "images" / f"replay-{name}.png")
