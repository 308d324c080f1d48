"""A target as dear as a large model that writes a small one's text: the same layers, made wider by idle units."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from decoding.artifacts import SUFFIX, Artifact, weights_digest
from engine.checkpoints import read_model

INTERMEDIATE = 32_768


def widened(source: Path, folder: Path, intermediate: int = INTERMEDIATE) -> Path:
    """The folder of the widened model, under `folder`; written unless it is there.

    Every layer's MLP gets idle units: their gate and up weights are random, and their columns of the down projection
    zero. They are computed and change nothing, so that a layer costs what it costs in a larger model, and leaving it
    out spoils the text as much as before. Layers added to a model, which leave the residual stream as it is, could be
    left out for nothing: drafters that skip layers would be given a perfect draft.

    Args:
        source: a checkpoint with gated MLPs.
        folder: where stand-ins are kept; each model's own bears its digest.
        intermediate: units of a widened MLP.

    Raises:
        ValueError: the model is as wide already.
    """
    model = _load(source)
    target = folder / f"{_digest(model)[:12]}-{intermediate}"
    if not (target / "config.json").is_file():
        widen(model, intermediate)
        partial = target.with_name(f"{target.name}.partial")
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(partial)
        partial.replace(target)
    return target


@torch.no_grad()
def widen(model: Any, intermediate: int) -> None:
    """Add idle units to every MLP of a model, in place.

    Raises:
        ValueError: the model is as wide already.
    """
    extra = intermediate - model.config.intermediate_size
    if extra < 1:
        raise ValueError(f"intermediate must be above {model.config.intermediate_size}, got {intermediate}")
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        mlp = layer.mlp
        for linear in (mlp.gate_proj, mlp.up_proj):
            # As large as the trained ones, so that nothing can tell them apart by their size.
            idle = torch.randn((extra, linear.in_features), generator=generator) * linear.weight.float().std()
            linear.weight = _joined(linear.weight, idle, dim=0)
            linear.out_features = intermediate
        down = mlp.down_proj
        down.weight = _joined(down.weight, torch.zeros(down.out_features, extra), dim=1)
        down.in_features = intermediate
    model.config.intermediate_size = intermediate


def _load(folder: Path) -> Any:
    model, _ = read_model(folder, torch.bfloat16)
    return model


def _digest(model: Any) -> str:
    """As the engine names the model when it loads it."""
    return weights_digest(model.config.to_dict(), model.state_dict())


def _joined(weight: torch.Tensor, more: torch.Tensor, dim: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.cat([weight, more.to(weight.dtype)], dim), requires_grad=False)


def restamped(artifacts: Path, source: Path, target: Path, folder: Path) -> Path:
    """A folder of artifacts for the widened model: those of the model it was made of, in its name.

    An artifact belongs to the model with its digest, and the stand-in has another. Its hidden states are the model's
    own by construction, up to the order in which the zeros are added, so what was trained for the one fits the other.
    What was not made for the model is copied as it is, and refused as it would be there.

    Args:
        artifacts: the model's.
        source: the model's checkpoint.
        target: the stand-in's.
        folder: is emptied and filled.
    """
    before, after = (_digest(_load(each)) for each in (source, target))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in sorted(artifacts.glob(f"*{SUFFIX}")):
        artifact = Artifact.load(path)
        models = {role: after if digest == before else digest for role, digest in artifact.models.items()}
        replace(artifact, models=models).save(folder / path.name)
    return folder
