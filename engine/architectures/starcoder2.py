"""StarCoder 2: biases, layer norms, an MLP without a gate, and a window in every layer."""

from engine.architectures.base import TINY_WINDOW, Architecture

ARCHITECTURE = Architecture(title="StarCoder 2", tiny={"": {"sliding_window": TINY_WINDOW}})
