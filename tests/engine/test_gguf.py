"""GGUF models are the models that were written: every architecture, every type of a tensor, several files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig

from engine.checkpoints import read_config, read_model
from engine.costs.weight_sizes import weight_sizes
from engine.fingerprint import content_digests
from engine.gguf_weights import _numbers
from engine.loading import load_checkpoint
from engine.parallel.loading import mark_of
from pool.text import TextTokenizer
from tests.engine.harness import CPU
from tests.gguf_models import converted, random_blocks, write_gguf
from training.random_models import BYTE_VOCAB, byte_tokenizer, llama_config, random_model
from turnout import gguf_files
from turnout.calls import ChatMessage
from turnout.errors import TurnoutError
from turnout.gguf_files import described
from turnout.gguf_files.header import TYPES

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
SIZES = HEADS | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": BYTE_VOCAB, "max_position_embeddings": 128}
MOE = {"num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "rope_theta": 5000.0},
    "mixtral": MOE | {"num_local_experts": 4},
    "smollm3": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": MOE | {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "num_hidden_layers": 6},
    "phi3": {"sliding_window": None},
    "olmo2": {},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_files, "_cache", lambda: tmp_path)
    return tmp_path


def tiny(kind: str) -> Any:
    extra = {"bos_token_id": None, "eos_token_id": 257, "pad_token_id": 256, "rms_norm_eps": 1e-5}
    model = random_model(AutoConfig.for_model(kind, **SIZES | extra | CONFIGS[kind]), seed=3, spread=0.1)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            parameter.data = torch.rand_like(parameter)
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_is_the_one_that_was_written(kind: str, tmp_path: Path) -> None:
    expected = tiny(kind)
    folder = described(write_gguf(tmp_path / "model.gguf", expected))
    model, notes = read_model(folder, torch.float32)
    assert notes == []
    assert model.state_dict().keys() == expected.state_dict().keys()
    rounded = {"gemma2", "gemma3_text"}  # their norms are stored with 1 added
    for key, weight in expected.state_dict().items():
        difference = (model.state_dict()[key] - weight).abs().max().item()
        assert difference <= (1e-7 if kind in rounded and key.endswith("norm.weight") else 0), key
    tokens = torch.arange(5, 45)[None]
    with torch.inference_mode():
        error = (model(tokens).logits - expected(tokens).logits).abs().max().item()
    assert error <= (1e-4 if kind in rounded else 0)


def test_experts_count_twice_while_a_layer_of_them_is_merged(tmp_path: Path) -> None:
    folder = described(write_gguf(tmp_path / "model.gguf", tiny("mixtral")))
    experts = 4 * 3 * 64 * 96  # of one of the two layers
    largest = BYTE_VOCAB * 64
    chunk, permuted = 16 * max(largest, 4 * 64 * 96), 2 * 4 * 64 * 64
    assert weight_sizes(folder, torch.bfloat16).loading_bytes == chunk + permuted + 2 * experts


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0])
def test_every_type_is_dequantized_as_the_library_does(kind: Kind, tmp_path: Path) -> None:
    written = tiny("llama")
    kinds = {"attn_q.weight": kind, "ffn_down.weight": kind}
    model, _ = read_model(described(write_gguf(tmp_path / "model.gguf", written, kinds)), torch.float32)
    layer, stored = model.model.layers[0], converted(written)
    down = stored["blk.0.ffn_down.weight"]
    assert torch.equal(layer.mlp.down_proj.weight, torch.tensor(gguf.dequantize(gguf.quantize(down, kind), kind)))
    query = torch.tensor(gguf.dequantize(gguf.quantize(stored["blk.0.attn_q.weight"], kind), kind))
    rows = [head * 16 + 2 * pair + half for head in range(4) for half in range(2) for pair in range(8)]
    assert torch.equal(layer.self_attn.q_proj.weight, query[rows])


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_types_of_superblocks_are_too(kind: Kind, tmp_path: Path) -> None:
    torch.manual_seed(0)
    written = random_model(llama_config(hidden_size=256, intermediate_size=256, num_hidden_layers=1), seed=2)
    tensors = converted(written) | {"blk.0.attn_v.weight": random_blocks(kind, 128, 256)}
    path = write_gguf(tmp_path / "model.gguf", written, {"attn_v.weight": kind}, tensors=tensors)
    model, _ = read_model(described(path), torch.bfloat16)
    expected = torch.tensor(gguf.dequantize(tensors["blk.0.attn_v.weight"], kind))
    assert torch.equal(model.model.layers[0].self_attn.v_proj.weight, expected.bfloat16())


def test_blocks_by_hand() -> None:
    half = numpy.frombuffer(numpy.float16(0.5).tobytes(), numpy.uint8)
    two = numpy.frombuffer(numpy.float16(2).tobytes(), numpy.uint8)
    numbers = numpy.arange(16, dtype=numpy.uint8)
    nibbles = numbers | (15 - numbers) << 4  # low ones are the first half of a block, high ones the second
    up, down = numpy.arange(16), numpy.arange(15, -1, -1)
    assert _numbers(numpy.concatenate([half, nibbles]), "Q4_0", 1)[0].tolist() == [
        *(0.5 * (up - 8)),
        *(0.5 * (down - 8)),
    ]
    assert _numbers(numpy.concatenate([half, two, nibbles]), "Q4_1", 1)[0].tolist() == [
        *(0.5 * up + 2),
        *(0.5 * down + 2),
    ]
    signed = numpy.arange(-16, 16, dtype=numpy.int8).view(numpy.uint8)
    assert _numbers(numpy.concatenate([half, signed]), "Q8_0", 1)[0].tolist() == (0.5 * numpy.arange(-16, 16)).tolist()


def test_every_type_that_is_not_refused_is_dequantized() -> None:
    for name in TYPES:
        block, size = gguf.GGML_QUANT_SIZES[Kind[name]]
        assert _numbers(numpy.zeros(2 * size, numpy.uint8), name, 2).shape == (2, block)


def test_chunks_of_rows_make_the_same_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = described(write_gguf(tmp_path / "model.gguf", tiny("llama"), {"weight": Kind.Q8_0}))
    whole, _ = read_model(folder, torch.bfloat16)
    monkeypatch.setattr("engine.gguf_weights.CHUNK", 5 * 64)
    parts, _ = read_model(folder, torch.bfloat16)
    assert all(torch.equal(parts.state_dict()[key], weight) for key, weight in whole.state_dict().items())


def test_the_engine_runs_it_and_the_tokenizer_is_the_one_written(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny("llama"))
    checkpoint = load_checkpoint(described(path), torch.float32, CPU)  # checks its forward
    assert checkpoint.architecture == "llama"
    assert checkpoint.num_parameters == weight_sizes(described(path), torch.float32).num_parameters
    mine = TextTokenizer(described(path))
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    other = TextTokenizer(tmp_path / "tokenizer")
    assert mine.vocabulary() == other.vocabulary()
    assert mine.eos_ids == frozenset({byte_tokenizer().eos_token_id})
    text = "It's 12 o'clock,  <|end|>\n\n\t ünïcödé 漢字"
    assert mine.encode(text) == other.encode(text)
    assert mine.encode_chat([ChatMessage("user", text)]) == other.encode_chat([ChatMessage("user", text)])


def test_two_readers_of_one_content_agree_on_its_digests(tmp_path: Path) -> None:
    """A copy elsewhere, as on another node, is described in a folder of its own."""
    one = described(write_gguf(tmp_path / "a/model.gguf", tiny("qwen3")))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/other.gguf").write_bytes((tmp_path / "a/model.gguf").read_bytes())
    two = described(tmp_path / "b/other.gguf")
    assert one != two
    assert content_digests(one, one) == content_digests(two, two)
    assert mark_of(one) == mark_of(two)
    assert load_checkpoint(one, torch.float32, CPU).digest == load_checkpoint(two, torch.float32, CPU).digest
    changed = described(write_gguf(tmp_path / "a/model.gguf", tiny("qwen3"), {"ffn_down.weight": Kind.F16}))
    assert changed != one
    assert content_digests(changed, changed)["weights"] != content_digests(two, two)["weights"]


def test_factors_of_llama_3_become_its_scaling(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = llama_config(rope_parameters=rope | {"original_max_position_embeddings": 8192}, head_dim=64)
    model = random_model(config, seed=1)
    plain = 1 / 5e5 ** (torch.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq).float().numpy()
    tensors = converted(model) | {"rope_freqs.weight": factors}
    read = read_config(described(write_gguf(tmp_path / "model.gguf", model, tensors=tensors)))
    assert read.rope_parameters == config.rope_parameters
    tensors["rope_freqs.weight"] = factors * numpy.float32(1.5)
    with pytest.raises(TurnoutError, match=r"rope_freqs\.weight holds other factors than those of Llama 3\.1"):
        described(write_gguf(tmp_path / "other.gguf", model, tensors=tensors))


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    tensors = converted(model) | {"blk.0.attn_sinks.weight": numpy.zeros(4, numpy.float32)}
    path = write_gguf(tmp_path / "model.gguf", model, tensors=tensors)
    with pytest.raises(TurnoutError, match=r"model\.gguf: tensor blk\.0\.attn_sinks\.weight is unknown to llama"):
        read_model(described(path), torch.float32)
