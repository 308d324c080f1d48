"""Folders that are no checkpoint, or one that is not supported, are refused before a weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from tests.checkpoint_folders import write_checkpoint
from turnout.checkpoint_files import Quantization, check_checkpoint, quantization, weight_files
from turnout.config import check_resources, parse_config
from turnout.errors import Code, TurnoutError

FIELD = "models.large.path"
TENSORS = {"a.weight": numpy.zeros((4, 4), numpy.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a weight in it."""
    made = write_checkpoint(tmp_path / "made")
    save_file(TENSORS, made / "model.safetensors")
    return made


def refusal(path: Path) -> str:
    """The one line that refuses a folder, without the field at its start."""
    models = {"large": {"path": str(path)}}
    pools = {"p": {"small": "large", "large": "large", "default": {"name": "plain"}}}
    with pytest.raises(TurnoutError) as caught:
        check_resources(parse_config({"models": models, "pools": pools}))
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, FIELD)
    assert "\n" not in caught.value.message
    return caught.value.message.removeprefix(f"{FIELD}: ")


def test_a_whole_checkpoint_is_accepted(folder: Path) -> None:
    check_checkpoint(folder, FIELD)
    write_checkpoint(folder, quantization_config=None, compression_config=None)
    check_checkpoint(folder, FIELD)


METHODS = ["bitsandbytes", "mxfp4", "modelopt", "quanto", "a_new_one"]
SUPPORTED = "gptq, awq, compressed-tensors, fp8, or unquantized weights in float32, bfloat16 or float16"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        *(({"quantization_config": {"quant_method": each}}, f"quantization_config: {each}") for each in METHODS),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config: bitsandbytes"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: an unnamed quant_method"),
        ({"quantization_config": {}}, "quantization_config: an unnamed quant_method"),
        ({"quantization_config": "q4"}, "quantization_config: q4"),
        ({"quantization": {"bits": 4}}, "quantization: mlx"),
    ],
)
def test_quantized_weights_are_refused_by_name(folder: Path, fields: dict[str, Any], says: str) -> None:
    write_checkpoint(folder, **fields)
    assert refusal(folder) == f"{folder}: {says} is not supported; supported: {SUPPORTED}"


def test_files_of_quantizers_are_found(folder: Path) -> None:
    assert quantization(folder, FIELD) is None
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    assert quantization(folder, FIELD) == Quantization("quantize_config.json", "gptq", {"bits": 4})
    check_checkpoint(folder, FIELD)
    (folder / "quantize_config.json").rename(folder / "hf_quant_config.json")
    assert refusal(folder) == f"{folder}: hf_quant_config.json: modelopt is not supported; supported: {SUPPORTED}"


def test_a_gguf_file_next_to_a_checkpoint_is_not_its_weights(folder: Path) -> None:
    (folder / "weights-q4.gguf").write_bytes(b"GGUF")
    assert weight_files(folder) == [folder / "model.safetensors"]


def test_quantized_weights_that_torch_pickled_are_refused(folder: Path) -> None:
    write_checkpoint(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin: quantized weights are read from safetensors files only" in refusal(folder)


def test_weights_stored_as_integers_are_refused_without_any_field(folder: Path) -> None:
    save_file({"a.qweight": numpy.zeros((4, 4), numpy.int32)}, folder / "model.safetensors")
    assert "a.qweight: a weight stored as I32 is not supported" in refusal(folder)
    save_file(TENSORS | {"mask": numpy.zeros(4, bool)}, folder / "model.safetensors")  # a buffer, as in GPT-NeoX's
    check_checkpoint(folder, FIELD)


def without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def containing(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def adapter_only(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")


def half_downloaded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    part = folder / ".cache" / "huggingface" / "download" / "x.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"")


FAULTS = {
    "no config.json": (without("config.json"), "no checkpoint (config.json) in "),
    "an adapter's folder": (adapter_only, "it holds an adapter (adapter_config.json); merge it into its base model"),
    "an adapter in a checkpoint": (containing("adapter_config.json", b"{}"), "adapters are not applied; supported: "),
    "a download that has not ended": (
        half_downloaded,
        " has no weights: its download has not ended (x.incomplete); repeat",
    ),
    "a pointer": (
        containing("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "model.safetensors is a pointer of Git LFS: `git lfs pull` fetches the file itself",
    ),
    "no tokenizer": (without("tokenizer.json"), " has no tokenizer: none of tokenizer.json, tokenizer.model, "),
    "weights by another name": (
        lambda folder: (folder / "model.safetensors").rename(folder / "weights.safetensors"),
        " has no weights: neither model.safetensors nor pytorch_model.bin",
    ),
    "cut off weights": (cut_off, "model.safetensors is not a safetensors file, or not a whole one: "),
    "empty weights": (containing("model.safetensors", b""), "model.safetensors is not a safetensors file, or not a "),
    "a cut off config.json": (containing("config.json", b'{"model_type": "lla'), "config.json is not valid JSON: "),
    "a cut off tokenizer.json": (containing("tokenizer.json", b'{"model": {"vo'), "tokenizer.json is not valid JSON: "),
    "bytes": (containing("tokenizer_config.json", b"\xff\xfe"), "tokenizer_config.json is not valid JSON: "),
    "a list": (containing("generation_config.json", b"[2]"), "generation_config.json must hold a JSON object"),
    "a word for an end": (
        containing("generation_config.json", b'{"eos_token_id": "</s>"}'),
        "generation_config.json: eos_token_id must be an id or a list of ids, not '</s>'",
    ),
    "true for an end": (
        containing("generation_config.json", b'{"eos_token_id": [2, true]}'),
        "eos_token_id must be an id or a list of ids, not [2, True]",
    ),
}


@pytest.mark.parametrize(("change", "says"), FAULTS.values(), ids=FAULTS)
def test_a_folder_at_fault_is_refused_in_a_line(folder: Path, change: Callable[[Path], None], says: str) -> None:
    change(folder)
    message = refusal(folder)
    assert says in message
    assert str(folder) in message


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"PK")
    needed = "a GGUF file or the folder of a Hugging Face checkpoint is needed"
    assert refusal(file) == f"{file} is a file; {needed}"


def test_the_hubs_cache_holds_folders_of_commits(tmp_path: Path) -> None:
    snapshot = write_checkpoint(tmp_path / "models--org--name" / "snapshots" / "abc")
    assert refusal(tmp_path / "models--org--name").endswith("it is a folder of the hub's cache; write hf:org/name")
    (snapshot / "model.safetensors").unlink()
    (snapshot.parent.parent / "blobs").mkdir()
    (snapshot.parent.parent / "blobs" / "0f.12.incomplete").write_bytes(b"")
    with pytest.raises(TurnoutError) as caught:
        check_checkpoint(snapshot, FIELD)
    assert caught.value.message.endswith("its download has not ended (0f.12.incomplete); repeat it")


@pytest.mark.parametrize("index", [None, "model.safetensors.index.json"])
@pytest.mark.parametrize("models", ["actors", "colocated"])
def test_a_node_that_loads_no_model_needs_no_weights(folder: Path, models: str, index: str | None) -> None:
    """What a driver reads is there: configuration and tokenizer, and, copied with them, the list of the shards."""
    (folder / "model.safetensors").unlink()
    if index is not None:
        (folder / index).write_text(json.dumps({"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}))
    pool = {"small": "large", "large": "large", "default": {"name": "plain"}, "placement": {"models": models}}
    config = parse_config({"models": {"large": {"path": str(folder)}}, "pools": {"p": pool}})
    check_resources(config)
    with pytest.raises(TurnoutError, match="lacks model-00001" if index else "has no weights"):
        check_checkpoint(folder, FIELD)
    write_checkpoint(folder, quantization_config={"quant_method": "hqq"})
    (folder / "model.safetensors").unlink()
    assert refusal(folder).startswith(f"{folder}: quantization_config: hqq is not supported")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_shards_that_are_missing_are_named(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    shards = [f"shard-{index}.safetensors" for index in range(3)]
    save_file(TENSORS, folder / shards[0])
    index = folder / f"{name}.index.json"
    index.write_text(json.dumps({"weight_map": {f"t{i}": shard for i, shard in enumerate(shards)}}))
    assert refusal(folder) == f"{folder} lacks shard-1.safetensors and 1 more, which {index.name} lists"
    save_file(TENSORS, folder / shards[1])
    assert refusal(folder) == f"{folder} lacks shard-2.safetensors, which {index.name} lists"
    save_file(TENSORS, folder / shards[2])
    check_checkpoint(folder, FIELD)
    index.write_text("{}")
    assert refusal(folder) == f"{index} has no weight_map from tensors to files"
