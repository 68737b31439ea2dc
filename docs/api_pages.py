"""Write the API's pages: one for each module, with what its ``__all__`` names and it defines."""

import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

PACKAGES = ("metasd_bandits", "metasd_runtime", "sim")
FOLDER = Path(__file__).parent / "api" / "generated"


def write(app: object = None) -> None:
    """Bring the folder up to date; unchanged pages keep their date, so that builds stay quick."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    pages = {f"{name}.rst": page(module) for name, module in modules()}
    for stale in FOLDER.glob("*.rst"):
        if stale.name not in pages:
            stale.unlink()
    for name, text in pages.items():
        file = FOLDER / name
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def modules():
    """Every module that says what is public in it."""
    for package in PACKAGES:
        root = importlib.import_module(package)
        names = [package] + [m.name for m in pkgutil.walk_packages(root.__path__, f"{package}.")]
        for name in names:
            if name.endswith("__main__"):
                continue
            module = importlib.import_module(name)
            if hasattr(module, "__all__"):
                yield name, module


def page(module: ModuleType) -> str:
    """The module's docstring, and its own public functions and classes."""
    name = module.__name__
    lines = [name, "=" * len(name), "", f".. automodule:: {name}", ""]
    for attribute in module.__all__:
        thing = getattr(module, attribute)
        if getattr(thing, "__module__", None) == name:
            lines += [*entry(f"{name}.{attribute}", thing), ""]
    return "\n".join(lines)


def entry(name: str, thing: object) -> list[str]:
    """How autodoc is told about one function or class."""
    if inspect.isclass(thing):
        kind = "autoexception" if issubclass(thing, BaseException) else "autoclass"
        options = ["   :members:"]
        if fields := getattr(thing, "_fields", None):  # a NamedTuple's are in its docstring
            options.append(f"   :exclude-members: {', '.join(fields)}")
        return [f".. {kind}:: {name}", *options]
    if callable(thing):
        return [f".. autofunction:: {name}"]
    return []
