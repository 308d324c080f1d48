"""Phi-1.5 and Phi-2: attention and MLP of a layer side by side after one norm, a part of each head rotated."""

from engine.architectures.base import Architecture, Halves

ARCHITECTURE = Architecture(
    title="Phi",
    norms=("final_layernorm",),
    halves=Halves(output="dense", before_mlp="input_layernorm", parallel=True),
    has_queries=False,
    tiny={"": {}, "norms": {"qk_layernorm": True}},
)
