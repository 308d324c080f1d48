"""A part of a vocabulary, which a model may be read over in place of the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False, slots=True)
class SubVocabulary:
    """Some token ids. Compared by identity: what a model prepares for one is kept for as long as it is used.

    Attributes:
        ids: int64 [k], rising, on the CPU.
    """

    ids: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)
