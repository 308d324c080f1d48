"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and windows in some layers."""

from engine.architectures.base import TINY_WINDOW, Architecture

ARCHITECTURE = Architecture(
    title="Qwen2",
    fused=True,
    tiny={"": {}, "window": {"use_sliding_window": True, "sliding_window": TINY_WINDOW, "max_window_layers": 1}},
)
