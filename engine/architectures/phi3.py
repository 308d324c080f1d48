"""Phi-3 and Phi-4: Llama with queries, keys and values in one projection, which the plan does not split."""

from engine.architectures.base import TINY_WINDOW, Architecture

ARCHITECTURE = Architecture(title="Phi-3", splits=False, tiny={"": {"sliding_window": TINY_WINDOW}})
