"""Second models of a fused search: what they say of hypotheses, by tokens or by bytes (paper #122)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

import torch

from decoding.byte_scores import LongerText, TextScore, byte_vocabulary
from decoding.model import ReadSpec
from decoding.search._streams import Reading, Streams
from decoding.search.base import Hypothesis
from decoding.translation import Translation

LOGITS = ReadSpec(draw=None, logits=True)
LEAST = -1e5  # nats: what a text that the second model rules out counts, as published


class SecondModel(ABC):
    """Second model that says what it thinks of hypotheses. It keeps that in their `state`.

    Args:
        streams: of the model.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    @abstractmethod
    async def rescore(self, read: list[Hypothesis], candidates: list[Hypothesis]) -> None:
        """See `Search.rescore`."""

    @abstractmethod
    def score_of(self, each: Hypothesis) -> tuple[float, int]:
        """Return the log-probability of a continuation, nats, and of how many tokens, at least 1."""


class TokenScores(SecondModel):
    """Second model with the vocabulary of the first: it scores every token, the newest included.

    A hypothesis' state is the sum of its log-probabilities.
    """

    async def rescore(self, read: list[Hypothesis], candidates: list[Hypothesis]) -> None:
        """See `Search.rescore`."""
        following: dict[Hypothesis, list[Hypothesis]] = {each: [] for each in read}
        for each in candidates:
            assert each.parent is not None
            following[each.parent].append(each)
        readings = [
            Reading(each, tuple(each.tokens), (), ReadSpec(draw=None, processed_of=tuple(c.token for c in children)))
            for each, children in following.items()
        ]
        for children, [row] in zip(following.values(), await self.streams.read(readings), strict=True):
            logprobs = dict(row.processed_of)
            for each in children:
                assert each.parent is not None
                each.state = max((each.parent.state or 0.0) + logprobs[each.token], LEAST)

    def score_of(self, each: Hypothesis) -> tuple[float, int]:
        """See `SecondModel.score_of`."""
        return each.state, each.length


class ByteScores(SecondModel):
    """Second model with another vocabulary: it scores the bytes of what was read, and not the newest token.

    A hypothesis' state is the score of its parent's text. Of texts that were read, only what follows has the score: it
    holds rows of the whole vocabulary.

    Args:
        streams: see `SecondModel`.
        translation: from the vocabulary of the model that answers.
        temperature: of its distributions.
    """

    def __init__(self, streams: Streams, translation: Translation, temperature: float) -> None:
        super().__init__(streams)
        self._translation, self._temperature = translation, temperature

    async def rescore(self, read: list[Hypothesis], candidates: list[Hypothesis]) -> None:
        """See `Search.rescore`."""
        texts = await asyncio.to_thread(lambda: [self._longer(each) for each in read])
        rows = await self.streams.read([_reading(*each) for each in zip(read, texts, strict=True)])
        logits = [[row.logits for row in of_text if row.logits is not None] for of_text in rows]
        scores = dict(zip(read, await asyncio.to_thread(self._scores, texts, logits), strict=True))
        for each in candidates:
            assert each.parent is not None
            each.state = scores[each.parent]
        for each in read:
            each.state = None

    def _longer(self, each: Hypothesis) -> LongerText:
        added = self._translation.target.bytes_of(each.token) if each.parent is not None else b""
        return LongerText.of(each.state or TextScore(), added, byte_vocabulary(self._translation))

    def _scores(self, texts: list[LongerText], logits: list[list[torch.Tensor]]) -> list[TextScore]:
        scaled = [[(row.float().cpu() / self._temperature).log_softmax(-1) for row in of_text] for of_text in logits]
        return [text.score(rows) for text, rows in zip(texts, scaled, strict=True)]

    def score_of(self, each: Hypothesis) -> tuple[float, int]:
        """See `SecondModel.score_of`."""
        return max(each.state.logprob, LEAST), max(each.state.length, 1)


def _reading(each: Hypothesis, text: LongerText) -> Reading:
    """What is read of a text; the last token of its path, which may become another one, is not fed."""
    if text.first < 0:
        return Reading(each, text.tokens[: min(text.agreed, max(len(text.tokens) - 1, 0))])
    return Reading(each, text.tokens[: text.first], text.tokens[text.first : text.last], LOGITS)
