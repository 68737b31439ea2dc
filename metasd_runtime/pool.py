"""A trained pool on disk: one file of weights in eight bits, and a manifest that explains them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from metasd_runtime.draft import Drafter
from metasd_runtime.drafters.draft_head import DraftHead
from metasd_runtime.drafters.eagle import Eagle
from metasd_runtime.drafters.eagle_head import MATRICES, EagleShape, quantise
from metasd_runtime.drafters.eagle_tree import EagleTree, TreeShape
from metasd_runtime.target import Target

__all__ = ["PoolError", "fingerprint", "load_pool", "read_manifest", "ready_pool", "save_pool"]

MANIFEST, WEIGHTS = "manifest.json", "pool.safetensors"
VERSION = 1


class PoolError(ValueError):
    """A pool that cannot be used, and why."""


def ready_pool(name: str) -> Path | None:
    """The pool that comes with the package for a target of this name, if there is one."""
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


def save_pool(
    path: Path,
    model: Any,
    target_name: str,
    shape: EagleShape,
    vocabulary: Tensor,
    heads: Mapping[str, Mapping[str, Tensor]],
    about: Mapping[str, Mapping[str, Any]],
    training: Mapping[str, Any],
) -> None:
    """Write a pool of EAGLE heads; the folder appears whole or not at all.

    Parameters
    ----------
    path : Path
        A folder; what is in it of an earlier pool is replaced.
    model, target_name
        The target the heads were trained for.
    shape, vocabulary
        Common to all heads.
    heads : mapping of name to weights
    about : mapping of name to manifest entries
        Domain, data, seed, metrics.
    training : mapping
        Of the pool as a whole.
    """
    tensors: dict[str, Tensor] = {"vocabulary": vocabulary.to(torch.int32)}
    for name, weights in heads.items():
        for key, weight in weights.items():
            if key in MATRICES:
                tensors[f"{name}.{key}"], scale = quantise(weight)
                tensors[f"{name}.{key}.scale"] = scale
            else:
                tensors[f"{name}.{key}"] = weight.float()
    manifest = {
        "version": VERSION,
        "target": {"name": target_name, "fingerprint": fingerprint(model)},
        "shape": asdict(shape),
        "drafters": [{"name": name, "kind": "eagle", **about[name]} for name in heads],
        "training": dict(training),
    }
    path.mkdir(parents=True, exist_ok=True)
    _replace(path / WEIGHTS, lambda beside: save_file(tensors, beside))
    text = json.dumps(manifest, indent=1) + "\n"
    _replace(path / MANIFEST, lambda beside: beside.write_text(text, encoding="utf-8"))


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
    """A pool's manifest.

    Raises
    ------
    PoolError
        If there is none, or one that this version does not understand.
    """
    file = Path(path) / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PoolError(
            f"{path} is no pool of drafters: it has no {MANIFEST}; train one with: "
            "metasd train POOL.toml"
        ) from None
    except (OSError, ValueError) as error:
        raise PoolError(f"{file} is damaged ({error}); copy or train the pool again") from None
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        raise PoolError(f"{file} is of a version that is not known here; train the pool again")
    return manifest


def load_pool(path: str | Path, target: Target, tree: TreeShape | None = None) -> list[Drafter]:
    """A pool's drafters, ready for `MetaSD(..., drafters=load_pool(path, target))`.

    Parameters
    ----------
    path : path-like
    target : Target
    tree : TreeShape, optional
        Have the heads draft trees; chains if left out.

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
    shape = EagleShape(**{**manifest["shape"], "layers": tuple(manifest["shape"]["layers"])})
    try:
        tensors = load_file(Path(path) / WEIGHTS)
        vocabulary = tensors["vocabulary"].long()
        heads = {
            entry["name"]: _weights(tensors, entry["name"], shape) for entry in manifest["drafters"]
        }
    except (OSError, KeyError, SafetensorError) as error:
        raise PoolError(
            f"{Path(path) / WEIGHTS} is missing or damaged ({error}); copy or train the pool again"
        ) from None
    head = DraftHead(target, vocabulary)
    if tree is None:
        return [Eagle(shape, heads[name], vocabulary, target, name, head) for name in heads]
    return [EagleTree(tree, shape, heads[name], vocabulary, target, name, head) for name in heads]


def _weights(tensors: Mapping[str, Tensor], name: str, shape: EagleShape) -> dict[str, Tensor]:
    weights = {}
    for key, size in shape.sizes().items():
        weight = tensors[f"{name}.{key}"].float()
        if key in MATRICES:
            weight = weight * tensors[f"{name}.{key}.scale"][:, None]
        if weight.shape != size:
            raise KeyError(f"{name}.{key} has shape {tuple(weight.shape)}, not {size}")
        weights[key] = weight
    return weights
