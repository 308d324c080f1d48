"""The config.json and generation_config.json that a GGUF file's metadata amounts to."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnout.errors import TurnoutError, invalid
from turnout.gguf_files.header import Header

# Layers by which llama.cpp knows the models whose queries are scaled by hidden size over heads.
GEMMA2_27B, GEMMA3_27B = 46, 62
GEMMA3_LOCAL_THETA = 10000.0
ROPE_FREQS = "rope_freqs.weight"
# Every Llama 3.1 and later has these; GGUF stores only the factors that follow from them.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Tokens that end an answer: of the text, of a turn, of a message.
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Metadata:
    """Metadata of one model: by full key, or by key under the architecture's name.

    Args:
        header: of the files.
        files: that hold the model; the first is named in messages.
        field: its place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: no architecture is named, or one that is not supported.
    """

    def __init__(self, header: Header, files: Sequence[Path], field: str) -> None:
        self.values, self.tensors = header.metadata, header.tensors
        self._files, self._field = files, field
        self.architecture = str(self.need("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            supported = ", ".join(sorted(ARCHITECTURES))
            raise self.refusal(f"general.architecture {self.architecture!r} is not supported; supported: {supported}")

    def refusal(self, message: str) -> TurnoutError:
        """An error that names the file and the field of the configuration."""
        return invalid(self._field, f"{self._files[0]}: {message}")

    def need(self, key: str) -> Any:
        """The value of a key.

        Raises:
            TurnoutError: INVALID_ARGUMENT: it is absent.
        """
        if key not in self.values:
            raise self.refusal(f"its metadata lacks {key}")
        return self.values[key]

    def own(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture; the default where it is absent."""
        return self.values.get(f"{self.architecture}.{key}", default)

    def own_needed(self, key: str) -> Any:
        """The same, which must not be absent."""
        return self.need(f"{self.architecture}.{key}")

    def floats(self, name: str) -> list[float]:
        """The numbers of a small float32 tensor.

        Raises:
            TurnoutError: INVALID_ARGUMENT: it is stored as another type.
        """
        stored = self.tensors[name]
        if stored.kind != "F32":
            raise self.refusal(f"{name} is stored as {stored.kind}; supported: F32")
        with self._files[stored.file].open("rb") as stream:
            stream.seek(stored.offset)
            return list(struct.unpack(f"<{stored.size // 4}f", stream.read(stored.size)))

    def has(self, ending: str) -> bool:
        """Whether any tensor's name ends so."""
        return any(name.endswith(ending) for name in self.tensors)


def config_of(data: Metadata) -> dict[str, Any]:
    """The Hugging Face configuration of a model.

    Raises:
        TurnoutError: INVALID_ARGUMENT: something is absent, or has no equal in transformers.
    """
    hidden, heads = data.own_needed("embedding_length"), data.own_needed("attention.head_count")
    if "token_embd.weight" not in data.tensors:
        raise data.refusal("it lacks the tensor token_embd.weight")
    config = {
        "vocab_size": data.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": data.own_needed("feed_forward_length"),
        "num_hidden_layers": data.own_needed("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": data.own("attention.head_count_kv", heads),
        "max_position_embeddings": data.own_needed("context_length"),
        "rms_norm_eps": data.own_needed("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in data.tensors,
        "bos_token_id": data.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": data.values.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": data.values.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }
    if not all(type(config[key]) is int for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")):
        raise data.refusal("its layers have different numbers of heads or widths, which is not supported")
    return config | ARCHITECTURES[data.architecture](data, config)


def generation_of(data: Metadata) -> dict[str, Any]:
    """The generation_config.json of a model: the tokens that end an answer."""
    ends = [data.values.get(f"tokenizer.ggml.{name}") for name in ENDS]
    config = {
        "bos_token_id": data.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(each for each in ends if each is not None)),
        "pad_token_id": data.values.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in config.items() if value not in (None, [])}


def _rope(data: Metadata, theta: float = 10000.0) -> dict[str, Any]:
    """The rotary embedding's parameters."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": data.own("rope.freq_base", theta)}
    kind = data.own("rope.scaling.type", "linear")  # as llama.cpp reads a file without it
    factor = data.own("rope.scaling.factor", data.own("rope.scale_linear"))  # the latter in old files
    if ROPE_FREQS in data.tensors:
        return _llama3_rope(data, rope)
    if kind == "none" or (kind == "linear" and not factor):
        return rope
    if kind not in ("linear", "yarn"):
        raise data.refusal(f"rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")
    rope |= {"rope_type": kind, "factor": factor or data.own_needed("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = data.own_needed("rope.scaling.original_context_length")
        if (attention := data.own("rope.scaling.attn_factor")) is not None:
            rope["attention_factor"] = attention
    return rope


def _llama3_rope(data: Metadata, rope: dict[str, Any]) -> dict[str, Any]:
    """The scaling of Llama 3.1 from the factors that llama.cpp divides the frequencies by.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the factors follow from no such scaling.
    """
    found = data.floats(ROPE_FREQS)
    scaling = LLAMA3_ROPE | {"factor": max(found)}
    low, high, length = (LLAMA3_ROPE[key] for key in LLAMA3_ROPE)
    for place, factor in enumerate(found):
        waves = length / (2 * math.pi * rope["rope_theta"] ** (place / len(found)))
        smooth = min(max((waves - low) / (high - low), 0.0), 1.0)
        if not math.isclose(factor, 1 / ((1 - smooth) / scaling["factor"] + smooth), rel_tol=1e-3):
            raise data.refusal(f"{ROPE_FREQS} holds other factors than those of Llama 3.1, which is not supported")
    return rope | scaling | {"rope_type": "llama3"}


def _head_dim(data: Metadata, config: Mapping[str, Any]) -> int:
    found: int = data.own("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    return found


def _llama(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = data.own("attention.key_length", data.own("rope.dimension_count", _head_dim(data, config)))
    own = {"rope_parameters": _rope(data), "head_dim": head_dim}
    if experts := data.own("expert_count", 0):
        used = data.own_needed("expert_used_count")
        own |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": None}
        return own | {"num_local_experts": experts, "num_experts_per_tok": used}
    biases = {"attention_bias": data.has("attn_q.bias"), "mlp_bias": data.has("ffn_down.bias")}
    return own | biases | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def _smollm3(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    # llama.cpp leaves every fourth layer without positions, and stores no number for it.
    named = {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 4}
    return named | {"rope_parameters": _rope(data), "use_sliding_window": False, "sliding_window": None}


def _qwen2(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    named = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    return named | {"rope_parameters": _rope(data), "use_sliding_window": False}


def _qwen3(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    named = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": _head_dim(data, config)}
    return named | {"rope_parameters": _rope(data), "use_sliding_window": False, "attention_bias": False}


def _qwen3_moe(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    experts = {
        "num_experts": data.own_needed("expert_count"),
        "num_experts_per_tok": data.own_needed("expert_used_count"),
        "moe_intermediate_size": data.own_needed("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp computes it
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    named = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    return _qwen3(data, config) | experts | named


def _gemma2(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = _head_dim(data, config)
    large = config["num_hidden_layers"] == GEMMA2_27B
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": head_dim,
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if large else head_dim,
        "attn_logit_softcapping": data.own_needed("attn_logit_softcapping"),
        "final_logit_softcapping": data.own_needed("final_logit_softcapping"),
        "sliding_window": data.own_needed("attention.sliding_window"),
        "rope_parameters": _rope(data),
    }


def _gemma3(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = _head_dim(data, config)
    large = config["num_hidden_layers"] == GEMMA3_27B
    local = {"rope_type": "default", "rope_theta": data.own("rope.freq_base_swa", GEMMA3_LOCAL_THETA)}
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": head_dim,
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if large else head_dim,
        "final_logit_softcapping": data.own("final_logit_softcapping"),
        "sliding_window": data.own_needed("attention.sliding_window"),
        "rope_parameters": {"full_attention": _rope(data, 1e6), "sliding_attention": local},
    }


def _phi3(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if data.has("rope_factors_long.weight"):
        raise data.refusal("rotary scaling longrope (rope_factors_long.weight) is not supported in a GGUF file")
    head_dim = _head_dim(data, config)
    rope = _rope(data) | {"partial_rotary_factor": data.own("rope.dimension_count", head_dim) / head_dim}
    window = data.own("attention.sliding_window", 0) or None
    named = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
    return named | {"rope_parameters": rope, "sliding_window": window}


def _olmo2(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if data.own("attention.sliding_window", 0):
        raise data.refusal("OLMo 3 (olmo2.attention.sliding_window) is not supported in a GGUF file")
    named = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "attention_bias": False}
    return named | {"rope_parameters": _rope(data)}


# `general.architecture` -> what its configuration has in addition to the common fields.
ARCHITECTURES: dict[str, Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
}
