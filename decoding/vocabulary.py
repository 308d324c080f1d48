"""Vocabularies: a part of one that a model is read over, and what drafting across two of them needs to know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from turnout.atomic_files import write_whole
from turnout.errors import invalid

FILE = "draft_vocabulary.json"  # in a checkpoint's folder: the ids that the model drafts


@dataclass(frozen=True, eq=False, slots=True)
class SubVocabulary:
    """Some token ids. Compared by identity: what a model prepares for one is kept for as long as it is used.

    Attributes:
        ids: int64 [k], rising, on the CPU.
    """

    ids: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def below(self, vocab_size: int) -> SubVocabulary:
        """Return those of a model that has `vocab_size` ids."""
        return self if self.ids[-1] < vocab_size else SubVocabulary(self.ids[self.ids < vocab_size])

    def save(self, folder: Path) -> None:
        """Write the ids next to a checkpoint: the model then drafts from them alone (paper #189, VocabTrim).

        Raises:
            OSError: they cannot be written.
        """
        write_whole(folder / FILE, json.dumps({"format": 1, "ids": self.ids.tolist()}).encode())

    @classmethod
    def load(cls, folder: Path, vocab_size: int, field: str) -> SubVocabulary | None:
        """Read what `save` wrote; None: the folder has no such file.

        Args:
            folder: of the checkpoint.
            vocab_size: ids that the model has.
            field: the model's place in the configuration, for messages.

        Raises:
            TurnoutError: INVALID_ARGUMENT for `field`: it holds anything but rising ids of the model.
        """
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            ids = json.loads(path.read_text(encoding="utf-8"))["ids"]
        except (OSError, ValueError, KeyError, TypeError):
            raise invalid(field, f"{path} has no token ids; remove it, or train the draft again") from None
        listed = isinstance(ids, list) and all(type(each) is int for each in ids)
        found = torch.tensor(ids if listed else [], dtype=torch.int64)
        if not len(found) or found[0] < 0 or found[-1] >= vocab_size or (found.diff() <= 0).any():
            raise invalid(field, f"{path} must list rising ids from 0 to {vocab_size - 1}")
        return cls(found)


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
