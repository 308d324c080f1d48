"""FSD, vector form: top candidates by probability less how much the text behind them resembles the present (#84)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors._own_text import Candidates
from decoding.processors.base import NOTHING, Batch, LogitsProcessor, Stage, row_sums
from decoding.read_spec import ReadSpec
from decoding.step_states import LAST
from turnout.registry import MethodParams


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
        text, size = batch.contexts[row].tokens, self.params.n - 1
        states = _states(batch, row, len(text)) if self.params.alpha else None
        if states is None or len(text) <= size:
            return torch.zeros(len(tokens), device=batch.all_raw.device)
        count = len(text) - size  # of the n-grams, the first tokens after n - 1 states
        squares = row_sums(states.square())
        dots, norms = torch.zeros_like(squares[:count]), torch.zeros_like(squares[:count])
        for back in range(size):
            begin = size - 1 - back
            dots = dots + row_sums(states[begin : begin + count] * states[len(text) - 1 - back])
            norms = norms + squares[begin : begin + count]
        own = squares[len(text) - size :].sum()
        cosines = (dots / (norms * own).sqrt().clamp(min=torch.finfo(dots.dtype).tiny))[:, 0].clamp(0.0, 1.0)
        follows = torch.tensor(text[size:], device=cosines.device)
        same = follows == torch.tensor(tokens, device=cosines.device)[:, None]
        return (same * cosines).amax(-1)


def _states(batch: Batch, row: int, length: int) -> torch.Tensor | None:
    """Hidden states of a row's text, prompt to path: float32 [length, width]; zero where they are not known."""
    own, context = batch.hidden(LAST), batch.contexts[row]
    if own is None or batch.states is None or context.seq.chain is None:
        return None
    states = own.new_zeros(length, own.shape[1])
    past = context.seq.chain.past.of(batch.states.model, LAST)
    if past is not None:
        known = min(len(past), len(context.seq))
        states[:known] = past[:known]
    for place, fed in enumerate(batch.path(row), len(context.seq)):
        if fed >= 0:
            states[place] = batch.states.fed[LAST][fed]
    states[length - 1] = own[row]
    return states


PART = FsdVector
