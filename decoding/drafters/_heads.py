"""Drafters that ask a trained head about the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import torch

from decoding.artifacts import Artifact
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.length_heads import Head
from decoding.lengths.base import LengthPolicy
from decoding.model import ReadSpec
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model, ModelPool
    from decoding.verifiers.base import VerifyResult

SHARED = ""  # weights are no tenant's

HeadT = TypeVar("HeadT", bound=Head)


class HeadParams(MethodParams):
    """Base of their parameters; each names its `artifact`."""

    artifact: str


@dataclass(slots=True)
class Opened(Generic[HeadT]):
    """A head as drafters use it, and the file it came from."""

    artifact: Artifact | None = None
    head: HeadT | None = None


class TrainedDrafter(Drafter, Generic[HeadT]):
    """Opens the artifact that bears its name as kind, for exactly the model it was trained for.

    Attributes:
        network: the head's class.
        head: in float32, on the CPU, shared by all requests.
    """

    runs_on = "large"
    network: ClassVar[type[Head]]
    params: HeadParams
    head: HeadT

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        artifact = models.artifacts.open(self.params.artifact, self.name, models, f"{self.where}.artifact")
        kind = f"{self.name}/{self.params.artifact}"
        opened: Opened[HeadT] = models.large.stores.open(kind, SHARED, Opened)
        if opened.head is None or opened.artifact is not artifact:
            opened.artifact = artifact
            opened.head = cast(HeadT, self.network.of(artifact).float())
        self.use(opened.head, artifact)

    def use(self, head: HeadT, artifact: Artifact) -> None:
        """Take a head that fits the models."""
        self.head = head


class HeadDrafter(TrainedDrafter[HeadT]):
    """Drafts from the state at the accepted node of the round before, which chose the pending token.

    The first round of an answer has none and drafts nothing: its forward reads the prompt.
    """

    want = ReadSpec(draw=None, hidden=frozenset({-1}))

    def __init__(self, params: Any = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self._state: tuple[int, torch.Tensor] | None = None

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """Propose the head's draft from the state; empty before there is one."""
        state = self.hidden_at_end(seq)
        return DraftTree.empty(model.name) if state is None else await self.draft(model, seq, state, room)

    def hidden_at_end(self, seq: Sequence) -> torch.Tensor | None:
        """Return the state that chose the last token, after the last norm: float32 [width]; None: not kept."""
        return self._state[1] if self._state is not None and self._state[0] == len(seq) else None

    @abstractmethod
    async def draft(self, model: Model, seq: Sequence, hidden: torch.Tensor, room: DraftBudget) -> DraftTree:
        """A draft from the state that chose the sequence's last token: float32 [width], after the last norm."""

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Keep the state at the accepted node, by whichever drafter it was drafted."""
        row = verdict.rows[verdict.path[-1] + 1 if verdict.path else 0]
        # A copy, so that the states of the other rows can go.
        self._state = (len(seq), row.hidden[-1].to("cpu", torch.float32, copy=True))
