"""The house: arrows point downwards, nothing goes in circles, and the check can fail."""

import tomllib
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent
PYPROJECT = ROOT / "pyproject.toml"


def _contracts():
    return tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]


def test_every_import_points_downwards():
    assert lint_imports(config_filename=str(PYPROJECT), no_cache=True) == 0


@pytest.mark.parametrize("i", [i for i, c in enumerate(_contracts()) if c["type"] == "layers"])
def test_with_two_layers_exchanged_the_check_fails(i, tmp_path):
    contract = _contracts()[i]
    layers = contract["layers"]
    layers[0], layers[1] = layers[1], layers[0]
    lines = [
        "[importlinter]",
        "root_packages =",
        "    metasd_bandits",
        "    metasd_runtime",
        "    sim",
    ]
    lines += ["exclude_type_checking_imports = True", "[importlinter:contract:1]", "name = mutant"]
    lines += ["type = layers", "layers =", *(f"    {layer}" for layer in layers)]
    if "containers" in contract:
        lines += ["containers =", *(f"    {c}" for c in contract["containers"])]
    config = tmp_path / "mutant.ini"
    config.write_text("\n".join(lines) + "\n")
    assert lint_imports(config_filename=str(config), no_cache=True) == 1
