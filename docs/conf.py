"""Sphinx: MyST pages, and the API from the docstrings."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import api_pages  # noqa: E402

project = "MetaSD"
author = "the MetaSD developers"
copyright = "the MetaSD developers"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
version = release

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"MetaSD {release}"

default_role = "py:obj"
autodoc_typehints = "none"  # numpydoc's parameter lists say the types
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
# Pages are tested by Sphinx where they say so; docstrings are tested by pytest.
doctest_test_doctest_blocks = ""


def setup(app):
    app.connect("builder-inited", api_pages.write)
