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


def random_checkpoint(shape: str, folder: Path) -> Path:
    """The folder of a random Llama of this shape, under `folder`; written unless it is there."""
    target = folder / shape.replace(" ", "").lower()
    if not (target / "tokenizer_config.json").is_file():
        config = llama_config(
            VOCAB, **SHAPES[shape], max_position_embeddings=8192, bos_token_id=0, eos_token_id=1, pad_token_id=2
        )
        model = random_model(config, seed=0).to(torch.bfloat16)
        model.save_pretrained(target)
        _word_tokenizer().save_pretrained(target)
    return target


def _word_tokenizer() -> PreTrainedTokenizerFast:
    """One word a token; no measurement encodes text, but every engine wants a tokenizer to load."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", pad_token="t2", unk_token="t3"
    )
