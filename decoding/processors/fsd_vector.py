"""FSD, vector form: top candidates by probability less how much the text behind them resembles the present (#84)."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors._own_text import Candidates
from decoding.processors.base import NOTHING, Batch, LogitsProcessor, Stage, row_sums
from decoding.read_spec import ReadSpec
from decoding.row_context import RowContext
from decoding.step_states import LAST, PastStates
from turnout.registry import MethodParams

MOST_COMPARED = 512  # places whose states are gathered at once


class FsdVectorParams(MethodParams):
    """Parameters."""

    alpha: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="weight of the anti-model; 0 is off")] = 0.6
    k: Annotated[int, Field(ge=1, le=256, description="candidates: the most probable tokens")] = 6
    n: Annotated[int, Field(ge=2, le=8, description="length of an n-gram: n - 1 hidden states are compared")] = 2


class FsdVector(LogitsProcessor):
    """Frustratingly Simple Decoding (paper #84), vector form: (1 - alpha) p(v) - alpha w(v) over the top k of p.

    w(v) is the greatest cosine, within 0 and 1, between the last n - 1 hidden states (before the head, after the last
    norm) and those before a v of prompt or answer; 0 for tokens that did not occur. A search: for greedy requests.
    """

    Params = FsdVectorParams
    params: FsdVectorParams
    papers = (84,)
    stage = Stage.TRUNCATE
    greedy_only = True
    off: ClassVar = {"alpha": 0.0}

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._places = _Places()

    def reads(self, num_layers: int) -> ReadSpec:
        """See `LogitsProcessor.reads`."""
        layers = frozenset({LAST})
        return ReadSpec(draw=None, hidden=layers, before=layers) if self.params.alpha else NOTHING

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        alpha = batch.tensor([part.params.alpha for part in parts])
        top = Candidates.of(logits, [part.params.k for part in parts], batch)
        weights = [part.similarity(batch, row, top.tokens[row]) for row, part in enumerate(parts)]
        share = top.of_rows(alpha)
        scores = (1 - share) * top.probs - share * torch.cat(weights).to(logits)
        return top.rerank(logits, scores, alpha > 0)

    def similarity(self, batch: Batch, row: int, tokens: list[int]) -> torch.Tensor:
        """w of each of the tokens at a row: float32 [len(tokens)]; 0 where hidden states are not known."""
        context, size = batch.contexts[row], self.params.n - 1
        length = len(context.seq) + len(context.path)
        weights = torch.zeros(len(tokens), device=batch.all_raw.device)
        states = _RowStates.of(batch, row, length) if self.params.alpha and length > size else None
        if states is None:
            return weights
        found = [self._places.of(context, token, size) for token in tokens]
        which = torch.tensor([slot for slot, places in enumerate(found) for _ in places], dtype=torch.int64)
        places = torch.tensor([place for each in found for place in each], dtype=torch.int64)
        recent = states.at(torch.arange(length - size, length))
        own = row_sums(recent.square()).sum()
        for begin in range(0, len(places), MOST_COMPARED):
            here, slots = places[begin : begin + MOST_COMPARED], which[begin : begin + MOST_COMPARED]
            dots = norms = torch.zeros(len(here), 1, device=recent.device)
            for back in range(1, size + 1):
                before = states.at(here - back)
                dots, norms = dots + row_sums(before * recent[-back]), norms + row_sums(before.square())
            cosines = (dots / (norms * own).sqrt().clamp(min=torch.finfo(dots.dtype).tiny))[:, 0].clamp(0.0, 1.0)
            weights.scatter_reduce_(0, slots.to(weights.device), cosines.to(weights), "amax")
        return weights


class _Places:
    """Where each token stands in prompt and answer; grows with them."""

    def __init__(self) -> None:
        self._places: dict[int, list[int]] = {}
        self._read = 0
        self._reading = threading.Lock()  # models on several devices read rows of one sequence

    def of(self, context: RowContext, token: int, first: int) -> list[int]:
        """Places of a token in a row's text from `first` on, ascending."""
        tokens, length = context.seq.tokens, len(context.seq)
        with self._reading:
            for place in range(self._read, length):
                self._places.setdefault(tokens[place], []).append(place)
            self._read = length
            known = self._places.get(token, [])
            found = known[bisect_left(known, first) :]
        return found + [
            length + place for place, each in enumerate(context.path) if each == token and length + place >= first
        ]


@dataclass(frozen=True, slots=True)
class _RowStates:
    """Hidden states of a row's text, prompt to path.

    Attributes:
        past: those of the sequence's tokens.
        model: digest of the model.
        last: float32 [n, width], the last ones; zero where they are not known.
        begin: place of the first of them.
    """

    past: PastStates
    model: str
    last: torch.Tensor
    begin: int

    @classmethod
    def of(cls, batch: Batch, row: int, length: int) -> _RowStates | None:
        """Return those of a row whose text has that length; None: there are none."""
        own, context = batch.hidden(LAST), batch.contexts[row]
        if own is None or batch.states is None or context.seq.chain is None:
            return None
        past, model = context.seq.chain.past, batch.states.model
        begin = min(len(context.seq), length - 1)
        last = own.new_zeros(length - begin, own.shape[1])
        for place, fed in enumerate(batch.path(row)):
            if fed >= 0:
                last[place + len(context.seq) - begin] = batch.states.fed[LAST][fed]
        last[-1] = own[row]
        return cls(past, model, last, begin)

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """States of some tokens: int64 [n] -> float32 [n, width]."""
        found = self.past.pick(self.model, LAST, places)
        if found is None:
            found = self.last.new_zeros(len(places), self.last.shape[1])
        late = (places >= self.begin).nonzero()[:, 0]
        if len(late):
            found[late.to(found.device)] = self.last[(places[late] - self.begin).to(self.last.device)].to(found)
        return found


PART = FsdVector
