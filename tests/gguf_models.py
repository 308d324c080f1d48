"""GGUF files of tiny models, written as llama.cpp's converter writes them, with the `gguf` package's map of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType as Kind

from training.random_models import byte_tokenizer

ARCHITECTURES = {
    **{"llama": "llama", "mixtral": "llama", "smollm3": "smollm3", "qwen2": "qwen2", "qwen3": "qwen3"},
    **{"qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "olmo2": "olmo2"},
}
PERMUTED = {"llama", "mixtral", "smollm3"}


def add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    """What a converter writes of a model's configuration."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    if config.model_type in ("llama", "mixtral", "phi3"):
        writer.add_rope_dimension_count(head_dim)
    if config.model_type in ("gemma2", "gemma3_text", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def add_tokenizer(writer: gguf.GGUFWriter, kind: str = "gpt2", **changed: Any) -> None:
    """The byte tokenizer, which has no merges."""
    tokenizer = byte_tokenizer()
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(changed.get("pre", "gpt-2"))
    writer.add_token_list(changed.get("tokens", tokens))
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    if "merges" in changed:
        writer.add_token_merges(changed["merges"])
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_pad_token_id(tokens.index("<|pad|>"))
    writer.add_chat_template(tokenizer.chat_template)


def converted(model: Any) -> dict[str, numpy.ndarray[Any, Any]]:
    """The tensors of a model by their GGUF names, float32."""
    config = model.config
    kind = config.model_type
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[kind]),
        config.num_hidden_layers,
    )
    made: dict[str, numpy.ndarray[Any, Any]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.float()
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith("experts.gate_up_proj"):
            half = value.shape[1] // 2
            made[f"blk.{layer}.ffn_gate_exps.weight"] = value[:, :half].contiguous().numpy()
            made[f"blk.{layer}.ffn_up_exps.weight"] = value[:, half:].contiguous().numpy()
            continue
        if name.endswith("experts.down_proj"):
            made[f"blk.{layer}.ffn_down_exps.weight"] = value.numpy()
            continue
        if kind in PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        stem, _, ending = name.rpartition(".")
        found = names.get_name(stem)
        assert found is not None, name
        made[f"{found}.{ending}"] = value.contiguous().numpy()
    return made


def write_gguf(path: Path, model: Any, kinds: dict[str, Kind] | None = None, **changed: Any) -> Path:
    """Write a model.

    Args:
        path: of the file.
        model: of transformers.
        kinds: types of tensors by the end of their names; float32 by default.
        changed: `tokenizer`: the options of `add_tokenizer`; `metadata`: more of it, by key; `tensors`: in place of
            the model's; `pairs`: of K types, raw bytes by name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, changed.get("architecture", ARCHITECTURES[model.config.model_type]))
    add_metadata(writer, model.config)
    if changed.get("tokenizer", {}) is not None:
        add_tokenizer(writer, **changed.get("tokenizer", {}))
    for key, value in changed.get("metadata", {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    for name, value in (changed.get("tensors") or converted(model)).items():
        kind = next((kind for end, kind in (kinds or {}).items() if name.endswith(end)), Kind.F32)
        if value.dtype == numpy.uint8:
            writer.add_tensor(name, value, raw_dtype=kind)
        elif kind is Kind.F32:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Where a block's float16 factors are, and how many times the scale each is: minimums put numbers around 0.
FACTORS = {
    Kind.Q4_0: ((0, 1),),
    Kind.Q4_1: ((0, 1), (2, -7.5)),
    Kind.Q5_0: ((0, 1),),
    Kind.Q5_1: ((0, 1), (2, -15.5)),
    Kind.Q8_0: ((0, 1),),
    Kind.Q4_K: ((0, 1), (2, 7.5)),
    Kind.Q5_K: ((0, 1), (2, 15.5)),
    Kind.Q6_K: ((208, 1),),
    Kind.Q3_K: ((108, 1),),
    Kind.Q2_K: ((80, 1), (82, 1.5)),
    Kind.IQ4_NL: ((0, 1),),
    Kind.IQ4_XS: ((0, 1),),
}


def random_blocks(kind: Kind, rows: int, columns: int, scale: float = 0.01) -> numpy.ndarray[Any, Any]:
    """Bytes of a matrix, uint8 [rows, bytes], also of types that the `gguf` package cannot write; factors are alike."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    made = torch.randint(0, 256, (rows * columns // block, size), dtype=torch.uint8).numpy()
    for place, times in FACTORS[kind]:
        made[:, place : place + 2] = numpy.frombuffer(numpy.float16(scale * times).tobytes(), numpy.uint8)
    return made.reshape(rows, -1)
