"""Weights of GGUF models: which of them each stored tensor is, with what llama.cpp's converter did to it undone."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy
import torch

from engine.gguf_blocks import integers_of
from engine.quantized.base import LazyWeight, empty_pages
from engine.quantized.integers import IntegerWeight
from turnout.checkpoint_files import read_config_file
from turnout.errors import invalid
from turnout.gguf_files import gguf_files, index_of
from turnout.gguf_files.header import StoredTensor

Change = Callable[[torch.Tensor], torch.Tensor]
CHUNK = 1 << 22  # numbers that are dequantized at once
CHUNK_BYTES = 16  # what the library needs for one of them at most
# Names of most models, without `.weight` or `.bias`.
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# By the model type in transformers: what differs.
NAMES = {
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "olmo2": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen3_moe": {"ffn_gate_inp": "mlp.gate"},
}
# Tensors of all experts of a layer, and the name of one.
EXPERTS = {
    "mixtral": {
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    },
    "qwen3_moe": {f"ffn_{key}_exps": f"mlp.experts.{{}}.{key}_proj" for key in ("gate", "down", "up")},
}
# Queries and keys whose halves are interleaved; norms that are stored as the factor, not as its distance from 1.
PERMUTED = frozenset({"llama", "mixtral", "smollm3"})
OFFSET_NORMS = frozenset({"gemma2", "gemma3_text"})
NOT_WEIGHTS = frozenset({"rope_freqs.weight"})  # see `turnout.gguf_files.settings`


def gguf_state(folder: Path, dtype: torch.dtype, field: str) -> dict[str, LazyWeight] | None:
    """The weights of a described GGUF model by their names in transformers, made when they are loaded.

    Args:
        folder: of `turnout.gguf_files.described`; or any other.
        dtype: of the weights from now on.
        field: the model's place in the configuration, for messages.

    Returns:
        None where the folder describes no GGUF model.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: a tensor that this architecture has no place for.
    """
    tensors = index_of(folder)
    if tensors is None:
        return None
    config = read_config_file(folder, field)
    data = [numpy.memmap(file, mode="r") for file in gguf_files(folder)]
    lock = threading.Lock()
    state = {}
    for stored_name, stored in tensors.items():
        if stored_name in NOT_WEIGHTS:
            continue
        change, permuted = _change(stored_name, config), _is_permuted(stored_name, config["model_type"])
        for name, part in _places(stored_name, stored, config["model_type"], folder, field):
            make = partial(_dense, data[part.file], part, dtype, change)
            integers = partial(_integers, data[part.file], part, change if permuted else None)
            state[name] = LazyWeight(part.shape, dtype, make, lock, integers)
    return state


def gguf_sizes(tensors: Mapping[str, StoredTensor], kind: str) -> tuple[int, int]:
    """How many numbers a model's weights have, and what making them takes in addition at most, bytes.

    Args:
        tensors: of `index_of`.
        kind: the model's type in transformers.
    """
    counts = {name: prod(stored.shape) for name, stored in tensors.items() if name not in NOT_WEIGHTS}
    changed = max((count for name, count in counts.items() if _is_permuted(name, kind)), default=0)
    return sum(counts.values()), CHUNK_BYTES * min(CHUNK, max(counts.values(), default=0)) + 2 * 4 * changed


def _places(
    stored_name: str, stored: StoredTensor, kind: str, folder: Path, field: str
) -> Iterator[tuple[str, StoredTensor]]:
    """Names of the weights that a tensor holds, and where each of them is."""
    stem, _, ending = stored_name.rpartition(".")
    if (found := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)) is None:
        name = WHOLE.get(stem)
    else:
        layer, key = found[1], found[2]
        own = (LAYER | NAMES.get(kind, {})).get(key)
        name = own and f"model.layers.{layer}.{own}"
        if expert := EXPERTS.get(kind, {}).get(key):
            count, *shape = stored.shape
            for number in range(count):
                offset = stored.offset + stored.size // count * number
                part = StoredTensor(stored.kind, tuple(shape), stored.file, offset, stored.size // count)
                yield f"model.layers.{layer}.{expert.format(number)}.{ending}", part
            return
    if name is None or ending not in ("weight", "bias"):
        raise invalid(field, f"{gguf_files(folder)[0].resolve()}: tensor {stored_name} is unknown to {kind}")
    yield f"{name}.{ending}", stored


def _change(stored_name: str, config: Mapping[str, Any]) -> Change | None:
    """What is done to a tensor in float32, where anything is."""
    kind, key = config["model_type"], stored_name.split(".")[-2]
    if _is_permuted(stored_name, kind):
        return partial(_halves, config["num_attention_heads" if key == "attn_q" else "num_key_value_heads"])
    if kind in OFFSET_NORMS and key.endswith("norm"):
        return partial(torch.sub, other=1)
    return None


def _is_permuted(stored_name: str, kind: str) -> bool:
    return kind in PERMUTED and stored_name.split(".")[-2] in ("attn_q", "attn_k")


def _halves(heads: int, stored: torch.Tensor) -> torch.Tensor:
    """Rows of each head in transformers' order: the first of every rotated pair, then the second ones."""
    pairs = stored.view(heads, stored.shape[0] // heads // 2, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)


def _dense(data: Any, stored: StoredTensor, dtype: torch.dtype, change: Change | None) -> torch.Tensor:
    """A weight of `dtype`, dequantized in chunks of rows; one that is changed, in float32 as a whole."""
    whole = empty_pages(stored.shape, torch.float32 if change else dtype)
    rows = whole.view(-1, stored.shape[-1])
    row_bytes = stored.size // len(rows)
    step = max(1, CHUNK // stored.shape[-1])
    for start in range(0, len(rows), step):
        count = min(step, len(rows) - start)
        first = stored.offset + start * row_bytes
        rows[start : start + count] = _numbers(data[first : first + count * row_bytes], stored.kind, count)
    return whole if change is None else empty_pages(stored.shape, dtype).copy_(change(whole))


def _integers(data: Any, stored: StoredTensor, order: Change | None) -> IntegerWeight | None:
    """A weight as it is stored; None where it is not one of integers."""
    if len(stored.shape) != 2:
        return None
    made = integers_of(data[stored.offset : stored.offset + stored.size], stored.kind, *stored.shape)
    return made if made is None or order is None else made.changed(order)


def _numbers(stored: Any, kind: str, rows: int) -> torch.Tensor:
    """Rows of float32 of their bytes in the file."""
    from gguf import GGMLQuantizationType, dequantize

    plain = {"F32": numpy.float32, "F16": numpy.float16}
    if kind in plain:
        return torch.from_numpy(numpy.array(stored).view(plain[kind]).reshape(rows, -1))
    return torch.from_numpy(dequantize(numpy.array(stored).reshape(rows, -1), GGMLQuantizationType[kind]))
