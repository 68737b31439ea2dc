"""``metasd models``: which models are here, where they lie, fetching and removing them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from metasd_runtime.model import smollm2, store
from metasd_runtime.model.store import ModelError

__all__ = ["app"]

app = typer.Typer(help="List, fetch, locate and remove target models.", no_args_is_help=True)

WEIGHTS_AND_TEXT = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
Name = Annotated[str, typer.Argument(help="smollm2-135m, or a Hugging Face model id.")]


@app.command("list")
def list_models() -> None:
    """Show the embedded target and the models in the Hugging Face cache."""
    table = Table("model", "state", "size", "where")
    table.add_row(smollm2.NAME, *_embedded())
    for repo in _hub_models():
        table.add_row(repo.repo_id, "cached", _size(repo.size_on_disk), str(repo.repo_path))
    Console().print(table)


@app.command()
def fetch(
    name: Name = smollm2.NAME,
    again: Annotated[bool, typer.Option(help="Fetch even what is here.")] = False,
) -> None:
    """Download a model, so that everything after works without a network."""
    with _errors():
        if name == smollm2.NAME:
            with Console(stderr=True).status("fetching") as status:
                stored = smollm2.fetch(again=again, say=status.update)
                store.verify(stored)
            typer.echo(stored.path)
        else:
            typer.echo(_hub_folder(name, local=False, again=again))


@app.command()
def path(name: Name = smollm2.NAME) -> None:
    """Print the folder that holds a fetched model."""
    with _errors():
        if name != smollm2.NAME:
            typer.echo(_hub_folder(name, local=True))
        elif stored := store.find(name):
            typer.echo(stored.path)
        else:
            raise ModelError(f"{name} is not here; fetch it with: metasd models fetch {name}")


@app.command()
def remove(name: Name) -> None:
    """Delete a fetched model from the disk."""
    with _errors():
        if name == smollm2.NAME:
            removed = store.remove(name)
        else:
            found = [repo for repo in _hub_models() if repo.repo_id == name]
            for repo in found:
                shutil.rmtree(repo.repo_path)
            removed = bool(found)
        if not removed:
            raise ModelError(f"{name} is not here; see: metasd models list")
        typer.echo(f"removed {name}")


def _embedded() -> tuple[str, str, str]:
    where = str(store.folder(smollm2.NAME))
    try:
        stored = store.find(smollm2.NAME)
    except ModelError:
        return "damaged", "", where
    return ("fetched", _size(stored.size), where) if stored else ("not fetched", "", where)


def _hub_models() -> list[Any]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((r for r in repos if r.repo_type == "model"), key=lambda r: r.repo_id)


def _hub_folder(name: str, *, local: bool, again: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            local_files_only=local,
            force_download=again,
            allow_patterns=WEIGHTS_AND_TEXT,
        )
    except Exception as error:  # the hub's client raises dozens of kinds, all say "no model"
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        action = "is not in the Hugging Face cache" if local else "could not be fetched"
        raise ModelError(f"{name} {action}: {first} ({smollm2.hint(name)})") from error
    return Path(folder)


def _size(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
