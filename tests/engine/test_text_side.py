"""Checkpoints of models of text and images: their text side is run, and answers as the whole model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from engine.architectures.base import TINY, TINY_WINDOW
from engine.checkpoints import read_config
from engine.costs.limits import read_shape
from engine.forward_check import CHECK_CHUNKS, our_logits
from engine.loading import load_checkpoint
from tests.engine.test_quantized import CASES
from training.random_models import byte_tokenizer
from turnout.config import ModelConfig
from turnout.errors import TurnoutError

CPU = torch.device("cpu")
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXTS: dict[str, dict[str, Any]] = {
    "gemma3": {"head_dim": 8, "sliding_window": TINY_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4": {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 5},
    "llava": {},
    "mistral3": {"model_type": "ministral3", "head_dim": 8},
}
WHOLES: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4, "tie_word_embeddings": True},
    "llama4": {
        "vision_config": {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    },
    "mistral3": {"vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16}},
}


def whole_model(kind: str) -> Any:
    """A tiny wrapper with random weights."""
    torch.manual_seed(3)
    settings = {"text_config": {**TINY, **TEXTS[kind]}, "vision_config": VISION, **WHOLES.get(kind, {})}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **settings)).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    """Of the tokens that `our_logits` feeds."""
    count = sum(CHECK_CHUNKS)
    ids = torch.arange(1, count + 1) * 7919 % TINY["vocab_size"]
    logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize(("kind", "renamed"), [*((kind, False) for kind in TEXTS), ("gemma3", True), ("llava", True)])
def test_a_wrapper_runs_as_its_text_side(kind: str, renamed: bool, tmp_path: Path) -> None:
    whole = whole_model(kind)
    expected = logits_of(whole)
    whole.save_pretrained(tmp_path)
    if renamed:  # as the modules are named
        named = dict(whole.state_dict())
        if kind != "llava":  # where it is the embedding
            named.pop("lm_head.weight", None)
        file = tmp_path / "model.safetensors"
        save_file({name: each.clone() for name, each in named.items()}, file, {"format": "pt"})
    byte_tokenizer().save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path, torch.float32, CPU)
    got = our_logits(checkpoint.plan, CHECK_CHUNKS, TINY["vocab_size"], CPU)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    stored = load_file(tmp_path / "model.safetensors")
    others = sum("language_model." not in name and not name.startswith("lm_head.") for name in stored)
    note = f"text side of {kind!r} only: {others} weights of its other parts are not loaded; images are refused"
    assert checkpoint.notes[0] == f"{tmp_path}: {note}"
    _, shape = read_shape("m", ModelConfig(path=str(tmp_path)))
    assert (shape.num_parameters, shape.vocab_size) == (checkpoint.num_parameters, TINY["vocab_size"])


@pytest.mark.parametrize(
    ("kind", "case", "place"),
    [("mistral3", "int8", None), ("llava", "plain fp8, block", None), ("gemma3", "int4, groups", "text_config")],
)
def test_the_text_side_of_a_quantized_wrapper(kind: str, case: str, place: str | None, tmp_path: Path) -> None:
    whole = whole_model(kind)
    whole.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name, layer in whole.model.language_model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            stem = f"language_model.model.{name}"
            tensors, layer.weight.data = CASES[case].make(*layer.weight.shape)
            del stored[f"{stem}.weight"]
            stored |= {f"{stem}.{part}": tensor for part, tensor in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    (values[place] if place else values)["quantization_config"] = CASES[case].settings
    (tmp_path / "config.json").write_text(json.dumps(values))
    byte_tokenizer().save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path, torch.float32, CPU)
    got = our_logits(checkpoint.plan, CHECK_CHUNKS, TINY["vocab_size"], CPU)
    torch.testing.assert_close(got, logits_of(whole), atol=1e-4, rtol=0)
    assert [f"{tmp_path}: {note}" for note in CASES[case].notes] == checkpoint.notes[1:]
    _, shape = read_shape("m", ModelConfig(path=str(tmp_path)))
    assert shape.num_parameters == checkpoint.num_parameters
    values["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(TurnoutError, match="quantization_config: mxfp4 is not supported; supported: gptq, awq"):
        read_config(tmp_path)


def test_an_unknown_wrapper_and_an_unknown_text_side_are_refused_by_name(tmp_path: Path) -> None:
    AutoConfig.for_model("internvl", text_config={**TINY, "model_type": "qwen2"}).save_pretrained(tmp_path)
    with pytest.raises(TurnoutError, match="the text side of 'internvl' is not supported; supported: that of gemma3,"):
        read_config(tmp_path)
    AutoConfig.for_model("qwen3_5").save_pretrained(tmp_path)
    with pytest.raises(TurnoutError, match="'qwen3_5_text' is not supported: layers of kind 'linear_attention'"):
        read_config(tmp_path)
