"""Checkpoints with random weights and a byte tokenizer: for tests, trials and speed measurements."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BYTE_VOCAB = 256 + len(SPECIAL)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and five special ones; round-trips any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL[2:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def llama_config(vocab_size: int = BYTE_VOCAB, **overrides: Any) -> LlamaConfig:
    """Make a Llama, of toy size by default."""
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": 257,  # as in `byte_tokenizer`
        "eos_token_id": 256,
        "bos_token_id": None,
    }
    return LlamaConfig(**{**settings, **overrides})


def random_model(config: Any, seed: int, spread: float = 0.0) -> Any:
    """A model with random float32 weights.

    Args:
        config: Hugging Face configuration.
        seed: of the weights.
        spread: standard deviation of every matrix; 0 keeps the architecture's own initialisation. Larger values
            make distributions peaked, as trained models' are.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    if spread:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, spread)
    return model
