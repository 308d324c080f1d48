"""Every part that is registered, and which of them fit each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from decoding.step_heads import StateHead
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


# And for verifiers, which read the target.
JUDGES: dict[str, tuple[Callable[[], Head], dict[str, Any]]] = {"judge": (lambda: StateHead(WIDTH), {})}
# Who asks another part's head.
BORROWED = {"rasd_heads": "medusa"}
# Where a default would leave nothing to do: vocabularies here are smaller than the part that `vocab_trim` keeps.
SETTINGS: dict[str, dict[str, Any]] = {"vocab_trim": {"keep": 20}}
# Lossy verifiers whose law at temperature 0 is plain greedy decoding, with the parameters that make it so.
AS_GREEDY: dict[str, dict[str, Any]] = {"typical": {}, "near_best": {"candidates": 1}, "judge": {"threshold": 1.0}}
# Those that keep other tokens even then as they come, and why.
OTHER_TOKENS = {
    "near_best": "a token stays that is among the three most probable ones and nearly as probable as the best",
    "judge": "a token stays that the head approves of",
}


def parts(package: str) -> dict[str, Any]:
    """Classes by name. A new one that needs something trained needs a line above, too: nothing is left out."""
    return {name: load(package, name, "part").PART for name in names(package)}


def drafter_choice(name: str) -> dict[str, Any]:
    """A drafter as a request asks for it, so that it has something to do on a small vocabulary."""
    return {"name": name, **SETTINGS.get(name, {})}


def make_artifacts(folder: Path, digests: dict[str, str]) -> None:
    """Random heads for the small and the large model with these digests."""
    for kind, (make, settings) in {**HEADS, **LENGTH_HEADS, **JUDGES}.items():
        torch.manual_seed(3)
        head = make()
        for each in head.parameters():
            if each.ndim > 1:
                torch.nn.init.normal_(each, std=0.1)
        artifact = save_head(folder, kind, head, digests["large"], **settings)
        if kind in LENGTH_HEADS or kind in JUDGES:
            tensors = dict(head.state_dict())
            replace(artifact, models=digests, tensors=tensors).save(folder / f"{kind}.safetensors")


ALL_DRAFTERS = parts(DRAFTERS)
ALL_LENGTHS = parts(LENGTHS)
ALL_SELECTORS = parts(SELECTORS)
ALL_VERIFIERS = parts(VERIFIERS)
LOSSLESS = {name: part for name, part in ALL_VERIFIERS.items() if part.lossless}
LOSSY = {name: part for name, part in ALL_VERIFIERS.items() if not part.lossless}


def fitting(verifiers: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Every drafter, length policy and one of the verifiers that fit each other."""
    return [
        (drafter, length, verifier)
        for drafter, made in ALL_DRAFTERS.items()
        for length, policy in ALL_LENGTHS.items()
        for verifier, judge in verifiers.items()
        if made.kinds & set(judge.accepts) and (made.stepwise or not policy.stepwise)
        if made.beside == "small" or length not in LENGTH_HEADS
    ]
