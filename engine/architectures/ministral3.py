"""Ministral 3: Llama whose queries grow with their position, beyond the length that its RoPE is scaled from."""

from engine.architectures.base import Architecture

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}

ARCHITECTURE = Architecture(
    title="Ministral 3",
    has_queries=False,
    tiny={"": {"head_dim": 8, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}}},
)
