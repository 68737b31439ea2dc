"""A trained pool on disk: one file of weights, a manifest that explains them, checksums of both.

The checksums stand in ``SHA256SUMS``, as ``sha256sum`` writes and checks them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from metasd_runtime.decoding.drafter import Drafter
from metasd_runtime.drafters.catch_up import CacheStrategy, make_cache_strategy
from metasd_runtime.drafters.eagle.chain import Eagle
from metasd_runtime.drafters.eagle.head import EagleShape
from metasd_runtime.drafters.eagle.tree import EagleTree, TreeShape
from metasd_runtime.drafters.ngram import NGram
from metasd_runtime.drafters.output_head import DraftHead
from metasd_runtime.drafters.parallel_heads import ParallelHeads, ParallelShape
from metasd_runtime.drafters.quantised import restored, stored
from metasd_runtime.drafters.rescored import Rescored
from metasd_runtime.drafters.small_lm import SmallShape, small_language_model
from metasd_runtime.model.store import sha256
from metasd_runtime.model.target import Target

__all__ = [
    "MANIFEST",
    "SHAPES",
    "PoolError",
    "Rescoring",
    "Trained",
    "as_stored",
    "checksums",
    "fingerprint",
    "load_pool",
    "read_manifest",
    "read_trained",
    "ready_pool",
    "save_pool",
]

MANIFEST, WEIGHTS, CHECKSUMS = "manifest.json", "pool.safetensors", "SHA256SUMS"
VERSION = 2
_READABLE = (1, VERSION)  # 1 knew no differences
_END = -1  # behind each document of a text

SHAPES: dict[str, Callable[..., Any]] = {
    "eagle": EagleShape,
    "medusa": ParallelShape,
    "bpd": ParallelShape,
    "language-model": SmallShape,
}
"""Kinds of drafters with weights, and what makes the shape of one from its manifest entry."""


class PoolError(ValueError):
    """A pool that cannot be used, and why."""


def ready_pool(name: str) -> Path | None:
    """The pool of this name that comes with the package, if there is one."""
    path = Path(__file__).parent / "pools" / name
    return path if (path / MANIFEST).is_file() else None


@torch.inference_mode()
def fingerprint(model: Any) -> str:
    """Identifies a target by its weights: the same in float32 and in bfloat16.

    SHA-256 over every parameter's name and shape and its first thousand values in bfloat16.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(value.shape)}".encode())
        few = value.flatten()[:1000].to("cpu", torch.bfloat16)
        digest.update(few.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Trained:
    """A trained drafter, as it goes into a pool.

    Attributes
    ----------
    kind : str
        One of `SHAPES`.
    shape : EagleShape, ParallelShape or SmallShape
    weights : mapping of str to tensor
        By the names of ``shape.sizes()``.
    about : mapping
        What else the manifest tells of it: domains, metrics.
    base : str, optional
        Another drafter of the pool, of the same shape and with no base of its own: the weights are
        kept as differences from it, in half the space.
    """

    kind: str
    shape: Any
    weights: Mapping[str, Tensor]
    about: Mapping[str, Any]
    base: str | None = None


@dataclass(frozen=True)
class Rescoring:
    """A drafter that rescores another's heads by an n-gram model of some of the pool's texts.

    Attributes
    ----------
    heads : str
        Name of a drafter in the pool, Medusa's or BPD's.
    texts : sequence of str
        Names of texts in the pool.
    about : mapping
        What else the manifest tells of it.
    """

    heads: str
    texts: Sequence[str]
    about: Mapping[str, Any]


def save_pool(
    path: Path,
    model: Any,
    target_name: str,
    vocabulary: Tensor,
    drafters: Mapping[str, Trained | Rescoring],
    texts: Mapping[str, Sequence[Sequence[int]]],
    training: Mapping[str, Any],
) -> None:
    """Write a pool of drafters; the folder appears whole or not at all.

    Parameters
    ----------
    path : Path
        A folder; what is in it of an earlier pool is replaced.
    model, target_name
        The target the drafters were trained for.
    vocabulary : (V,) int64
        Common to all.
    drafters : mapping of name to Trained or Rescoring
        A rescoring one stands behind the drafter whose heads it rescores.
    texts : mapping of name to token sequences
        For rescoring.
    training : mapping
        Of the pool as a whole.
    """
    tensors: dict[str, Tensor] = {"vocabulary": vocabulary.to(torch.int32)}
    for name, documents in texts.items():
        joined = [token for document in documents for token in (*document, _END)]
        tensors[f"text.{name}"] = torch.tensor(joined, dtype=torch.int32)
    entries = []
    for name, drafter in drafters.items():
        entry: dict[str, Any] = {"name": name}
        if isinstance(drafter, Rescoring):
            entry |= {"kind": "rescored", "heads": drafter.heads, "texts": list(drafter.texts)}
        else:
            entry |= {"kind": drafter.kind, "shape": asdict(drafter.shape)}
            if drafter.base is not None:
                entry["base"] = drafter.base
            tensors |= stored(name, drafter.weights, _base(drafters, drafter))
        entries.append({**entry, **drafter.about})
    manifest = {
        "version": VERSION,
        "target": {"name": target_name, "fingerprint": fingerprint(model)},
        "drafters": entries,
        "training": dict(training),
    }
    path.mkdir(parents=True, exist_ok=True)
    _replace(path / WEIGHTS, lambda beside: save_file(tensors, beside))
    text = json.dumps(manifest, indent=1) + "\n"
    _replace(path / MANIFEST, lambda beside: beside.write_text(text, encoding="utf-8"))
    _replace(path / CHECKSUMS, lambda beside: beside.write_text(checksums(path), encoding="utf-8"))


def checksums(path: Path) -> str:
    """What a pool's ``SHA256SUMS`` must say, to the last byte."""
    return "".join(f"{sha256(path / name)}  {name}\n" for name in (MANIFEST, WEIGHTS))


def as_stored(drafters: Mapping[str, Trained | Rescoring], name: str) -> dict[str, Tensor]:
    """The weights that a drafter has once the pool is written and read."""
    drafter = drafters[name]
    assert isinstance(drafter, Trained)
    base, sizes = _base(drafters, drafter), drafter.shape.sizes()
    return restored(stored(name, drafter.weights, base), name, sizes, base)


def _base(
    drafters: Mapping[str, Trained | Rescoring], drafter: Trained
) -> dict[str, Tensor] | None:
    return None if drafter.base is None else as_stored(drafters, drafter.base)


def _replace(path: Path, write: Any) -> None:
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(beside))
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    finally:
        Path(beside).unlink(missing_ok=True)


def read_manifest(path: str | Path) -> dict[str, Any]:
    """A pool's manifest, once every byte of the pool has been compared with its checksums.

    Raises
    ------
    PoolError
        If there is none, or one that this version does not understand, or a file is damaged.
    """
    _verify(Path(path))
    file = Path(path) / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PoolError(f"{file} is damaged ({error}); copy or train the pool again") from None
    if not isinstance(manifest, dict) or manifest.get("version") not in _READABLE:
        raise PoolError(f"{file} is of a version that is not known here; train the pool again")
    return manifest


def _verify(path: Path) -> None:
    """Refuse a pool whose files are not those that were written."""
    if not (path / MANIFEST).is_file():
        raise PoolError(
            f"{path} is no pool of drafters: it has no {MANIFEST}; train one with: "
            "metasd train POOL.toml"
        )
    if not (path / CHECKSUMS).exists():
        raise PoolError(
            f"the pool {path} has no {CHECKSUMS}; copy or train it again, or, if you trust its "
            f"files, write it: cd {path} && sha256sum {MANIFEST} {WEIGHTS} > {CHECKSUMS}"
        )
    with _damage(path):
        if (path / CHECKSUMS).read_bytes() != checksums(path).encode():
            raise OSError(f"not as {CHECKSUMS} says")


def load_pool(
    path: str | Path,
    target: Target,
    tree: TreeShape | None = None,
    cache: str | CacheStrategy = "recompute",
) -> list[Drafter]:
    """A pool's drafters, ready for `MetaSD(..., drafters=load_pool(path, target))`.

    Parameters
    ----------
    path : path-like
    target : Target
    tree : TreeShape, optional
        Have the EAGLE heads draft trees; chains if left out, as all others do.
    cache : {"recompute", "streaming", "lazy"} or CacheStrategy
        How language models pay for tokens they missed (`metasd_runtime.drafters.catch_up`).

    Raises
    ------
    PoolError
        If it was trained for another target, or its files are missing or damaged.
    ConfigError
        For trees, if the target cannot read one in one forward.
    """
    manifest = read_manifest(path)
    trained_for = manifest["target"]
    if fingerprint(target.model) != trained_for["fingerprint"]:
        raise PoolError(
            f"the pool {path} was trained for {trained_for['name']}, and this target's weights "
            "are others: its drafts would be nonsense. Train a pool for this target with: "
            "metasd train POOL.toml"
        )
    loading = _Loading(manifest, target, tree, make_cache_strategy(cache))
    with _damage(path):
        return loading.drafters(load_file(Path(path) / WEIGHTS))


def read_trained(path: str | Path) -> tuple[Tensor, dict[str, Trained]]:
    """A pool's draft vocabulary, and its drafters that have weights, by name.

    Raises
    ------
    PoolError
        If its files are missing or damaged.
    """
    manifest = read_manifest(path)
    with _damage(path):
        tensors = load_file(Path(path) / WEIGHTS)
        trained = {}
        for entry in manifest["drafters"]:
            if entry["kind"] in SHAPES:
                shape, weights = _shape_and_weights(manifest, tensors, entry)
                trained[entry["name"]] = Trained(entry["kind"], shape, weights, {})
        return tensors["vocabulary"].long(), trained


@contextmanager
def _damage(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, TypeError, SafetensorError) as error:
        raise PoolError(
            f"the pool {path} is damaged, or lacks a file ({error}); copy or train it again"
        ) from None


def _shape_and_weights(
    manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], entry: Mapping[str, Any]
) -> tuple[Any, dict[str, Tensor]]:
    """Of an entry of the manifest (in old pools a shape stands once for all)."""
    shape = SHAPES[entry["kind"]](**_lists_as_tuples(entry.get("shape", manifest.get("shape"))))
    sizes = shape.sizes()
    base = restored(tensors, entry["base"], sizes) if "base" in entry else None
    return shape, restored(tensors, entry["name"], sizes, base)


class _Loading:
    """A pool's drafters in the making: what several of them share is made once."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        target: Target,
        tree: TreeShape | None,
        cache: CacheStrategy,
    ) -> None:
        self.manifest, self.target, self.tree, self.cache = manifest, target, tree, cache

    def drafters(self, tensors: Mapping[str, Tensor]) -> list[Drafter]:
        self.tensors = tensors
        self.vocabulary = tensors["vocabulary"].long()
        self.head = DraftHead(self.target, self.vocabulary)
        made: dict[str, Drafter] = {}
        for entry in self.manifest["drafters"]:
            if entry["kind"] == "rescored":
                heads = made[entry["heads"]]
                if not isinstance(heads, ParallelHeads):
                    raise KeyError(f"{entry['heads']} has no heads to be rescored")
                drafter: Drafter = Rescored(heads, self._ngram(entry["texts"]), entry["name"])
            else:
                drafter = self._trained(entry)
            made[entry["name"]] = drafter
        return list(made.values())

    def _trained(self, entry: Mapping[str, Any]) -> Drafter:
        """One with weights of its own."""
        shape, weights = _shape_and_weights(self.manifest, self.tensors, entry)
        name = entry["name"]
        if isinstance(shape, SmallShape):
            return small_language_model(
                shape, weights, self.vocabulary, self.target, name, self.cache
            )
        rest = (shape, weights, self.vocabulary, self.target, name, self.head)
        if isinstance(shape, ParallelShape):
            return ParallelHeads(*rest)
        return Eagle(*rest) if self.tree is None else EagleTree(self.tree, *rest)

    def _ngram(self, names: Sequence[str]) -> NGram:
        documents = [d for name in names for d in _documents(self.tensors[f"text.{name}"])]
        return NGram.of(self.target.vocab_size, documents)


def _documents(joined: Tensor) -> list[list[int]]:
    """The texts that `save_pool` joined."""
    ends = (joined == _END).nonzero()[:, 0].tolist()
    begins = [0, *(end + 1 for end in ends)]
    return [joined[begin:end].tolist() for begin, end in zip(begins, ends, strict=False)]


def _lists_as_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
