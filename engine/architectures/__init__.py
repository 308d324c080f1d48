"""Architectures, one file each, named as their `model_type`."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from engine.architectures.base import Architecture, embedding_scale, logit_scale
from turnout.registry import names


def listed() -> list[str]:
    """Every architecture that has a file, sorted."""
    return names(__name__)


def architecture_of(config: Any) -> Architecture:
    """The architecture of a Hugging Face configuration: its file's, or that of one without a file."""
    return architecture_named(config.model_type)


@cache
def architecture_named(kind: str) -> Architecture:
    """The architecture of a `model_type`; see `architecture_of`."""
    if kind not in listed():
        return _without_file(kind)
    architecture: Architecture = importlib.import_module(f"{__name__}.{kind}").ARCHITECTURE
    return architecture


def _without_file(kind: str) -> Architecture:
    """What may be assumed of any architecture: `engine.unlisted` proves it for each configuration."""
    return Architecture(
        title=kind,
        listed=False,
        norms=("norm", "final_layernorm", "final_layer_norm"),
        halves=None,
        splits=False,
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        rotates=lambda config: (),
        has_queries=False,
    )


def titles(fused: bool = False) -> str:
    """Titles of the architectures with a file, sorted and separated by commas; `fused`: of those alone."""
    found = [architecture_named(kind) for kind in listed()]
    return ", ".join(sorted((each.title for each in found if each.fused or not fused), key=str.casefold))
