"""What is to be measured: a suite, read from TOML and checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from metasd_bandits import checks, make_policy, make_reward
from metasd_runtime.bench.peer_process import ENGINES as PEERS
from metasd_runtime.decoding.learned_router import LearnedRouter
from metasd_runtime.drafters.auto import is_auto
from metasd_runtime.drafters.registry import DRAFTERS
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.load import DTYPES
from metasd_runtime.toml import read_toml

__all__ = [
    "OWN_PROMPTS",
    "PEERS",
    "PLAIN",
    "Method",
    "Suite",
    "Task",
    "find_suite",
    "read_suite",
    "shipped_suites",
]

OWN_PROMPTS = "own"
PLAIN = "plain"
_FOLDER = Path(__file__).parent / "suites"
_ENGINES = ("metasd", "transformers", *PEERS)
_MODES = ("homogeneous", "heterogeneous")


@dataclass(frozen=True)
class Task:
    """Prompts of one kind.

    Attributes
    ----------
    name : str
    prompts : tuple of str
        Where they come from: a JSON Lines file, beside the suite or in the data folder, behind
        ``#`` the category to take; a Hugging Face dataset id; or ``own``, the five that come with
        the package. Several sources are joined, prompt by prompt, by the template.
    cut : str
        A beginning that is taken off each text (an instruction, to be worded anew).
    gather : int
        Texts that are joined into one, for long prompts.
    templates : tuple of str
        Taken in turn; ``{0}`` stands for the text of the first source, ``{1}`` of the second.
    """

    name: str
    prompts: tuple[str, ...]
    cut: str = ""
    gather: int = 1
    templates: tuple[str, ...] = ("{0}",)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise checks.ConfigError(f"task {self.name!r} has no prompts; name a file of them")
        checks.integer(f"gather of task {self.name!r}", self.gather, 1)
        for template in self.templates:
            for i in range(len(self.prompts)):
                if f"{{{i}}}" not in template:
                    raise checks.ConfigError(
                        f"template {template!r} of task {self.name!r} has no {{{i}}}, the place "
                        f"of the text from {self.prompts[i]!r}; add it"
                    )


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes
    ----------
    name : str
        Stands in the tables.
    engine : {"metasd", "transformers", "economize", "flashspec"}
        Ours, the library's own `generate`, or prompt lookup of another package, which runs in an
        environment of its own (`metasd_runtime.bench.peers`).
    drafters : tuple of str
        The pool, as `metasd_runtime.drafters.registry.make_pool` reads it; the suite's where it is empty.
    policy : str
        As `metasd_bandits.make_policy` reads it, ``learned-router:PATH``, or ``auto``.
    each : bool
        Not one method but one for each drafter of the pool, alone, under the drafter's name.
    only : str
        One drafter of the pool, alone, by its name.
    needs : str
        A trained pool, a folder beside the data; without it the method is left out with a word.
    mode : {"homogeneous", "heterogeneous"}
        How the rows of a batch are decoded.
    options : dict
        Whatever else `MetaSD` takes (reward, scope, draft_all, a draft_length of its own, ...),
        or with the library's engine, `generate`. The other packages take none.
    """

    name: str
    engine: str = "metasd"
    drafters: tuple[str, ...] = ()
    policy: str = "ucb"
    each: bool = False
    only: str = ""
    needs: str = ""
    mode: str = "homogeneous"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.choice(f"engine of method {self.name!r}", self.engine, _ENGINES)
        checks.choice(f"mode of method {self.name!r}", self.mode, _MODES)
        _check_drafters(self.drafters)
        if self.engine in PEERS and self.options:
            raise checks.ConfigError(
                f"method {self.name!r} has the setting {next(iter(self.options))!r}, but "
                f"{self.engine} takes none: it drafts 5 tokens with prompt lookup; remove it"
            )
        known = _metasd_options() if self.engine == "metasd" else _generate_options()
        for option in self.options:
            checks.choice(f"setting of method {self.name!r}", option, known)
        if not (self.policy.startswith(LearnedRouter.name) or is_auto(self.policy)):
            make_policy(self.policy)
        make_reward(self.options.get("reward", "throughput"))
        checks.choice("scope", self.options.get("scope", "query"), ("query", "carried"))

    @property
    def drafts(self) -> bool:
        """Whether the suite's draft lengths mean anything to it."""
        drafts = self.engine == "metasd" and self.drafters != ("none",)
        return drafts and "draft_length" not in self.options


@dataclass(frozen=True)
class Suite:
    """A whole suite.

    Every prompt is decoded by every method at every temperature, seed, batch size and draft
    length. Plain decoding, the measure of all speed-ups, always takes part.

    Attributes
    ----------
    name, title : str
        For people; the name is also the output folder's.
    data : str
        Where the data is to be had, for whoever does not have it.
    target, dtype : str
        As `metasd_runtime.model.load.load_target` takes them.
    drafters : tuple of str
        The pool.
    draft_lengths, batches, temperatures, seeds : tuples of numbers
    prompts_per_task, max_new_tokens : int
    warm_up : int
        Tokens that each method decodes before the clock runs.
    compiled : bool
        Compile the target's forward (`metasd_runtime.model.compiled`), for plain decoding as for all of
        ours, and the EAGLE heads' steps; the library's methods and other packages stay as they are.
    shuffle : bool
        One shuffled stream of all tasks, instead of tasks in turn.
    halves : bool
        Tell speeds also of the first and the second half of each task's prompts: one that was
        looked at while something was tuned, and one that was not.
    tasks, methods : tuples
    """

    name: str
    tasks: tuple[Task, ...]
    methods: tuple[Method, ...]
    title: str = ""
    data: str = ""
    target: str = "smollm2-135m"
    dtype: str = "auto"
    drafters: tuple[str, ...] = ("pool:smollm2-135m", "prompt-lookup", "none")
    draft_lengths: tuple[int, ...] = (5,)
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    seeds: tuple[int, ...] = (0,)
    prompts_per_task: int = 10
    max_new_tokens: int = 128
    warm_up: int = 8
    compiled: bool = False
    shuffle: bool = False
    halves: bool = False

    def __post_init__(self) -> None:
        checks.choice("dtype", self.dtype, [*DTYPES, "auto"])
        _check_drafters(self.drafters)
        for name, low in (("draft_lengths", 1), ("batches", 1), ("seeds", 0)):
            values = getattr(self, name)
            for value in values:
                checks.integer(f"a value of {name}", value, low)
            _check_different(name, values)
        for value in self.temperatures:
            checks.number("a value of temperatures", value, 0.0)
        _check_different("temperatures", self.temperatures)
        for name in ("prompts_per_task", "max_new_tokens", "warm_up"):
            checks.integer(name, getattr(self, name), 1)
        _check_different("tasks", [task.name for task in self.tasks])
        _check_different("methods", [PLAIN, *(method.name for method in self.methods)])

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for the results' header."""
        return dataclasses.asdict(self)

    @property
    def everybody(self) -> tuple[Method, ...]:
        """The methods, plain decoding first."""
        return (Method(PLAIN, drafters=("none",), policy="fixed"), *self.methods)


def shipped_suites() -> dict[str, Path]:
    """The suites that come with the package, by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def find_suite(name_or_path: str) -> Path:
    """The file of a shipped suite by its name; a name that ends in .toml is a path.

    Raises
    ------
    ConfigError
        If no suite of that name is shipped.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix == ".toml":
        return path
    shipped = shipped_suites()
    return shipped[checks.choice("suite", name_or_path, shipped)]


def read_suite(path: Path, **changes: Any) -> Suite:
    """Read and check a suite.

    Parameters
    ----------
    path : Path
    **changes
        Settings of `Suite` to put in place of the file's; None leaves them.

    Raises
    ------
    ConfigError
        If it is not there, is no TOML, or holds a name or value that cannot work.
    """
    raw = read_toml(path, f"; shipped suites are {', '.join(shipped_suites())}")
    try:
        given = {"name": path.stem, **raw, "tasks": _tasks(raw), "methods": _methods(raw)}
        given.pop("task", None)
        given.pop("method", None)
        given |= {name: value for name, value in changes.items() if value is not None}
        return Suite(**_checked(Suite, given, "setting"))
    except checks.ConfigError as error:
        raise checks.ConfigError(f"{path}: {error}") from None


def _tasks(raw: Mapping[str, Any]) -> tuple[Task, ...]:
    tables = _tables(raw, "task")
    return tuple(Task(**_checked(Task, t, f"setting of task {t['name']!r}")) for t in tables)


def _methods(raw: Mapping[str, Any]) -> tuple[Method, ...]:
    known = {f.name for f in dataclasses.fields(Method)} - {"options"}
    methods = []
    for table in _tables(raw, "method"):
        options = {key: value for key, value in table.items() if key not in known}
        own = {key: value for key, value in table.items() if key in known}
        methods.append(
            Method(**_checked(Method, own, f"setting of {table['name']!r}"), options=options)
        )
    return tuple(methods)


def _tables(raw: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    tables = raw.get(kind, [])
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise checks.ConfigError(f"there is no {kind}; name at least one with [[{kind}]]")
    for table in tables:
        if not isinstance(table.get("name"), str) or not table["name"]:
            raise checks.ConfigError(f'a [[{kind}]] has no name; add one: name = "..."')
    return tables


def _checked(kind: type, given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Values of a dataclass by its fields' names; lists become tuples, single values too."""
    fields = {f.name: str(f.type) for f in dataclasses.fields(kind)}
    values = {}
    for name, value in given.items():
        type_ = fields[checks.choice(what, name, fields)]
        if type_.startswith("tuple"):
            value = tuple(value) if isinstance(value, list | tuple) else (value,)
            if type_ == "tuple[str, ...]" and not all(isinstance(v, str) for v in value):
                raise checks.ConfigError(f"{name}={list(value)!r} must hold texts only")
        elif type_ in ("str", "bool") and type(value).__name__ != type_:
            kinds = {"str": 'a text, in "quotes"', "bool": "true or false"}
            raise checks.ConfigError(f"{name}={value!r} is not {kinds[type_]}")
        values[name] = value
    return values


def _check_drafters(drafters: tuple[str, ...]) -> None:
    for drafter in drafters:
        checks.choice("drafter", drafter.partition(":")[0], [*DRAFTERS, "pool"])


def _check_different(name: str, values: Any) -> None:
    if not values:
        raise checks.ConfigError(f"{name} is empty; give at least one")
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise checks.ConfigError(f"{name} names {twice[0]!r} twice; they must differ")


def _metasd_options() -> set[str]:
    own = {"self", "target", "tokenizer", "drafters", "policy", "compiled"}
    return set(inspect.signature(MetaSD.__init__).parameters) - own


def _generate_options() -> set[str]:
    return {name for name in vars(GenerationConfig()) if name[0] != "_"} | {"assistant_model"}
