"""Gemma 2: four norms a layer, every other layer with a window, soft caps on scores and logits."""

from engine.architectures.base import FOUR_NORMS, TINY_WINDOW, Architecture

ARCHITECTURE = Architecture(
    title="Gemma 2",
    halves=FOUR_NORMS,
    tiny={"": {"head_dim": 8, "sliding_window": TINY_WINDOW, "query_pre_attn_scalar": 8}},
)
