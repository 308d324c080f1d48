"""Mistral 7B and its kin: Llama with a sliding window that every layer reads in the configuration."""

from engine.architectures.base import TINY_WINDOW, Architecture

ARCHITECTURE = Architecture(
    title="Mistral",
    fused=True,
    window=lambda attention: attention.config.sliding_window,
    tiny={"": {"sliding_window": TINY_WINDOW}},
)
