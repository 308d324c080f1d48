"""Mixtral: Mistral with experts."""

from engine.architectures.base import TINY_EXPERTS, TINY_WINDOW, Architecture

ARCHITECTURE = Architecture(title="Mixtral", tiny={"": {"sliding_window": TINY_WINDOW, **TINY_EXPERTS}})
