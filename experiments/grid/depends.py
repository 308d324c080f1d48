"""Dependencies of a cell's results: where one of these changes, they are computed anew."""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine.fingerprint import content_digests, numerics_class, speech_digest
from experiments import machine
from experiments.grid.cells import Cell
from experiments.grid.code import code_digest, words_of
from experiments.grid.datasets import Dataset
from turnout.config import ModelConfig, TurnoutConfig, artifacts_path, model_path

LIBRARIES = ("torch", "transformers", "numpy")


def depends(config: TurnoutConfig, cell: Cell, dataset: Dataset) -> dict[str, str]:
    """Digests of all that a cell's results depend on, by what it is."""
    pool = config.pools[cell.pool]
    members = members_of(config, cell.pool)
    return {
        "config": _digest(_settings(config, cell.pool)),
        "code": code_digest(cell.method, cell.params, dataset.scorer.kind, cell.policy),
        "models": computing(members, artifacts_path(pool), words_of(cell.method, cell.params, cell.policy)),
        "dataset": dataset.digest,
        "machine": place(members),
        **_versions(),
    }


def computing(members: dict[str, ModelConfig], artifacts: Path | None, words: frozenset[str]) -> str:
    """What answers are computed with: models, and the artifacts that words may mean."""
    return _digest([_weights(members), _artifacts(artifacts, words)])


def place(members: dict[str, ModelConfig]) -> str:
    """Where they are computed."""
    return _digest([_device(members), _machine()])


def reference_key(config: TurnoutConfig, pool: str) -> str:
    """Names all that times of single requests on a pool depend on: 16 hexadecimal digits."""
    members = members_of(config, pool)
    stack = [_settings(config, pool), _weights(members), _device(members), _machine(), _versions()]
    return _digest([*stack, code_digest("plain", {}, "exact")])


def members_of(config: TurnoutConfig, name: str) -> dict[str, ModelConfig]:
    """The models of a pool, by role."""
    return {role: config.models[model] for role, model in config.pools[name].roles.items()}


def _settings(config: TurnoutConfig, name: str) -> dict[str, Any]:
    """Of a pool, its models and the engine."""
    pool = config.pools[name]
    models = members_of(config, name).items()
    return {
        "models": {role: model.model_dump(mode="json", exclude={"path"}) for role, model in models},
        "engine": config.engine.model_dump(mode="json"),
        "reuse": None if pool.reuse is None else pool.reuse.model_dump(mode="json"),
    }


def _weights(members: dict[str, ModelConfig]) -> list[str]:
    """A digest of each model's files."""
    return [_model(model_path(model)) for model in members.values()]


def _device(members: dict[str, ModelConfig]) -> str:
    """The kind of arithmetic that the large model runs on."""
    return numerics_class("torch", torch.device(members["large"].device))


@cache
def _versions() -> dict[str, str]:
    """Versions of other code that computes: after an upgrade, old answers and times are not this machine's any more."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


@cache
def _machine() -> dict[str, str]:
    return {name: value for name, value in machine.describe().items() if name in ("processor", "cores")}


@cache
def _model(folder: Path) -> str:
    return _digest([content_digests(folder, folder), speech_digest(folder)])


def _artifacts(folder: Path | None, words: frozenset[str]) -> dict[str, str]:
    """Of the files in a pool's folder of artifacts that a way of answering may open, by name."""
    if folder is None or not folder.is_dir():
        return {}
    paths = sorted(path for path in folder.glob("*.safetensors") if path.stem in words)
    return {path.stem: _file(path, path.stat().st_mtime_ns) for path in paths}


@cache
def _file(path: Path, changed: int) -> str:
    del changed  # part of the key: a file that was written again is read again
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
