"""StableLM 2: a part of each head rotated, in some sizes MLPs side by side with attention, after the same norm."""

from typing import Any

from engine.architectures.base import Architecture, Halves


def name_norm(layer: Any) -> None:
    """Let the MLP of a parallel layer find the norm that it shares with attention."""
    if layer.use_parallel_residual:
        layer.post_attention_layernorm = layer.input_layernorm


ARCHITECTURE = Architecture(
    title="StableLM 2",
    halves=Halves(parallel="use_parallel_residual"),
    whole=False,  # its layers do not pass arguments on to their attention
    adapt=name_norm,
    has_queries=False,
    splits=False,
    tiny={"": {"use_qkv_bias": True}, "parallel": {"qk_layernorm": True, "use_parallel_residual": True}},
)
