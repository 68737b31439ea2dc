"""What is to be trained: POOL.toml, read and checked before anything is computed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metasd_bandits import checks
from metasd_runtime.toml import read_toml

__all__ = [
    "KINDS",
    "RATES",
    "DataConfig",
    "HeadConfig",
    "LanguageModelConfig",
    "PoolConfig",
    "TrainingConfig",
    "read_config",
]

KINDS = ("eagle", "medusa", "bpd", "r-medusa", "r-bpd", "language-model")
"""Kinds of drafters that can be trained; those with r- rescore the heads of the same name."""

RATES = {"eagle": 2e-4, "medusa": 3e-3, "bpd": 3e-4, "language-model": 2e-4}
"""Learning rates that worked: small for what begins well, larger for what begins as nothing."""


@dataclass(frozen=True)
class DataConfig:
    """How the target answers the prompts.

    Attributes
    ----------
    tokens : int
        Answer tokens to train on, of each domain.
    held_out : int
        Prompts at the end of each domain's file that are kept for evaluation.
    batch : int
        Prompts answered side by side.
    max_prompt_tokens, max_new_tokens : int
        Longer prompts are left out; longer answers are cut.
    """

    tokens: int = 60_000
    held_out: int = 32
    batch: int = 128
    max_prompt_tokens: int = 640
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            checks.integer(f"data.{name}", value, 1)


@dataclass(frozen=True)
class HeadConfig:
    """The heads on the target's hidden states.

    Attributes
    ----------
    layers : tuple of int
        Hidden states that EAGLE fuses, by the layers behind them; empty means a third, two thirds
        and all.
    vocabulary : int
        Kinds of tokens that can be drafted, the most frequent in the answers.
    positions : int
        Heads of Medusa and BPD: the most tokens that they draft.
    """

    layers: tuple[int, ...] = ()
    vocabulary: int = 6144
    positions: int = 5

    def __post_init__(self) -> None:
        checks.integer("head.vocabulary", self.vocabulary, 1)
        checks.integer("head.positions", self.positions, 1)


@dataclass(frozen=True)
class LanguageModelConfig:
    """The small language models.

    Attributes
    ----------
    depth : int
        Layers.
    width : int or None
        A multiple of 64 below the target's width; the target's width if left out.
    """

    depth: int = 2
    width: int | None = None

    def __post_init__(self) -> None:
        checks.integer("language_model.depth", self.depth, 1)


@dataclass(frozen=True)
class TrainingConfig:
    """The budgets.

    Attributes
    ----------
    shared_tokens : int
        Answer tokens, of all domains by turns, that one head is shown before it is copied for
        every domain and for all (the one-size-fits-all head).
    tokens : int
        Answer tokens that each copy is shown after that, from its own domain or from all.
    rate : float or None
        Learning rate at its peak; each kind's own, `RATES`, if left out.
    batch_tokens, depths
        As in `metasd_runtime.training.learn.Learning`; the depths are EAGLE's.
    specialists : bool
        Whether every domain gets a copy; otherwise there is the one for all alone.
    """

    shared_tokens: int = 300_000
    tokens: int = 100_000
    batch_tokens: int = 512
    rate: float | None = None
    depths: int = 4
    specialists: bool = True

    def __post_init__(self) -> None:
        for name in ("shared_tokens", "tokens", "batch_tokens", "depths"):
            checks.integer(f"training.{name}", getattr(self, name), 1)
        if self.rate is not None:
            checks.number("training.rate", self.rate, 0.0, 1.0, open_low=True)
        if not isinstance(self.specialists, bool):
            raise checks.ConfigError(
                f"training.specialists={self.specialists!r} must be true or false"
            )


@dataclass(frozen=True)
class PoolConfig:
    """A whole POOL.toml.

    Attributes
    ----------
    target : str
        As `metasd_runtime.model.load.load_target` takes it.
    domains : dict of str to str
        Name and source of prompts: a JSON Lines file or a Hugging Face dataset id.
    seed : int
    kinds : tuple of str
        Kinds of drafters, of `KINDS`; each is trained for every domain and for all.
    """

    target: str
    domains: dict[str, str]
    seed: int = 0
    kinds: tuple[str, ...] = ("eagle",)
    data: DataConfig = field(default_factory=DataConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    language_model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        checks.integer("seed", self.seed, 0)
        _check_kinds(self.kinds)
        if not self.domains:
            raise checks.ConfigError(
                "there are no domains; name at least one: [domains] math = 'math.jsonl'"
            )
        for name in self.domains:
            if not name.replace("-", "").replace("_", "").isalnum() or name == "ofa":
                raise checks.ConfigError(
                    f"domain {name!r} cannot be a name; use letters, digits, - and _ (not ofa)"
                )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for the manifest."""
        return dataclasses.asdict(self)


def _check_kinds(kinds: tuple[str, ...]) -> None:
    if not kinds or len(set(kinds)) < len(kinds):
        raise checks.ConfigError(
            f"kinds={list(kinds)} must name kinds of drafters, each once; there are "
            f"{', '.join(KINDS)}"
        )
    for kind in kinds:
        heads = checks.choice("kind of drafter", kind, KINDS).removeprefix("r-")
        if heads not in kinds:
            raise checks.ConfigError(
                f"kind {kind!r} rescores the heads of {heads!r}, which is not among the kinds; "
                "add it"
            )


def read_config(path: Path) -> PoolConfig:
    """Read POOL.toml; files of prompts are sought beside it.

    Raises
    ------
    ConfigError
        If it is not there, is no TOML, or holds a name or value that cannot work.
    """
    raw = read_toml(path)
    sections = {
        "data": DataConfig,
        "head": HeadConfig,
        "language_model": LanguageModelConfig,
        "training": TrainingConfig,
    }
    given = dict(raw)
    for name, kind in sections.items():
        given[name] = _section(name, kind, given.get(name, {}))
    domains = given.get("domains", {})
    if not isinstance(domains, dict) or not all(isinstance(v, str) for v in domains.values()):
        raise checks.ConfigError(
            "domains must be a table of names and sources, code = 'code.jsonl'"
        )
    given["domains"] = {name: _beside(path, source) for name, source in domains.items()}
    given.setdefault("target", "smollm2-135m")
    given["kinds"] = _kinds(given.get("kinds", ["eagle"]))
    known = [f.name for f in dataclasses.fields(PoolConfig)]
    for name in given:
        checks.choice("setting", name, known)
    return PoolConfig(**given)


def _kinds(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(kind, str) for kind in given):
        raise checks.ConfigError(f"kinds={given!r} must be a list of names, kinds = ['eagle']")
    return tuple(given)


def _section(name: str, kind: type, values: Any) -> Any:
    if not isinstance(values, dict):
        raise checks.ConfigError(f"{name}={values!r} must be a table, [{name}]")
    known = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        checks.choice(f"setting of [{name}]", key, known)
    if "layers" in values:
        values = {**values, "layers": tuple(values["layers"])}
    return kind(**values)


def _beside(config: Path, source: str) -> str:
    beside = config.parent / Path(source).expanduser()
    return str(beside) if beside.is_file() else source
