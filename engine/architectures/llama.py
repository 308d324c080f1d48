"""Llama, and what is saved as one: SmolLM2, TinyLlama, Yi."""

from engine.architectures.base import Architecture

ARCHITECTURE = Architecture(
    title="Llama",
    fused=True,
    tiny={
        "": {},
        "biased": {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
        "scaled_rope": {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    },
)
