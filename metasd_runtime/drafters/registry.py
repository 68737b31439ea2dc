"""Drafters by name, as the command line and `MetaSD.from_pretrained` spell them.

``prompt-lookup[:N[:M]]``, ``suffix``, ``lookahead``, ``early-exit[:L]``, ``none``, or a Hugging
Face causal LM by id or path, ``lm:ID``; behind a question mark, how it pays for tokens it missed:
``lm:ID?cache=streaming&sinks=4&window=512``. One with another tokenizer drafts the tokens that
both spell alike, ``lm-tokens:ID``, or text, ``lm-text:ID``. ``A>B`` drafts with A, and with B where
A has nothing to say. ``pool:NAME`` is all the heads of a trained pool; behind a question mark, the
trees its EAGLE heads draft, ``pool:NAME?tree=static``, ``pool:NAME?tree=dynamic&nodes=12``, how its
language models pay, as above, or who is asked before each of them, ``pool:NAME?first=A``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import parse_qsl

from metasd_bandits import checks
from metasd_bandits.plugins import load_plugins
from metasd_runtime.decoding.drafter import Drafter
from metasd_runtime.decoding.no_draft import NoDraft
from metasd_runtime.drafters.catch_up import CacheStrategy, make_cache_strategy
from metasd_runtime.drafters.eagle.tree import TreeShape, make_tree
from metasd_runtime.drafters.early_exit import EarlyExit
from metasd_runtime.drafters.fallback import Fallback
from metasd_runtime.drafters.foreign import SharedTokens, TextMatch
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.drafters.lookahead import Lookahead
from metasd_runtime.drafters.prompt_lookup import PromptLookup
from metasd_runtime.drafters.suffix import Suffix
from metasd_runtime.model.load import load_target
from metasd_runtime.model.target import Target

__all__ = ["DRAFTERS", "make_drafter", "make_pool", "register_drafter"]

_Maker = Callable[[Target, str], Drafter]


def _integer(kind: str, text: str, example: int = 8) -> int:
    try:
        return int(text)
    except ValueError:
        raise checks.ConfigError(
            f"drafter {kind}:{text!r} needs a whole number behind the colon, as in {kind}:{example}"
        ) from None


def _prompt_lookup(target: Target, text: str) -> Drafter:
    longest, colon, least = text.partition(":")
    return PromptLookup(
        _integer("prompt-lookup", longest) if text else 3,
        _integer(f"prompt-lookup:{longest}", least, 2) if colon else 1,
    )


def _early_exit(target: Target, text: str) -> Drafter:
    default = max(1, len(target.layers) // 4)
    return EarlyExit(target, _integer("early-exit", text) if text else default)


def _cache_strategy(options: Mapping[str, str]) -> CacheStrategy:
    """What the options behind a question mark say of debts."""
    given = dict(options)
    cache = given.pop("cache", "recompute")
    for name, value in given.items():
        if not value.isdecimal():
            raise checks.ConfigError(
                f"{name}={value!r} is not a whole number; write cache=streaming&window=512"
            )
    return make_cache_strategy(cache, {name: int(value) for name, value in given.items()})


def _language_model(target: Target, text: str) -> Drafter:
    name, (text, _, options) = f"lm:{text}", text.partition("?")
    cache = _cache_strategy(dict(parse_qsl(options, keep_blank_values=True)))
    if not text:
        raise checks.ConfigError("drafter 'lm' needs a model: lm:ID or lm:PATH")
    loaded = load_target(text, dtype=target.model.dtype, device=target.device)
    if (
        target.tokenizer is not None
        and target.tokenizer.get_vocab() != loaded.tokenizer.get_vocab()
    ):
        raise checks.ConfigError(
            f"drafter lm:{text} has another vocabulary than the target; its token ids would mean "
            f"other words. Give a model of the target's family, or let it draft shared tokens "
            f"(lm-tokens:{text}) or text (lm-text:{text})"
        )
    return LanguageModel(loaded.model, target.vocab_size, name, cache)


def _foreign(kind: type[SharedTokens | TextMatch], spelled: str) -> _Maker:
    def make(target: Target, text: str) -> Drafter:
        if not text:
            raise checks.ConfigError(f"drafter {spelled!r} needs a model: {spelled}:ID or PATH")
        if target.tokenizer is None:
            raise checks.ConfigError(f"drafter {spelled}:{text} needs the target's tokenizer")
        loaded = load_target(text, dtype=target.model.dtype, device=target.device)
        return kind(
            loaded.model,
            loaded.tokenizer,
            target.tokenizer,
            target.vocab_size,
            f"{spelled}:{text}",
        )

    return make


DRAFTERS: dict[str, _Maker] = {
    "early-exit": _early_exit,
    "lm": _language_model,
    "lm-text": _foreign(TextMatch, "lm-text"),
    "lm-tokens": _foreign(SharedTokens, "lm-tokens"),
    "lookahead": lambda target, text: Lookahead(target),
    "none": lambda target, text: NoDraft(),
    "prompt-lookup": _prompt_lookup,
    "suffix": lambda target, text: Suffix(),
}


def register_drafter(name: str, make: _Maker) -> None:
    """Make a drafter known by name to `make_drafter` and the command lines.

    Parameters
    ----------
    name : str
        Without ``:``, ``?``, ``>`` and ``,``, which part a drafter's name from its options.
    make : callable
        ``make(target, text)`` gives the `Drafter`; `text` is what stands behind the colon.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If the name cannot be spelled on a command line, or `make` cannot be called.
    """
    if not name or set(name) & set(":?>, ") or name == "pool":
        raise checks.ConfigError(f"drafter {name!r} cannot be named so; use letters and hyphens")
    if not callable(make) or isinstance(make, Drafter):
        raise checks.ConfigError(
            f"drafter {name!r}: {make!r} makes none; give a function make(target, text) -> Drafter"
        )
    DRAFTERS[name] = make


def make_drafter(
    drafter: str | Drafter, target: Target, made: dict[str, Drafter] | None = None
) -> Drafter:
    """A drafter from its name, or the object itself.

    Parameters
    ----------
    made : dict of str to Drafter, optional
        What was made before, by name: it is used again, and what is made now joins it.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If the name is unknown (with the near match) or its parameter is out of range.
    """
    if isinstance(drafter, Drafter):
        return drafter
    made = {} if made is None else made
    if drafter not in made:
        made[drafter] = _make(drafter, target, made)
    return made[drafter]


def _make(name: str, target: Target, made: dict[str, Drafter]) -> Drafter:
    first, behind, otherwise = name.partition(">")
    if behind:
        if not (first and otherwise):
            raise checks.ConfigError(
                f"drafter {name!r} lacks one of two; write FIRST>OTHERWISE, as in "
                "prompt-lookup>early-exit:8"
            )
        if otherwise.startswith("pool:"):
            raise checks.ConfigError(
                f"drafter {name!r}: {otherwise!r} is several; name who is asked before each of "
                f"them among its options, pool:NAME?first={first}"
            )
        return Fallback(make_drafter(first, target, made), make_drafter(otherwise, target, made))
    kind, _, text = name.partition(":")
    if kind not in DRAFTERS:
        load_plugins("metasd.drafters", register_drafter)
    return DRAFTERS[checks.choice("drafter", kind, DRAFTERS)](target, text)


class _PoolOptions(NamedTuple):
    """What stands behind the question mark of a pool."""

    tree: TreeShape | None
    cache: CacheStrategy
    first: str | None


def _pool_options(text: str) -> _PoolOptions:
    given = dict(parse_qsl(text, keep_blank_values=True))
    known = ("tree", "nodes", "cache", "sinks", "window", "first")
    for name in given:
        checks.choice("option of a pool", name, known)
    first = given.pop("first", None)
    own = {name: value for name, value in given.items() if name in ("tree", "nodes")}
    rest = {name: value for name, value in given.items() if name not in own}
    return _PoolOptions(_tree(own), _cache_strategy(rest), first)


def _tree(given: Mapping[str, str]) -> TreeShape | None:
    """None for chains."""
    nodes = given.get("nodes")
    if nodes is not None and not nodes.isdecimal():
        raise checks.ConfigError(f"nodes={nodes!r} is not a whole number; write nodes=12")
    if "tree" in given:
        return make_tree(given["tree"], None if nodes is None else int(nodes))
    if nodes is not None:
        raise checks.ConfigError(
            f"nodes={nodes} says how large a dynamic tree is; add tree=dynamic"
        )
    return None


def make_pool(drafters: Sequence[str | Drafter], target: Target) -> list[Drafter]:
    """Drafters from names and objects; ``pool:NAME`` stands for all the heads of a trained pool.

    NAME is a folder that ``metasd train`` wrote, or the name of a pool that comes with the
    package; ``?tree=static`` or ``?tree=dynamic&nodes=12`` behind it has EAGLE heads draft trees,
    ``?cache=streaming&window=512`` says how language models pay for tokens they missed, and
    ``?first=prompt-lookup`` who is asked before each drafter of the pool. What is named several
    times is made once: its arms share its state.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        As `make_drafter`.
    metasd_runtime.drafters.pool.PoolError
        If there is no such pool, or it was trained for another target.
    """
    from metasd_runtime.drafters.pool import load_pool, ready_pool  # which builds on the heads here

    pool: list[Drafter] = []
    made: dict[str, Drafter] = {}
    for drafter in drafters:
        if isinstance(drafter, str) and drafter.startswith("pool:"):
            name, _, text = drafter.removeprefix("pool:").partition("?")
            tree, cache, first = _pool_options(text)
            front = None if first is None else make_drafter(first, target, made)
            heads = load_pool(ready_pool(name) or name, target, tree, cache)
            pool += heads if front is None else [Fallback(front, head) for head in heads]
        else:
            pool.append(make_drafter(drafter, target, made))
    return pool
