"""DRY, don't repeat yourself: a token that would lengthen a repetition is penalised, exponentially in its length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors._cells import Cells
from decoding.processors.base import Batch, LogitsProcessor, Stage
from decoding.row_context import RowContext
from turnout.registry import MethodParams

LONGEST = 64  # tokens of a match that are compared
MOST = 1e4  # greatest penalty, so that no logit becomes -inf


class DryParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"multiplier": 0.8, "allowed_length": 1}

    multiplier: Annotated[FiniteFloat, Field(ge=0.0, le=100.0, description="of the penalty; 0 is off")] = 0.8
    base: Annotated[FiniteFloat, Field(ge=1.0, le=10.0, description="factor for each further token repeated")] = 1.75
    allowed_length: Annotated[int, Field(ge=1, le=LONGEST, description="tokens that may repeat unpunished")] = 2
    window: Annotated[int, Field(ge=0, description="last tokens that are looked at; 0: all")] = 0
    breakers: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=40)], ...],
        Field(max_length=32, description="no match goes across a token with one of these texts in it"),
    ] = ("\n", ":", '"', "*")
    breaker_ids: Annotated[tuple[int, ...], Field(description="tokens of `breakers`; set by the pool")] = ()


class Dry(LogitsProcessor):
    """See the module: multiplier * base ** (n - allowed_length) off the logit of a token that followed the last n.

    As in llama.cpp and text-generation-webui; n is the longest match, and at least `allowed_length`.
    """

    Params = DryParams
    params: DryParams
    stage = Stage.PENALTY
    off: ClassVar = {"multiplier": 0.0}

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._breakers = frozenset(self.params.breaker_ids)
        self._places: dict[int, list[int]] = defaultdict(list)
        self._read = 0

    @classmethod
    def encoded(cls, params: Any, tokens_with: Callable[[str], tuple[int, ...]]) -> Any:
        """See `LogitsProcessor.encoded`."""
        ids = {token for text in params.breakers for token in tokens_with(text)}
        return params.model_copy(update={"breaker_ids": tuple(sorted(ids))})

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        penalties = [part.penalties(context) for part, context in zip(parts, batch.contexts, strict=True)]
        cells = Cells.of(penalties, logits)
        return logits.index_put(cells.places, -cells.values, accumulate=True)

    def penalties(self, context: RowContext) -> dict[int, float]:
        """Penalty by token at a row."""
        asked, seq = self.params, context.seq
        if asked.multiplier == 0.0:
            return {}
        for place in range(self._read, len(seq)):
            self._places[seq.tokens[place]].append(place)
        self._read = len(seq)
        tokens = context.tokens
        last = len(tokens) - 1
        begin = max(len(tokens) - asked.window, 0) if asked.window else 0
        in_path = [len(seq) + place for place, token in enumerate(context.path) if token == tokens[last]]
        longest: dict[int, int] = {}
        for place in (*self._places.get(tokens[last], ()), *in_path):
            if begin <= place < last:
                follower = tokens[place + 1]
                known = longest.get(follower, 0)
                if known < LONGEST and follower not in self._breakers:
                    longest[follower] = max(known, self._match(tokens, place, begin))
        return {
            token: min(asked.multiplier * asked.base ** (length - asked.allowed_length), MOST)
            for token, length in longest.items()
            if length >= asked.allowed_length
        }

    def _match(self, tokens: list[int], place: int, begin: int) -> int:
        """How many tokens up to `place` are those at the end of the text."""
        last, length = len(tokens) - 1, 0
        while (
            length < LONGEST
            and place - length >= begin
            and tokens[place - length] == tokens[last - length]
            and tokens[last - length] not in self._breakers
        ):
            length += 1
        return length


PART = Dry
