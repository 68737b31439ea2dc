"""What every command line of the project does with errors and warnings."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from metasd_bandits.checks import ConfigError
from metasd_bandits.intervals import ReplayError
from metasd_bandits.plugins import load_file
from metasd_bandits.traces.jsonl import TraceError

__all__ = ["Plugins", "fail", "load_files", "plainly"]

Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin", metavar="FILE", help="A Python file that registers parts; repeatable."
    ),
]


def plainly(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors are one sentence with exit status 2, its warnings one line each.

    Caught are the errors that a user can mend (`ConfigError`, `TraceError`, `ReplayError`, files
    that cannot be read or written); any other one is a fault of ours and keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = lambda message, *_: typer.echo(f"warning: {message}", err=True)
            try:
                command(*args, **kwargs)
            except (ConfigError, TraceError, ReplayError) as error:
                fail(str(error))
            except FileNotFoundError as error:
                fail(f"{error.filename}: there is no such file or folder")
            except OSError as error:
                fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))

    return run


def load_files(plugin: Plugins = None) -> None:
    """What every command line does before its command: run the user's files."""
    for file in plugin or []:
        load_file(file)


def fail(message: str) -> NoReturn:
    """End the command with status 2 and the message as its only line of error output."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)
