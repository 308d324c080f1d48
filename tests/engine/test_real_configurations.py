"""Configurations of published models: accepted, and equal to Hugging Face's forward in a twin of tiny sizes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from engine.architectures import architecture_of
from engine.loaded_model import check_supported
from engine.rope import context_length
from engine.twin import twin_difference, twin_of

SLIDING, FULL = "sliding_attention", "full_attention"
# model_type, settings of its config.json (but Phi-4-mini's factors), tokens that its positions allow.
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "OLMo-2-1124-7B": (
        "olmo2",
        {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
         "max_position_embeddings": 4096, "rope_theta": 500000, "vocab_size": 100352},
        4096,
    ),
    "Olmo-3-7B": (
        "olmo3",
        {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "max_position_embeddings": 65536, "rope_theta": 500000, "vocab_size": 100278,
         "sliding_window": 4096, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8,
         "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                          "original_max_position_embeddings": 8192, "rope_type": "yarn"}},
        65536,
    ),
    "granite-3.3-2b-instruct": (
        "granite",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 32,
         "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 1e7, "vocab_size": 49159,
         "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
         "residual_multiplier": 0.22, "tie_word_embeddings": True},
        131072,
    ),
    "GLM-4-9B-0414": (
        "glm4",
        {"hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32,
         "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True,
         "max_position_embeddings": 32768, "rope_theta": 10000.0, "vocab_size": 151552},
        32768,
    ),
    "c4ai-command-r7b-12-2024": (
        "cohere2",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 132096, "rope_theta": 50000,
         "logit_scale": 0.25, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_switch": 4,
         "rotary_pct": 1.0, "position_embedding_type": "rope_gptj", "vocab_size": 256000},
        132096,
    ),
    "EXAONE-4.0-1.2B": (
        "exaone4",
        {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 65536, "rope_theta": 1000000,
         "sliding_window": None, "sliding_window_pattern": None, "layer_types": [FULL] * 30, "vocab_size": 102400,
         "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
        65536,
    ),
    "starcoder2-3b": (
        "starcoder2",
        {"hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30, "num_attention_heads": 24,
         "num_key_value_heads": 2, "max_position_embeddings": 16384, "rope_theta": 999999.4420358813,
         "sliding_window": 4096, "use_bias": True, "vocab_size": 49152},
        16384,
    ),
    "stablelm-2-1_6b": (
        "stablelm",
        {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 32,
         "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "use_qkv_bias": True, "rope_theta": 10000,
         "max_position_embeddings": 4096, "vocab_size": 100352},
        4096,
    ),
    "stablelm-2-12b": (
        "stablelm",
        {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 32,
         "num_key_value_heads": 8, "partial_rotary_factor": 0.25, "qk_layernorm": True, "rope_theta": 10000,
         "use_parallel_residual": True, "max_position_embeddings": 4096, "vocab_size": 100352},
        4096,
    ),
    "phi-2": (
        "phi",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "max_position_embeddings": 2048,
         "rope_theta": 10000.0, "vocab_size": 51200},
        2048,
    ),
    "Ministral-3-3B": (
        "ministral3",
        {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "sliding_window": None,
         "tie_word_embeddings": True, "vocab_size": 131072,
         "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
                             "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
                             "rope_theta": 1000000.0, "rope_type": "yarn"}},
        262144,
    ),
    "SmolLM3-3B": (
        "smollm3",
        {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
         "num_key_value_heads": 4, "max_position_embeddings": 65536, "rope_theta": 5000000.0, "vocab_size": 128256,
         "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "use_sliding_window": False},
        65536,
    ),
    "Phi-4-mini-instruct": (
        "phi3",
        {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24,
         "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "max_position_embeddings": 131072,
         "original_max_position_embeddings": 4096, "sliding_window": 262144, "rope_theta": 10000.0,
         "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1 + i for i in range(48)]},
         "tie_word_embeddings": True, "vocab_size": 200064},
        131072,
    ),
    "Llama with dynamic scaling": (
        "llama",
        {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 4.0}, "vocab_size": 32000},
        8192,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_accepted_and_a_tiny_twin_is_equal(name: str) -> None:
    kind, settings, length = PUBLISHED[name]
    config = AutoConfig.for_model(kind, **settings)
    assert architecture_of(config).listed
    check_supported(config)
    assert context_length(config) == length
    assert twin_difference(twin_of(config)) is None


def test_gpt2_as_published_is_accepted() -> None:
    config = AutoConfig.for_model("gpt2")
    check_supported(config)
    assert (context_length(config), config.hidden_size, config.vocab_size) == (1024, 768, 50257)
