"""Draw the house from its imports: ``python docs/house.py`` writes docs/images/house.svg.

The layers are those that `make lint` checks (``tool.importlinter`` in pyproject.toml); the arrows
are the imports that there are.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import grimp
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "house.svg"


def layers(package: str) -> list[list[str]]:
    """The rooms of a package, the highest layer first, as pyproject.toml declares them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [c for c in settings["contracts"] if c.get("containers") == [package]]
    return [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]


def arrows(graph: grimp.ImportGraph, package: str) -> set[tuple[str, str]]:
    """(importing room, imported room), within a package."""
    rooms = [room for layer in layers(package) for room in layer]
    named = {room: f"{package}.{room}" for room in rooms}
    return {
        (a, b)
        for a in rooms
        for b in rooms
        if a != b
        and graph.direct_import_exists(importer=named[a], imported=named[b], as_packages=True)
    }


def draw(axes: Axes, graph: grimp.ImportGraph, package: str) -> None:
    """One package: its layers from the ground up, an arrow for each room that uses another."""
    place = {}
    floors = layers(package)
    for height, layer in enumerate(reversed(floors)):
        for i, room in enumerate(layer):
            x = (i + 0.5) / len(layer)
            place[room] = (x, height)
            files = len(graph.find_descendants(f"{package}.{room}")) or 1
            label = f"{room}\n{files} file" + ("s" if files > 1 else "")
            box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "0.3"}
            axes.text(x, height, label, ha="center", va="center", fontsize=8, bbox=box, zorder=3)
    for a, b in sorted(arrows(graph, package)):
        style = {"arrowstyle": "->", "color": "0.65", "shrinkA": 14, "shrinkB": 14, "lw": 0.7}
        axes.annotate("", place[b], place[a], arrowprops=style, zorder=1)
    axes.set(title=package, xlim=(0, 1), ylim=(-0.6, len(floors) - 0.4))
    axes.axis("off")


def main() -> None:
    """Write the picture; the same imports give the same bytes."""
    packages = ("metasd_bandits", "metasd_runtime")
    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=True)
    with rc_context({"svg.hashsalt": "house", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 11), layout="constrained")
        for axes, package in zip(figure.subplots(2, 1), packages, strict=True):
            draw(axes, graph, package)
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
