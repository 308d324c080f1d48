"""Copies the input from where the answer agrees with it: for answers that are edits of their prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.ngrams import SuffixMatcher
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model

MOST_TOKENS = 1 << 24


class InputCopyParams(MethodParams):
    """Parameters of `input_copy`."""

    source_start: Annotated[int, Field(ge=0, le=MOST_TOKENS, description="the prompt's first token that is copied")] = 0
    source_end: Annotated[
        int | None,
        Field(ge=1, le=MOST_TOKENS, description="one behind the prompt's last token that is copied; absent: its end"),
    ] = None

    @model_validator(mode="after")
    def _check_span(self) -> Self:
        if self.source_end is not None and self.source_end <= self.source_start:
            raise ValueError(f"source_end must be above source_start ({self.source_start})")
        return self


class InputCopyDrafter(Drafter):
    """Input-guided aggressive decoding (paper #140, Lossless Acceleration for Seq2seq Generation).

    The whole rest of the source is drafted at once. After a token that is not the source's, drafting ends until the
    answer's longest suffix that occurs in the source occurs there once; from behind it copying continues. The trained
    half of the paper, a model that predicts blocks (GAD), is no part of this drafter.
    """

    Params = InputCopyParams
    papers = (140,)
    watches = True
    depth = 64
    changing = ("_note",)
    params: InputCopyParams

    def __init__(self, params: InputCopyParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self._source: list[int] = []
        self._matcher: SuffixMatcher | None = None
        self._place: int | None = 0  # of the source's next token; None: it and the answer have parted
        self._num_read = 0  # tokens of the answer
        self._note = ""

    @property
    def note(self) -> str:
        """See `Drafter.note`."""
        return self._note

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A chain: the source's rest, empty where the answer is not in it."""
        self._follow(seq)
        if self._place is None:
            return DraftTree.empty(model.name)
        most = min(room.depth, room.nodes)
        return DraftTree.chain(self._source[self._place : self._place + most], model.name)

    def ready(self, seq: Sequence, token: int) -> bool:
        """Return whether the answer, this token included, is in the source and not at its end."""
        self._follow(seq)
        self._read(token)
        return self._place is not None and self._place < len(self._source)

    def _follow(self, seq: Sequence) -> None:
        """Find the place behind what was emitted since the last draft."""
        if self._matcher is None:
            self._source = seq.tokens[: seq.num_prompt_tokens][self.params.source_start : self.params.source_end]
            self._matcher = SuffixMatcher(self._source)
            if not self._source:
                self._note = (
                    f"input_copy: nothing was copied: source_start {self.params.source_start} is behind the prompt's"
                    f" last token; it has {seq.num_prompt_tokens}"
                )
        for token in seq.tokens[seq.num_prompt_tokens + self._num_read :]:
            self._read(token)

    def _read(self, token: int) -> None:
        assert self._matcher is not None
        self._num_read += 1
        self._matcher.read(token)
        place = self._place
        if place is not None and place < len(self._source) and self._source[place] == token:
            self._place = place + 1
        else:
            self._place = self._matcher.place


PART = InputCopyDrafter
