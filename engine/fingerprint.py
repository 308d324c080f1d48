"""Fingerprints of everything that a model's keys and values depend on except the tokens: contents, never names."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch

from turnout.gguf_files import LINKS

# Raised when the same numbers would lie otherwise in a block, or be computed otherwise on purpose.
KV_LAYOUT = 1
# Instructions by which kernels choose how to add up.
ISA = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"})
WEIGHTS = ("*.safetensors", "*.bin", LINKS, "config.json")
TOKENIZER = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model")
SPEECH = ("chat_template*", "generation_config.json")
Marks = tuple[tuple[str | int, ...], ...]


def content_digests(model: Path, tokenizer: Path) -> dict[str, str]:
    """Digests of all weights and settings in a checkpoint folder, and of a tokenizer's files.

    Args:
        model: folder of the checkpoint.
        tokenizer: folder of the tokenizer that made the token ids.

    Returns:
        "weights" and "tokenizer": 64 hexadecimal digits each.
    """
    return {"weights": _digest(model, WEIGHTS), "tokenizer": tokenizer_digest(tokenizer)}


def content_marks(model: Path, tokenizer: Path) -> Marks:
    """What is another one once any of the files of `content_digests` was written to, replaced or removed.

    Nothing is read: equal marks before and after show that a reader of the files in between read one content.
    """
    files = [*_files(model, WEIGHTS), *_files(tokenizer, TOKENIZER)]
    found = [(path, path.stat()) for path in files]
    return tuple(
        (str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in found
    )


def tokenizer_digest(tokenizer: Path) -> str:
    """The digest of a tokenizer's files alone."""
    return _digest(tokenizer, TOKENIZER)


def speech_digest(tokenizer: Path) -> str:
    """Of what keys and values do not depend on and answers do: how turns become a prompt, and what ends an answer.

    A template that stands in the tokenizer's own settings is of its digest.
    """
    return _digest(tokenizer, SPEECH)


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _digest(folder: Path, patterns: tuple[str, ...]) -> str:
    """Of every file's name and content, in the order of the names; read in full, at the speed of the hash."""
    whole = hashlib.sha256()
    for path in _files(folder, patterns):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        whole.update(len(path.name).to_bytes(4, "little") + path.name.encode() + content)
    return whole.hexdigest()


def numerics_class(backend: str, device: torch.device, kv_dtype: str = "auto") -> str:
    """By what, and on which kind of processor, numbers are computed: within a class they differ as between batches.

    Args:
        backend: name of the kernels.
        device: where they run.
        kv_dtype: as `models.NAME.kv_dtype`: what is read from keys and values that were rounded is another number.
    """
    kept = [] if kv_dtype == "auto" else [f"kv-{kv_dtype}"]
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return " ".join([backend, f"sm{major}{minor}", *kept])
    return " ".join([backend, platform.machine(), *sorted(ISA & _processor_flags()), *kept])


def _processor_flags() -> frozenset[str]:
    """As Linux names them; empty elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())
