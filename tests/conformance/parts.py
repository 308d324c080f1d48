"""Every part that is registered, and which of them fit each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from decoding.drafters.base import PACKAGE as DRAFTERS
from decoding.exit_heads import ExitHead
from decoding.heads import MedusaHeads, RecurrentHead
from decoding.length_heads import AcceptanceHead, ContinueHead, Head
from decoding.lengths.base import PACKAGE as LENGTHS
from decoding.selectors.base import PACKAGE as SELECTORS
from decoding.verifiers.base import PACKAGE as VERIFIERS
from tests.decoding.head_models import save_head
from turnout.registry import load, names

# Of the target for which artifacts are made: hidden size, vocabulary, layers before the exit.
WIDTH, VOCAB, EXIT = 32, 40, 2
# A head for every drafter that needs a trained one, with what else its artifact says.
HEADS: dict[str, tuple[Callable[[], Head], dict[str, Any]]] = {
    "eesd": (lambda: ExitHead(WIDTH, 4, 2, 8, inner=24), {"exit_layer": EXIT}),
    "kangaroo": (lambda: ExitHead(WIDTH, 4, 2, 8), {"exit_layer": EXIT}),
    "medusa": (lambda: MedusaHeads(WIDTH, heads=3), {"accuracies": [[0.5, 0.3, 0.2]] * 3}),
    "redrafter": (lambda: RecurrentHead(WIDTH, VOCAB), {}),
}


# The same for length policies, which know the small model's drafts.
LENGTH_HEADS: dict[str, tuple[Callable[[], Head], dict[str, Any]]] = {
    "disco": (lambda: ContinueHead(top=10, hidden=8), {"threshold": 0.4, "most": 5}),
    "specdecpp": (lambda: AcceptanceHead(WIDTH), {}),
}


def parts(package: str) -> dict[str, Any]:
    """Classes by name; what needs something trained that nobody makes here is left out: its own tests train it."""
    found = {name: load(package, name, "part").PART for name in names(package)}
    made = {*HEADS, *LENGTH_HEADS, "rasd_heads"}  # the last one asks medusa's heads
    return {name: part for name, part in found.items() if "artifact" not in part.Params.model_fields or name in made}


def make_artifacts(folder: Path, digests: dict[str, str]) -> None:
    """Random heads for the small and the large model with these digests."""
    for kind, (make, settings) in {**HEADS, **LENGTH_HEADS}.items():
        torch.manual_seed(3)
        head = make()
        for each in head.parameters():
            if each.ndim > 1:
                torch.nn.init.normal_(each, std=0.1)
        artifact = save_head(folder, kind, head, digests["large"], **settings)
        if kind in LENGTH_HEADS:
            tensors = dict(head.state_dict())
            replace(artifact, models=digests, tensors=tensors).save(folder / f"{kind}.safetensors")


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
        if made.beside == "small" or length not in LENGTH_HEADS
    ]
