"""Training state on disk: written to a temporary name and renamed, so that a reader never sees half of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Progress:
    """Where a run stands. `step` is the next step to do; the data position follows from it alone."""

    step: int = 0
    num_tokens: int = 0
    num_taught_tokens: int = 0
    elapsed_s: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """Everything that resuming needs."""

    model: dict[str, torch.Tensor]
    optimiser: list[dict[str, Any]]
    progress: Progress

    def save(self, path: Path) -> None:
        """Replace the file at `path` in one rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save({"model": self.model, "optimiser": self.optimiser, "progress": vars(self.progress)}, partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Read what `save` wrote."""
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return cls(stored["model"], stored["optimiser"], Progress(**stored["progress"]))
