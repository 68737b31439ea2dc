"""Load the target: the embedded default by name, or any Hugging Face causal LM by id or path."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from metasd_bandits import checks
from metasd_runtime.model import smollm2, store
from metasd_runtime.model.quiet import quiet
from metasd_runtime.model.store import ModelError

__all__ = ["DTYPES", "LoadedModel", "ModelError", "load_target", "log"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM ready to decode: evaluation mode, no gradients, on its device.

    Attributes
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
        With a padding token: its own, or the end-of-sequence token.
    name : str
        What the user asked for.
    path : pathlib.Path or None
        The folder it was loaded from; None for a hub id.
    """

    model: Any
    tokenizer: Any
    name: str
    path: Path | None

    @property
    def dtype(self) -> torch.dtype:
        """The weights' type."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device


def load_target(
    name_or_path: str | os.PathLike[str] = smollm2.NAME,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    name_or_path : str or path-like
        ``"smollm2-135m"`` (fetched on first use, see `metasd_runtime.model.smollm2`), a local
        folder, or a Hugging Face model id.
    dtype : {"auto", "float32", "bfloat16", "float16"} or torch.dtype, optional
        "auto", the default: bfloat16 on CUDA and on CPUs that compute in it (AVX512-BF16 or
        AMX), float32 elsewhere.
    device : str or torch.device, optional
        "auto", the default: CUDA where there is one, else the CPU.

    Raises
    ------
    ModelError
        If the model is not there and cannot be fetched, or one of its files is damaged.
    metasd_bandits.checks.ConfigError
        If `dtype` or `device` is unknown or not to be had here.
    """
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    name = os.fspath(name_or_path)
    source, path = _locate(name)
    with quiet():
        model = _load_model(name, source, kind)
        tokenizer = _load_tokenizer(name, source)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = model.to(place).eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, name, path)


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """The device asked for, checked; CUDA where there is one, else the CPU, for "auto"."""
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        checks.choice("device", str(device), ["auto", "cpu", "cuda", "cuda:0", "mps"])
        raise
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (place.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not here.get(place.type, True):
        raise checks.ConfigError(f"device={str(device)!r} is not on this machine; use 'auto'")
    return place


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The type asked for, checked; for "auto" the fastest that `device` computes in natively."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype is None or dtype == "auto":
        native = _cpu_has_bfloat16() if device.type == "cpu" else device.type == "cuda"
        return torch.bfloat16 if native else torch.float32
    return DTYPES[checks.choice("dtype", dtype.removeprefix("torch."), [*DTYPES, "auto"])]


def _cpu_has_bfloat16() -> bool:
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def _locate(name: str) -> tuple[str, Path | None]:
    """What to give `from_pretrained`, and the local folder where there is one."""
    if name == smollm2.NAME:
        stored = store.find(name) or smollm2.fetch(say=log)
        store.verify(stored)
        return str(stored.path), stored.path
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path), path
    if path.exists():
        raise ModelError(f"{name} is a file; give the folder that holds config.json beside it")
    if name.startswith(("/", "./", "../", "~")):
        raise ModelError(f"there is no folder {name}; give a folder with config.json, or an id")
    return name, None


def _load_model(name: str, source: str, dtype: torch.dtype) -> Any:
    with _explained(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True
        )
    model, info = loaded
    # The library fills tensors that the files lack with random numbers, and goes on.
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{name} lacks {len(missing)} of the model's tensors, {missing[0]} the first: "
            "the files are incomplete, or of another architecture than config.json says"
        )
    return model


def _load_tokenizer(name: str, source: str) -> Any:
    with _explained(name):
        return AutoTokenizer.from_pretrained(source)


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Say in one sentence what a failure inside the library means for the user."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise ModelError(
            f"a weight file of {name} is damaged ({error}); copy or download it again"
        ) from error
    except Exception as error:  # whatever the library makes of files it cannot read
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"cannot load {name!r}: {first} ({smollm2.hint(name)})") from error


def log(message: str) -> None:
    """Tell the user, on standard error, what takes time."""
    print(f"metasd: {message}", file=sys.stderr, flush=True)
