"""Small checkpoints read once per process, and step times that are given: what tests of other things wait for."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

LARGEST_BYTES = 8 << 20  # of a checkpoint that is kept in memory

Read = Callable[..., tuple[Any, list[str]]]
# What was read, by folder, dtype and the state of its files.
known: dict[tuple[Any, ...], tuple[Any, list[str]]] = {}


def kept(read: Read) -> Read:
    """`read_model` that reads unchanged files of a small checkpoint once; each caller gets a copy of its own."""

    def read_model(folder: Path, dtype: Any, field: str = "model", **options: Any) -> tuple[Any, list[str]]:
        files = [(path.name, path.stat()) for path in sorted(Path(folder).iterdir()) if path.is_file()]
        if options or sum(stat.st_size for _, stat in files) > LARGEST_BYTES:
            return read(folder, dtype, field, **options)
        state = tuple((name, stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in files)
        key = (Path(folder).resolve(), dtype, state)
        if key not in known:
            known[key] = read(folder, dtype, field)
        model, notes = known[key]
        return deepcopy(model), list(notes)

    return read_model


def given_step_time(probe: Any) -> Any:
    """The step time of a model in proportion to its layers; forwards correct it as they do a measured one."""
    from engine.costs.step_time import StepCost, StepTime

    layers = probe._runner.plan.num_layers
    return StepTime(StepCost(3e-4 * layers, (1, 16), (1e-6, 5e-6), 1e-8, 0.0, 256, 1e-6))
