"""EXAONE 4: norms after attention and MLP, and over heads; where some layers have windows, the others do not rotate."""

from typing import Any

from engine.architectures.base import POST_NORMS, TINY_WINDOW, Architecture


def rotates(config: Any) -> tuple[bool, ...]:
    """All layers, or those with a window where there are any."""
    return tuple(config.sliding_window is None or kind == "sliding_attention" for kind in config.layer_types)


ARCHITECTURE = Architecture(
    title="EXAONE 4",
    halves=POST_NORMS,
    rotates=rotates,
    tiny={"": {"sliding_window": TINY_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}},
)
