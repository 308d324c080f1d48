"""The drafter slot: propose a tree of tokens, learn from what became of it.

A module here assigns its class to `DRAFTER`; `get_drafter` finds it by file name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from decoding.sequence import Sequence
from decoding.tree import DraftTree
from turnout.registry import load

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import Verdict


class Drafter(Protocol):
    """Proposes continuations. Plain state only: a drafter travels to the model it runs beside."""

    name: str

    async def propose(self, model: Model, seq: Sequence, budget: int) -> DraftTree:
        """A tree of at most `budget` nodes under the sequence's last token; may be empty."""
        ...

    def observe(self, seq: Sequence, draft: DraftTree, verdict: Verdict) -> None:
        """What the verifier made of the last proposal."""
        ...


def get_drafter(name: str, field: str = "drafter", **options: Any) -> Drafter:
    """A drafter by name, made with `options`.

    Raises:
        TurnoutError: NOT_FOUND, listing what exists.
    """
    drafter: Drafter = load("decoding.drafters", name, field).DRAFTER(**options)
    return drafter
