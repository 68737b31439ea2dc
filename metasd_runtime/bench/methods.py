"""What decodes: the suite's methods over one target, ours and others', behind one call."""

from __future__ import annotations

import functools
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from metasd_bandits import Round, TraceHeader, checks
from metasd_runtime.bench.peers import Peers, RefusedError
from metasd_runtime.bench.suite import PEERS, PLAIN, Method, Suite
from metasd_runtime.decoding.drafter import Drafter
from metasd_runtime.decoding.learned_router import LearnedRouter
from metasd_runtime.decoding.router import Router
from metasd_runtime.drafters.auto import merged_of
from metasd_runtime.drafters.eagle.compiled import compile_steps
from metasd_runtime.drafters.pool import MANIFEST
from metasd_runtime.drafters.registry import make_drafter, make_pool
from metasd_runtime.generation.output import Output
from metasd_runtime.generation.statistics import Statistics
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.compiled import compile_forward
from metasd_runtime.model.hf import end_tokens
from metasd_runtime.model.load import LoadedModel, load_target, log
from metasd_runtime.model.target import Target

__all__ = ["Answer", "Contender", "Setting", "contenders"]

Kind = Literal["plain", "single", "metasd", "transformers", "peer"]


class Setting(NamedTuple):
    """How a prompt is decoded, whoever does it; the draft length is None where nothing drafts."""

    temperature: float
    seed: int
    batch: int
    draft_length: int | None


@dataclass(frozen=True)
class Answer:
    """What a contender made of a batch of prompts.

    Attributes
    ----------
    outputs : list of lists of int
        Emitted tokens of each prompt, an end of sequence included.
    seconds : float
        Wall time of the call.
    statistics : Statistics, optional
        Of a single prompt; the library's methods, other packages and batches tell none.
    rounds : list of Round
    """

    outputs: list[list[int]]
    seconds: float
    statistics: Statistics | None = None
    rounds: tuple[Round, ...] = ()


class Contender(ABC):
    """One method under one setting, with whatever it carries from prompt to prompt.

    Attributes
    ----------
    method : str
    kind : {"plain", "single", "metasd", "transformers", "peer"}
    setting : Setting
    slug : str
        A name for files.
    """

    def __init__(self, method: str, kind: Kind, setting: Setting, max_new_tokens: int) -> None:
        self.method, self.kind, self.setting = method, kind, setting
        parts = [method, f"T{setting.temperature:g}", f"s{setting.seed}", f"b{setting.batch}"]
        parts += [] if setting.draft_length is None else [f"N{setting.draft_length}"]
        self.slug = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(parts)).strip("-")
        self._settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        if setting.temperature > 0:
            sampled = {"do_sample": True, "temperature": setting.temperature}
            self._settings |= sampled | {"top_k": 0, "top_p": 1.0}

    @abstractmethod
    def warm_up(self, prompt: list[int], tokens: int) -> None:
        """Decode something that does not count.

        Raises
        ------
        RefusedError
            If it cannot do what the setting asks for.
        """

    @abstractmethod
    def decode(self, prompts: Sequence[list[int]], names: Sequence[str], seed: int) -> Answer:
        """Decode the prompts, together where the setting's batch says so.

        Raises
        ------
        RefusedError
            If it cannot go on.
        """

    @property
    def header(self) -> TraceHeader | None:
        """Of the contender's trace, where it leaves one."""
        return None

    def state(self) -> dict[str, Any] | None:
        """What it carries, as JSON takes it; None where it carries nothing."""
        return None

    def resume(self, answered: Sequence[tuple[list[int], list[int]]], state: Any) -> None:
        """Take up where an earlier run stopped: prompts and outputs so far, and the state then."""
        return


class Ours(Contender):
    """MetaSD, plain decoding and single drafters among it."""

    def __init__(
        self,
        method: Method,
        kind: Kind,
        setting: Setting,
        suite: Suite,
        shop: _Shop,
        drafters: Sequence[str | Drafter],
    ) -> None:
        super().__init__(method.name, kind, setting, suite.max_new_tokens)
        self.metasd = MetaSD(
            shop.target,
            shop.target.tokenizer,
            drafters=drafters,
            policy=shop.policy(method.policy),
            **{"draft_length": setting.draft_length or 1, **method.options},
        )
        self._policy: str = method.policy
        self._mode: Any = method.mode

    def warm_up(self, prompt: list[int], tokens: int) -> None:
        self._decode([prompt], ["warm-up"], 0, {**self._settings, "max_new_tokens": tokens})
        router = self.metasd.router
        if router.carries:
            router.policy.reset(router.n_competing, self.setting.seed)

    def decode(self, prompts: Sequence[list[int]], names: Sequence[str], seed: int) -> Answer:
        return self._decode(prompts, names, seed, self._settings)

    def _decode(
        self, prompts: Sequence[list[int]], names: Sequence[str], seed: int, settings: Any
    ) -> Answer:
        if self.setting.batch == 1:
            begin = time.perf_counter()
            output = self.metasd.generate(
                prompts[0], seed=seed, query=names[0], return_dict_in_generate=True, **settings
            )
            seconds = time.perf_counter() - begin
            assert isinstance(output, Output)
            return Answer([output.new_tokens], seconds, output.statistics, tuple(output.trace))
        rows = [{"input_ids": p, "query": n} for p, n in zip(prompts, names, strict=True)]
        begin = time.perf_counter()
        outputs = list(
            self.metasd.generate_many(
                rows, max_batch=self.setting.batch, mode=self._mode, seed=seed, **settings
            )
        )
        seconds = time.perf_counter() - begin
        rounds = tuple(round_ for output in outputs for round_ in output.trace)
        return Answer([output.new_tokens for output in outputs], seconds, rounds=rounds)

    @property
    def header(self) -> TraceHeader | None:
        router = self.metasd.router
        if self.kind == "plain":
            return None
        meta = {"method": self.method, **self.setting._asdict(), "scope": router.scope}
        if merged := merged_of(router):
            meta["proposers"] = list(merged.proposers)
        return TraceHeader(router.arms, router.draft_length, self._policy, router.reward_name, meta)

    def state(self) -> dict[str, Any] | None:
        router = self.metasd.router
        if merged := merged_of(router):
            return merged.learned.state_dict()
        return router.policy.state_dict() if router.carries else None

    def resume(self, answered: Sequence[tuple[list[int], list[int]]], state: Any) -> None:
        router = self.metasd.router
        for prompt, output in answered:
            for drafter in router.bases:
                drafter.start(prompt)
                drafter.commit([*prompt, *output])
        if state is not None and (merged := merged_of(router)):
            merged.learned.load_state_dict(state)
        elif state is not None:
            router.policy.load_state_dict(state)


class Theirs(Contender):
    """The library's own `generate`, plain, assisted or with prompt lookup."""

    def __init__(self, method: Method, setting: Setting, suite: Suite, shop: _Shop) -> None:
        super().__init__(method.name, "transformers", setting, suite.max_new_tokens)
        self._target = shop.target
        self._options = dict(method.options)
        if assistant := self._options.get("assistant_model"):
            self._options["assistant_model"] = shop.assistant(assistant)

    def warm_up(self, prompt: list[int], tokens: int) -> None:
        self._decode([prompt], 0, {**self._settings, "max_new_tokens": tokens})

    def decode(self, prompts: Sequence[list[int]], names: Sequence[str], seed: int) -> Answer:
        return self._decode(prompts, seed, self._settings)

    def _decode(self, prompts: Sequence[list[int]], seed: int, settings: Any) -> Answer:
        model: Any = self._target.model
        width = max(map(len, prompts))
        pad = getattr(self._target.tokenizer, "pad_token_id", None) or 0
        rows = [[pad] * (width - len(p)) + p for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            begin = time.perf_counter()
            output = model.generate(
                torch.tensor(rows, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                pad_token_id=pad,
                eos_token_id=end_tokens(model),
                **settings,
                **self._options,
            )
            emitted = output[:, width:].tolist()  # waits for the device
            seconds = time.perf_counter() - begin
        most = settings["max_new_tokens"]  # prompt lookup of 5.12 may emit one more
        return Answer([_without_padding(row[:most], model) for row in emitted], seconds)


class Peer(Contender):
    """Prompt lookup of another package, in its own process."""

    def __init__(
        self, method: Method, setting: Setting, suite: Suite, target: Target, peers: Peers
    ) -> None:
        super().__init__(method.name, "peer", setting, suite.max_new_tokens)
        self._engine, self._peers, self._ends = method.engine, peers, _ends(target.model)
        self._most = suite.max_new_tokens

    def warm_up(self, prompt: list[int], tokens: int) -> None:
        if self.setting.temperature > 0:
            raise RefusedError("it is measured where decoding is greedy")
        self._decode([prompt] * self.setting.batch, tokens)

    def decode(self, prompts: Sequence[list[int]], names: Sequence[str], seed: int) -> Answer:
        return self._decode(prompts, self._most)

    def _decode(self, prompts: Sequence[list[int]], tokens: int) -> Answer:
        return Answer(*self._peers.run(self._engine, prompts, tokens, self._ends))


def _ends(model: Any) -> set[int]:
    """The tokens that end the model's texts."""
    eos = model.generation_config.eos_token_id
    return set(eos if isinstance(eos, list) else [] if eos is None else [eos])


def _without_padding(row: list[int], model: Any) -> list[int]:
    """A row up to its first end of sequence: what stands behind it fills the batch up."""
    ends = _ends(model)
    first = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[: first + 1]


class _Shop:
    """What the contenders share: the target, trained heads, assistants.

    A trained head starts afresh with every query, so all methods use the same ones; drafters
    that remember earlier queries must not learn from another method's answers and are each
    contender's own, made from their names.
    """

    def __init__(self, loaded: LoadedModel, folders: Sequence[Path]) -> None:
        self.target = Target(loaded.model, loaded.tokenizer)
        self._folders = folders
        self._heads = functools.cache(self._load_heads)
        self.assistant = functools.cache(self._load_assistant)

    def _load_heads(self, pool: str) -> list[Drafter]:
        name, question, options = pool.removeprefix("pool:").partition("?")
        return make_pool([f"pool:{self.pool_beside(name) or name}{question}{options}"], self.target)

    def pool_beside(self, name: str) -> Path | None:
        """A trained pool's folder, if it is where the data is."""
        found = (folder / name for folder in self._folders)
        return next((path for path in found if (path / MANIFEST).is_file()), None)

    def _load_assistant(self, name: str) -> Any:
        return load_target(name, dtype=self.target.model.dtype, device=self.target.device).model

    def drafters(self, names: Sequence[str]) -> list[str | Drafter]:
        """A pool for one contender."""
        made: list[str | Drafter] = []
        for name in names:
            made += self._heads(name) if name.startswith("pool:") else [name]
        return made

    def singles(self, names: Sequence[str]) -> dict[str, str | Drafter]:
        """The drafters of a pool, each by its name."""
        every = {
            (d.name if isinstance(d, Drafter) else make_drafter(d, self.target).name): d
            for d in self.drafters(names)
        }
        every.pop("none", None)
        return every

    def policy(self, policy: str) -> str:
        """The policy's name; a learned router's file is sought where the data is."""
        kind, _, path = policy.partition(":")
        if kind != LearnedRouter.name:
            return policy
        found = next((f / path for f in self._folders if (f / path).is_file()), path)
        return f"{kind}:{found}"


def contenders(
    suite: Suite,
    loaded: LoadedModel,
    folders: Sequence[Path] = (),
    peers: Peers | None = None,
) -> list[Contender]:
    """Everybody who takes part, plain decoding of each setting first.

    Parameters
    ----------
    suite, loaded
        What is measured, on which target.
    folders : sequence of Path
        Where a learned router's file is sought.
    peers : Peers, optional
        The process of other packages; without it their methods are left out, and that is said.

    Raises
    ------
    ConfigError, PoolError, ModelError
        For whatever cannot be made; nothing has been decoded then.
    """
    shop = _Shop(loaded, folders)
    methods = [m for m in suite.everybody if peers is not None or m.engine not in PEERS]
    if absent := [m for m in suite.everybody if m not in methods]:
        log(
            f"{', '.join(m.name for m in absent)} left out: --peers PYTHON, of an environment with "
            f"{' and '.join(dict.fromkeys(m.engine for m in absent))}, has them take part"
        )
    for method in [m for m in methods if m.needs and shop.pool_beside(m.needs) is None]:
        methods.remove(method)
        log(f"{method.name} left out: it needs the trained pool {method.needs} beside the data")
    made: list[Contender] = []
    dimensions = product(suite.batches, suite.temperatures, suite.seeds)
    for batch, temperature, seed in dimensions:
        for method in methods:
            for length in suite.draft_lengths if method.drafts else (None,):
                setting = Setting(temperature, seed, batch, length)
                made += _make(method, setting, suite, shop, peers)
    if suite.compiled:
        drafting = (c for c in made if isinstance(c, Ours) and c.kind != "plain")
        _compile(shop.target, [c.metasd.router for c in drafting])
    return made


def _compile(target: Target, routers: Sequence[Router]) -> None:
    """One set of graphs for everybody: of all block sizes, with the hidden states pools read;
    and one for the EAGLE heads of a shape."""
    blocks = {1, *(block for router in routers for block in router.blocks)}
    features = {layer for router in routers for layer in router.needs_features}
    target.compiled = compile_forward(target, sorted(blocks), tuple(sorted(features)), log)
    compile_steps((base for router in routers for base in router.bases), log)


def _make(
    method: Method, setting: Setting, suite: Suite, shop: _Shop, peers: Peers | None
) -> list[Contender]:
    if method.engine == "transformers":
        return [Theirs(method, setting, suite, shop)]
    if method.engine in PEERS:
        assert peers is not None
        return [Peer(method, setting, suite, shop.target, peers)]
    names = method.drafters or suite.drafters
    if method.each or method.only:
        singles = shop.singles(names)
        if method.only:
            what = f"drafter of method {method.name!r}"
            singles = {method.name: singles[checks.choice(what, method.only, singles)]}
        alone = replace(method, policy="fixed")
        return [
            Ours(replace(alone, name=name), "single", setting, suite, shop, [drafter])
            for name, drafter in singles.items()
        ]
    kind: Kind = "plain" if method.name == PLAIN else "metasd"
    return [Ours(method, kind, setting, suite, shop, shop.drafters(names))]
