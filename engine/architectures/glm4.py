"""GLM-4 of 2025 (0414): GLM with norms after attention and MLP as well."""

from engine.architectures.base import Architecture, Halves

ARCHITECTURE = Architecture(
    title="GLM-4",
    halves=Halves(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    splits=False,
    has_queries=False,
    rotates=lambda config: (),
    tiny={"": {"head_dim": 8}},
)
