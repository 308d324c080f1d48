"""Qwen3-MoE: Qwen3 with experts."""

from engine.architectures.base import TINY_EXPERTS, Architecture

ARCHITECTURE = Architecture(title="Qwen3-MoE", tiny={"": {"head_dim": 8, **TINY_EXPERTS}})
