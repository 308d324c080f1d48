"""Vocabularies: a part of one that a model is read over, and what drafting across two of them needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

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


class Vocabulary(Protocol):
    """Tokens of a model, and how text becomes tokens. Picklable, and never changes.

    Attributes:
        is_constant: see `decoding.state`.
        begins: ids that stand before every text; may be empty.
        end: the usual id that ends a text; None: the model names none.
        ends: all ids that end a text.
        special: names of the tokens that are no text, by id.
    """

    is_constant: ClassVar[bool] = True
    begins: tuple[int, ...]
    end: int | None
    ends: frozenset[int]
    special: Mapping[int, str]

    def __len__(self) -> int:
        """Return the number of ids."""
        ...

    def bytes_of(self, token_id: int, first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text; none for a special or unknown one.

        Args:
            token_id: any.
            first: whether no text stands before it.
        """
        ...

    def is_byte(self, token_id: int) -> bool:
        """Return whether a token stands for a byte that no other token holds (byte fallback)."""
        ...

    def encode(self, text: str, first: bool = False) -> list[int]:
        """Return the tokens of a text; special tokens that are spelled out in it are text.

        Args:
            text: any.
            first: whether no text stands before it.
        """
        ...
