"""The files of a checkpoint folder: what can be refused before any weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from turnout.errors import invalid
from turnout.gguf_files import LINKS, gguf_files

# Formats whose weights are read, see `engine.quantized`.
READ_QUANTIZED = ("gptq", "awq", "compressed-tensors", "fp8")
SUPPORTED = f"{', '.join(READ_QUANTIZED)}, or unquantized weights in float32, bfloat16 or float16"
# What quantizers write into config.json, and which of them does where the value does not say so itself.
QUANTIZED_FIELDS = {
    "quantization_config": "an unnamed quant_method",
    "compression_config": "compressed-tensors",
    "quantization": "mlx",
}
# Files that quantizers write next to config.json.
QUANTIZED_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
# One of these holds the vocabulary.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")
CONFIG = "config.json"
JSON_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# Everything that says how a model reads, writes and ends text.
TEXT_FILES = (*JSON_FILES, *TOKENIZERS, "*.model", "merges.txt", "chat_template.jinja", "chat_template.json")
ADAPTER = "adapter_config.json"  # of LoRA and its like
INDEX = ".index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first of these, or of their indices, is read
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", LINKS)
POINTER = b"version https://git-lfs"
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})


def check_checkpoint(folder: Path, field: str) -> None:
    """Refuse a folder that is no checkpoint this program loads; of weight files, only the headers are read.

    For the process that loads the model; others need `check_description` only.

    Args:
        folder: of a Hugging Face checkpoint.
        field: its place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`, naming the file and what is supported.
    """
    check_description(folder, field)
    quantized = quantization(folder, field) is not None
    for weights in weight_files(folder, field):
        _check_weights(weights, quantized, field)


def check_description(folder: Path, field: str) -> None:
    """Refuse a checkpoint by what lies next to its weights: configuration, tokenizer, quantization.

    Args:
        folder: of a Hugging Face checkpoint, whose weight files may be absent.
        field: its place in the configuration, for messages.

    Raises:
        TurnoutError: as `check_checkpoint`, except for faults of weight files.
    """
    values = read_config_file(folder, field)
    _check_ends(values, folder / CONFIG, field)
    quantized = quantization(folder, field)
    if quantized is not None and quantized.method not in READ_QUANTIZED:
        raise invalid(field, f"{folder}: {not_supported(quantized.place, quantized.method)}")
    if (folder / ADAPTER).is_file():
        message = f"{ADAPTER}: adapters are not applied; supported: the model that they were merged into"
        raise invalid(field, f"{folder}: {message}")
    for name in JSON_FILES:
        if (folder / name).is_file():
            _check_ends(_read_object(folder / name, field), folder / name, field)
    if not any(file.is_file() for pattern in TOKENIZERS for file in folder.glob(pattern)):
        raise invalid(field, f"{folder} has no tokenizer: none of {', '.join(TOKENIZERS)}")


def check_present(folder: Path, field: str) -> None:
    """Refuse as `check_checkpoint` where any weight file is there; as `check_description` on a node that has none.

    Args:
        folder: of a Hugging Face checkpoint.
        field: its place in the configuration, for messages.

    Raises:
        TurnoutError: as `check_checkpoint`.
    """
    if has_weights(folder):
        check_checkpoint(folder, field)
        return
    check_description(folder, field)
    if part := _unfinished_below(folder):
        raise invalid(field, f"{folder} has no weights{part}")


def has_weights(folder: Path) -> bool:
    """Whether any weight file is there, which need not be all; an index of such files is none."""
    return any(file.is_file() for pattern in WEIGHT_FILES for file in folder.glob(pattern))


def read_config_file(folder: Path, field: str) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`, with what is there instead.
    """
    file = folder / CONFIG
    if file.is_file():
        return _read_object(file, field)
    needed = "a GGUF file or the folder of a Hugging Face checkpoint is needed"
    if folder.is_file():
        raise invalid(field, f"{folder} is a file; {needed}")
    found = f"no checkpoint (config.json) in {str(folder)!r}{_unfinished(folder)}"
    if (folder / ADAPTER).is_file():
        message = f"it holds an adapter ({ADAPTER}); merge it into its base model and save that"
        raise invalid(field, f"{found}: {message}")
    raise invalid(field, found)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a checkpoint are quantized.

    Attributes:
        place: the field or file that says so.
        method: the quantizer, as in `quant_method`.
        settings: what else it says.
    """

    place: str
    method: str
    settings: Mapping[str, Any]


def quantization(folder: Path, field: str) -> Quantization | None:
    """How a folder says that its weights are quantized, in config.json or in a quantizer's own file; None: it does not.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: a file cannot be read.
    """
    values = read_config_file(folder, field)
    text = values.get("text_config")  # of a model of text and images
    for prefix, each in (("", values), ("text_config.", text if isinstance(text, Mapping) else {})):
        if (found := quantization_of(each)) is not None:
            (key, method), settings = found, each[found[0]]
            return Quantization(prefix + key, method, settings if isinstance(settings, Mapping) else {})
    for name, method in QUANTIZED_FILES.items():
        if (folder / name).is_file():
            return Quantization(name, method, _read_object(folder / name, field))
    return None


def quantization_of(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Which field of a model's configuration says that its weights are quantized, and how; None: none does."""
    for key, otherwise in QUANTIZED_FIELDS.items():
        found = values.get(key)
        if found is None:
            continue
        if not isinstance(found, Mapping):
            return key, str(found)
        bits = any(found.get(key) for key in ("load_in_4bit", "load_in_8bit"))
        return key, str(found.get("quant_method") or ("bitsandbytes" if bits else otherwise))
    return None


def not_supported(place: str, method: str) -> str:
    """The refusal of quantized weights.

    Args:
        place: the field or file that names the method.
        method: the quantizer.
    """
    return f"{place}: {method} is not supported; supported: {SUPPORTED}"


def weight_files(folder: Path, field: str = "model") -> list[Path]:
    """The weight files that transformers reads, which need not be all there are.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: there are none, or one that the index lists is missing.
    """
    if found := gguf_files(folder):
        return found
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / (name + INDEX)
        if index.is_file():
            return _shards(index, field)
    lacks = f"{folder} has no weights: neither {WEIGHTS[0]} nor {WEIGHTS[1]}, nor an index of either"
    raise invalid(field, lacks + _unfinished(folder))


def tensors_of(file: Path, field: str = "model") -> Iterator[tuple[str, str, list[int]]]:
    """Name, stored dtype and shape of each tensor of a safetensors file, from its header.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: it is no such file, or its end is missing.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                yield name, part.get_dtype(), part.get_shape()
    except (SafetensorError, OSError) as error:
        if _begins(file, POINTER):
            raise invalid(field, f"{file} is a pointer of Git LFS: `git lfs pull` fetches the file itself") from None
        raise invalid(field, f"{file} is not a safetensors file, or not a whole one: {_line(error)}") from None


def _read_object(file: Path, field: str) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: it holds none, or cannot be read.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(field, f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"{file} is not valid JSON: {_line(error)}") from None
    if not isinstance(values, dict):
        raise invalid(field, f"{file} must hold a JSON object")
    return values


def _check_weights(file: Path, quantized: bool, field: str) -> None:
    """Refuse a safetensors file that is cut off, or has matrices that are not plain floats and not known as others."""
    if file.suffix != ".safetensors":
        if quantized and file.suffix == ".bin":
            raise invalid(field, f"{file}: quantized weights are read from safetensors files only; save them as such")
        return
    for name, kind, _ in tensors_of(file, field):
        if name.endswith("weight") and kind not in FLOATS and not quantized:
            raise invalid(field, f"{file}: {not_supported(name, f'a weight stored as {kind}')}")


def _check_ends(values: Mapping[str, Any], file: Path, field: str) -> None:
    """Refuse ends of text that are no token ids, over which transformers fails during a request."""
    found = values.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(each) is int for each in ids):
        raise invalid(field, f"{file}: eos_token_id must be an id or a list of ids, not {found!r}")


def _shards(index: Path, field: str) -> list[Path]:
    listed = _read_object(index, field).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise invalid(field, f"{index} has no weight_map from tensors to files")
    files = [index.parent / name for name in sorted(set(listed.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        lacks = f"{index.parent} lacks {missing[0]}{more}, which {index.name} lists"
        raise invalid(field, lacks + _unfinished(index.parent))
    return files


def _unfinished(folder: Path) -> str:
    """What shows that a folder was not downloaded to its end, for the end of a message; empty: nothing does."""
    if folder.name.startswith("models--") and (folder / "snapshots").is_dir():
        repository = folder.name.removeprefix("models--").replace("--", "/", 1)
        return f": it is a folder of the hub's cache; write hf:{repository}"
    if folder.parent.name == "snapshots" and (part := _part_in(folder.parent.parent / "blobs")):
        return part
    return _unfinished_below(folder)


def _unfinished_below(folder: Path) -> str:
    """As `_unfinished`, of a folder that the hub's client downloads to."""
    return _part_in(folder / ".cache" / "huggingface" / "download")


def _part_in(place: Path) -> str:
    part = next(place.rglob("*.incomplete"), None)
    return f": its download has not ended ({part.name}); repeat it" if part is not None else ""


def _begins(file: Path, data: bytes) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(data)) == data


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
