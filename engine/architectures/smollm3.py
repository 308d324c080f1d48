"""SmolLM3: Llama whose every fourth layer does not rotate queries and keys (NoPE)."""

from typing import Any

from engine.architectures.base import TINY_WINDOW, Architecture


def unfit(config: Any) -> str | None:
    """Say so where `no_rope_layers` leaves layers out."""
    entries, layers = len(config.no_rope_layers), config.num_hidden_layers
    if entries < layers:
        return f"no_rope_layers has {entries} entries, and must have one for each of {layers} layers"
    return None


ARCHITECTURE = Architecture(
    title="SmolLM3",
    rotates=lambda config: tuple(map(bool, config.no_rope_layers[: config.num_hidden_layers])),
    unfit=unfit,
    tiny={
        "": {"no_rope_layers": [1, 0]},
        "window": {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": TINY_WINDOW},
    },
)
