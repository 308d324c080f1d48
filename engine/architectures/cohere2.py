"""Cohere 2 (Command R7B, Command A): attention and MLP side by side; layers without a window do not rotate (NoPE)."""

from engine.architectures.base import TINY_WINDOW, Architecture, Halves, logit_scale

ARCHITECTURE = Architecture(
    title="Cohere 2",
    halves=Halves(before_mlp="input_layernorm", parallel=True),
    has_queries=False,
    rotates=lambda config: (),  # neighbouring numbers turn together
    logit_scale=logit_scale,
    tiny={
        "": {
            "sliding_window": TINY_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "logit_scale": 0.25,
        }
    },
)
