"""Every registered component, which of them fit each other, and what each says it needs to run on random models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from decoding.aggregators.base import PACKAGE as AGGREGATORS
from decoding.artifacts import Artifact
from decoding.contrast.base import PACKAGE as CONTRASTS
from decoding.drafters.base import PACKAGE as DRAFTERS
from decoding.entailment.base import PACKAGE as ENTAILMENT
from decoding.lengths.base import PACKAGE as LENGTHS
from decoding.parts import Example, ModelShape
from decoding.processors.base import PACKAGE as PROCESSORS
from decoding.selectors.base import PACKAGE as SELECTORS
from decoding.uncertainty.base import PACKAGE as UNCERTAINTY
from decoding.verifiers.base import PACKAGE as VERIFIERS
from turnout.registry import load, names

# Of the target for which artifacts are made.
WIDTH, VOCAB, LAYERS = 32, 40, 4
SHAPE = ModelShape(WIDTH, VOCAB, LAYERS)


def parts(package: str) -> dict[str, Any]:
    """Classes by name: what is in the package is tested, and nothing is listed here."""
    return {name: load(package, name, "part").PART for name in names(package)}


ALL_AGGREGATORS = parts(AGGREGATORS)
ALL_DRAFTERS = parts(DRAFTERS)
ALL_ENTAILMENT = parts(ENTAILMENT)
ALL_LENGTHS = parts(LENGTHS)
ALL_PROCESSORS = parts(PROCESSORS)
ALL_SELECTORS = parts(SELECTORS)
ALL_UNCERTAINTY = parts(UNCERTAINTY)
ALL_VERIFIERS = parts(VERIFIERS)
LOSSLESS = {name: part for name, part in ALL_VERIFIERS.items() if part.lossless}
LOSSY = {name: part for name, part in ALL_VERIFIERS.items() if not part.lossless}
ALL_CONTRASTS = parts(CONTRASTS)
EVERY = {
    (slot, name): part
    for slot, found in {
        "aggregators": ALL_AGGREGATORS,
        "contrast": ALL_CONTRASTS,
        "drafters": ALL_DRAFTERS,
        "lengths": ALL_LENGTHS,
        "selectors": ALL_SELECTORS,
        "uncertainty": ALL_UNCERTAINTY,
        "verifiers": ALL_VERIFIERS,
    }.items()
    for name, part in found.items()
}


def example_of(part: Any) -> Example:
    """What the component says it needs."""
    example: Example = part.example(SHAPE)
    return example


def drafter_choice(name: str) -> dict[str, Any]:
    """A drafter as a request asks for it, so that it has something to do on a small vocabulary."""
    return {"name": name, **example_of(ALL_DRAFTERS[name]).params}


def make_artifacts(folder: Path, digests: dict[str, str]) -> None:
    """Random heads for models with these digests, by role: of every component that needs one."""
    every = (*EVERY.values(), *ALL_PROCESSORS.values())
    examples = {example.kind: example for example in map(example_of, every) if example.head is not None}
    for kind, example in examples.items():
        assert example.head is not None
        torch.manual_seed(3)
        for each in example.head.parameters():
            if each.ndim > 1:
                torch.nn.init.normal_(each, std=0.1)
        models = {role: digests[role] for role in example.roles}
        settings = {"head": example.head.settings, **example.settings}
        Artifact(kind, "test", settings, models, dict(example.head.state_dict())).save(folder / f"{kind}.safetensors")


def fitting(verifiers: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Every drafter, length policy and one of the verifiers that fit each other."""
    small_only = {name for name, policy in ALL_LENGTHS.items() if "small" in example_of(policy).roles}
    return [
        (drafter, length, verifier)
        for drafter, made in ALL_DRAFTERS.items()
        for length, policy in ALL_LENGTHS.items()
        for verifier, judge in verifiers.items()
        if made.kinds & set(judge.accepts) and (made.stepwise or not policy.stepwise)
        if made.runs_on == "small" or length not in small_only
    ]
