"""Qwen3: Llama with a norm over every head of queries and keys."""

from engine.architectures.base import Architecture

ARCHITECTURE = Architecture(title="Qwen3", fused=True, tiny={"": {"head_dim": 16}})
