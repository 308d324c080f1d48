"""The store of an actor: tensors that stay where they were made while the coordinator decides who needs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from turnout.errors import Interrupted


class Key(NamedTuple):
    """Names a tensor on a store.

    Attributes:
        owner: number of the actor in its replica, the same in all its lives.
        life: which life of the actor, counted from 0; a later one has nothing of an earlier one.
        id: counted on the store, never used again.
    """

    owner: int
    life: int
    id: int


class TensorStore:
    """Tensors of one life of one actor, until the coordinator drops them. Used from one event loop.

    They are not copied: the caller must not change one that it has put there.

    Args:
        owner: number of the actor.
        life: which life of it.
    """

    def __init__(self, owner: int, life: int) -> None:
        self.owner = owner
        self.life = life
        self._tensors: dict[int, torch.Tensor] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is kept; what several tensors share counts once."""
        stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._tensors.values()}
        return sum(stores.values())

    def put(self, tensor: torch.Tensor) -> int:
        """Keep a tensor until its id is dropped.

        Returns:
            Its id.
        """
        number = self._next
        self._next += 1
        self._tensors[number] = tensor
        return number

    def key(self, number: int) -> Key:
        """What names a tensor outside this actor."""
        return Key(self.owner, self.life, number)

    def find(self, key: Key) -> torch.Tensor:
        """The tensor a key names.

        Raises:
            Interrupted: it belongs to another actor or another life of this one, or was dropped.
        """
        if (key.owner, key.life) != (self.owner, self.life):
            raise Interrupted(
                f"tensor {key.id} of life {key.life} of actor {key.owner} is gone: "
                f"this is life {self.life} of actor {self.owner}; the call must be made again"
            )
        try:
            return self._tensors[key.id]
        except KeyError:
            raise Interrupted(
                f"tensor {key.id} of actor {key.owner} is no longer on its store; the call must be made again"
            ) from None

    def drop(self, numbers: Iterable[int]) -> None:
        """Let tensors go; ids that are not there are passed over."""
        for number in numbers:
            self._tensors.pop(number, None)

    def clear(self) -> None:
        """Let all go."""
        self._tensors.clear()
