"""Every part that is registered, and which of them fit each other."""

from __future__ import annotations

from typing import Any

from decoding.drafters.base import PACKAGE as DRAFTERS
from decoding.lengths.base import PACKAGE as LENGTHS
from decoding.selectors.base import PACKAGE as SELECTORS
from decoding.verifiers.base import PACKAGE as VERIFIERS
from turnout.registry import load, names


def parts(package: str) -> dict[str, Any]:
    """Classes by name, those left out that need something trained: their own tests train it."""
    found = {name: load(package, name, "part").PART for name in names(package)}
    return {name: part for name, part in found.items() if "artifact" not in part.Params.model_fields}


ALL_DRAFTERS = parts(DRAFTERS)
ALL_LENGTHS = parts(LENGTHS)
ALL_SELECTORS = parts(SELECTORS)
ALL_VERIFIERS = parts(VERIFIERS)
LOSSLESS = {name: part for name, part in ALL_VERIFIERS.items() if part.lossless}


def fitting() -> list[tuple[str, str, str]]:
    """Every drafter, length policy and lossless verifier that fit each other."""
    return [
        (drafter, length, verifier)
        for drafter, made in ALL_DRAFTERS.items()
        for length, policy in ALL_LENGTHS.items()
        for verifier, judge in LOSSLESS.items()
        if made.kinds & set(judge.accepts) and (made.stepwise or not policy.stepwise)
    ]
