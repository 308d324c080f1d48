"""GLM-4 of 2024: a part of each head rotated, its numbers in pairs; gate and up in one projection."""

from engine.architectures.base import Architecture

ARCHITECTURE = Architecture(
    title="GLM", splits=False, has_queries=False, rotates=lambda config: (), tiny={"": {"head_dim": 8}}
)
