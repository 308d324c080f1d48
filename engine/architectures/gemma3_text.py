"""Gemma 3 without its vision tower: layers with and without a window have rotary embeddings of their own."""

from engine.architectures.base import FOUR_NORMS, TINY_WINDOW, Architecture

ARCHITECTURE = Architecture(
    title="Gemma 3",
    halves=FOUR_NORMS,
    tiny={
        "": {
            "head_dim": 8,
            "sliding_window": TINY_WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    },
)
