"""Checkpoints every engine loads: random Llamas with a tokenizer, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.peers.workloads import VOCAB
from training.random_models import llama_config, random_model

SHAPES: dict[str, dict[str, Any]] = {
    "35 M": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1792,
    },
    "220 M": {
        "hidden_size": 1024,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
    },
}
TINY_VOCAB = 512  # reading a row is a device's work where there is one: it is to cost next to nothing
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
}


def random_checkpoint(shape: str, folder: Path) -> Path:
    """The folder of a random Llama of this shape, under `folder`; written unless it is there."""
    return _written(folder / shape.replace(" ", "").lower(), VOCAB, SHAPES[shape])


def tiny_checkpoint(folder: Path) -> Path:
    """A random Llama whose head and embedding cost next to nothing, for measurements of what is around the layers."""
    return _written(folder / "tiny", TINY_VOCAB, TINY)


def _written(target: Path, vocab: int, dimensions: dict[str, Any]) -> Path:
    if not (target / "tokenizer_config.json").is_file():
        config = llama_config(
            vocab, **dimensions, max_position_embeddings=8192, bos_token_id=0, eos_token_id=1, pad_token_id=2
        )
        model = random_model(config, seed=0).to(torch.bfloat16)
        model.save_pretrained(target)
        _word_tokenizer(vocab).save_pretrained(target)
    return target


def _word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """One word a token; no measurement encodes text, but every engine wants a tokenizer to load."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", pad_token="t2", unk_token="t3"
    )
