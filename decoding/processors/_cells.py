"""Single cells of a batch of rows, each with a value: what history says of the tokens seen."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of [rows, vocab], each once.

    Attributes:
        places: int64 [n], int64 [n]: rows and tokens.
        values: float32 [n].
    """

    places: tuple[torch.Tensor, torch.Tensor]
    values: torch.Tensor

    @classmethod
    def of(cls, values: Rows[Mapping[int, float]], like: torch.Tensor) -> Cells:
        """Cells by row: value by token."""
        tokens = [token for row in values for token in row]
        numbers = [number for row in values for number in row.values()]
        sizes = torch.tensor([len(row) for row in values])
        rows = torch.repeat_interleave(torch.arange(len(values)), sizes)
        places = torch.stack([rows, torch.tensor(tokens, dtype=torch.int64)]).to(like.device)
        return cls((places[0], places[1]), torch.tensor(numbers, dtype=torch.float32, device=like.device))

    def of_rows(self, values: Rows[float]) -> torch.Tensor:
        """A value a row, at its cells: float32 [n]."""
        return torch.tensor(values, dtype=torch.float32, device=self.values.device)[self.places[0]]
