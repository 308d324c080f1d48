"""GPT-NeoX and Pythia: attention and MLP of a layer side by side, a part of each head rotated."""

from engine.architectures.base import Architecture, Halves

ARCHITECTURE = Architecture(
    title="GPT-NeoX",
    norms=("final_layer_norm",),
    halves=Halves(attention="attention", output="dense", parallel="use_parallel_residual"),
    tiny={"": {"num_key_value_heads": None}},
)
