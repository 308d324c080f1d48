"""From a Hugging Face checkpoint of the Llama architecture to GGUF, the format of llama.cpp, once.

Imported in an environment that holds nothing of ours; torch, safetensors and gguf are imported where they are used.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "safetensors", "gguf", "xllamacpp")

# Token i is written as one character, so that text llama.cpp answers with is token ids again. From here on there are
# no surrogates and nothing that a JSON writer escapes.
FIRST_CHARACTER = 0x10000

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def missing_packages() -> str | None:
    """What llama.cpp and the conversion need and this environment lacks."""
    return ", ".join(name for name in PACKAGES if importlib.util.find_spec(name) is None) or None


def token_text(token: int) -> str:
    """The one character a token is in the exported vocabulary."""
    return chr(FIRST_CHARACTER + token)


def token_ids(text: str) -> list[int]:
    """The tokens of a text of the exported vocabulary."""
    return [ord(character) - FIRST_CHARACTER for character in text]


def rope_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order.

    Hugging Face turns dimension i of a head with i + head_dim / 2, llama.cpp neighbours, 2i with 2i + 1.

    Args:
        weight: [heads * head_dim, hidden].
        heads: of the queries or of the keys.
    """
    rows, hidden = weight.shape
    return weight.view(heads, 2, rows // heads // 2, hidden).transpose(1, 2).reshape(rows, hidden)


def gguf_tensors(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors under llama.cpp's names and in its order.

    Args:
        config: of the checkpoint, as in config.json.
        weights: by their names in the checkpoint; an output matrix tied to the embedding may be left out.

    Raises:
        ValueError: the checkpoint has a tensor that a plain Llama does not have, a bias for instance.
    """
    heads = {"attn_q": int(config["num_attention_heads"]), "attn_k": int(config["num_key_value_heads"])}
    found = {}
    for name, weight in weights.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        target = _gguf_name(name)
        part = target.split(".")[-2]
        found[target] = rope_order(weight, heads[part]) if part in heads else weight
    return found


def _gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if kind == "weight" and module in _OUTER:
        return f"{_OUTER[module]}.weight"
    prefix, _, rest = module.removeprefix("model.layers.").partition(".")
    if kind != "weight" or not prefix.isdigit() or rest not in _NAMES:
        raise ValueError(f"{name} is no tensor of a plain Llama")
    return f"blk.{prefix}.{_NAMES[rest]}.weight"


def export(model_dir: str, dtype: str) -> Path:
    """The checkpoint as GGUF with weights in `dtype` ("bfloat16" or "float32"); written next to it unless it is there.

    Raises:
        ValueError: it is no plain Llama; says why.
    """
    target = Path(f"{model_dir}-llama-{dtype}.gguf")
    if not target.is_file():
        config = json.loads((Path(model_dir) / "config.json").read_text())
        unfinished = target.with_suffix(".part")
        _write(unfinished, config, gguf_tensors(config, _weights(model_dir)), dtype)
        unfinished.rename(target)
    return target


def shipped(model_dir: str, gguf_file: str) -> Path:
    """A copy of a GGUF file with its weights as they are packed, and the vocabulary that answers in token ids.

    Args:
        model_dir: the same model as a checkpoint, which the copy is written next to unless it is there.
        gguf_file: of a Llama.

    Raises:
        ValueError: the checkpoint is no plain Llama; says why.
    """
    import gguf

    target = Path(f"{model_dir}-llama-shipped.gguf")
    if not target.is_file():
        config = json.loads((Path(model_dir) / "config.json").read_text())
        unfinished = target.with_suffix(".part")
        writer = _writer(unfinished, config)
        for tensor in gguf.GGUFReader(gguf_file).tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        _finish(writer)
        unfinished.rename(target)
    return target


def _weights(model_dir: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(model_dir).glob("*.safetensors")):
        found.update(load_file(path))
    return found


def _write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: str) -> None:
    import gguf
    import torch

    writer = _writer(path, config)
    file_type, matrix_type = {
        "bfloat16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
        "float32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
    }[dtype]
    writer.add_file_type(file_type)
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or dtype == "float32":  # llama.cpp multiplies by norms in float32 only
            writer.add_tensor(name, tensor.float().contiguous().numpy())
        else:
            raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=matrix_type)
    _finish(writer)


def _writer(path: Path, config: Mapping[str, Any]) -> Any:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for name, value in hyperparameters(config).items():
        getattr(writer, f"add_{name}")(value)
    _add_vocabulary(writer, int(config["vocab_size"]))
    return writer


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes, norm and rotation of a checkpoint, by the `GGUFWriter.add_...` that takes them.

    Raises:
        ValueError: not a Llama, or one whose positions or activation llama.cpp would compute otherwise.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    expected: dict[str, tuple[Any, Any]] = {
        "model_type": (config["model_type"], "llama"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "rope_type": (rope.get("rope_type", "default"), "default"),
    }
    for key, (value, wanted) in expected.items():
        if value != wanted:
            raise ValueError(f"{key} is {value!r}; only {wanted!r} is converted")
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    return {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "head_count": heads,
        "head_count_kv": config["num_key_value_heads"],
        "key_length": head_dim,
        "value_length": head_dim,
        "rope_dimension_count": head_dim,
        "rope_freq_base": float(rope.get("rope_theta") or config["rope_theta"]),
        "layer_norm_rms_eps": float(config["rms_norm_eps"]),
    }


def _add_vocabulary(writer: Any, size: int) -> None:
    """A vocabulary without special tokens: llama.cpp can only end at an end token or never choose it, not ignore it.

    Of llama.cpp's kinds of tokenizer RWKV's is the one that has no special tokens by default.
    """
    import gguf

    add: Callable[[list[str]], None] = writer.add_token_list
    writer.add_tokenizer_model("rwkv")
    add([token_text(token) for token in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_add_bos_token(False)
