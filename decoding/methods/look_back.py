"""Looking back: a distribution that came before announces a repetition; a token that keeps to the prompt follows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, FiniteFloat

from decoding.candidates import reading
from decoding.decode_loop import chosen_among, reported
from decoding.model import Model, ModelPool, Readout, ReadSpec, Request
from decoding.noise import Purpose, gumbel, noise_key
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment, Token

LOGITS = ReadSpec(draw=None, logits=True)
MOST_PLACES = 512
AT_ONCE = 32  # of them are compared: a row of a large vocabulary takes 600 KB, and so does each step on the way


class LookBackParams(MethodParams):
    """Parameters of `look_back`."""

    example: ClassVar[Mapping[str, Any]] = {"candidates": 3, "alpha": 0.5}
    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    alpha: Annotated[
        FiniteFloat,
        Field(
            ge=-1.0,
            le=1000.0,
            description="a step repeats an earlier one whose distribution is at most that far from its own, nats of KL"
            " divergence; negative: none does",
        ),
    ] = 1.0
    candidates: Annotated[int, Field(ge=1, le=64, description="best tokens to choose from where a step repeats")] = 8
    history: Annotated[
        int, Field(ge=1, le=MOST_PLACES, description="latest steps of the answer that are looked back at")
    ] = 128
    prefix: Annotated[
        int, Field(ge=1, le=MOST_PLACES, description="last places of the prompt that are looked back at")
    ] = 128


@method(params=LookBackParams, papers=(47,), lossless=False, needs=frozenset(), resumable=True)
async def look_back(request: Request, models: ModelPool, params: LookBackParams) -> AsyncIterator[Segment]:
    """The best token follows, but where the text would repeat itself: there it is one that keeps to the prompt.

    Paper #47 (Look-back decoding). A step repeats where the KL divergence of its whole distribution from that of an
    earlier step of the answer is small. Then each of the best tokens is read on by one step, all in one forward, and
    one is drawn by softmax(-c): c is the least divergence of the distribution after it from one at a place of the
    prompt. Structure, bans and truncation hold for the candidates; divergences are of the model's own distributions.
    The temperature has no say: at 0, too, the seed decides which one is drawn, since the nearest one would follow each
    time that the same step repeats, and the text with it. Each place that is looked back at takes 4 bytes for each
    token of the vocabulary.
    """
    model, seq = models.by_role(params.model), request.sequence
    look = LookBack(model, seq, params)
    await look.recall()
    while not seq.finished:
        token = await look.step()
        seq.append(token, model.num_parameters)
        yield Segment((token,), "finish" if seq.finished else "max_tokens")


class Distributions:
    """The latest of a row of distributions.

    Args:
        most: kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: torch.Tensor | None = None
        self._count = 0

    def add(self, logp: torch.Tensor) -> None:
        """Keep float32 [vocab], log-probabilities."""
        if self._rows is None:
            self._rows = logp.new_empty((min(self._most, 16), len(logp)))
        elif self._count >= len(self._rows) < self._most:
            grown = logp.new_empty((min(2 * len(self._rows), self._most), len(logp)))
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        self._rows[self._count % self._most] = logp
        self._count += 1

    def nearest(self, logp: torch.Tensor) -> float:
        """Return the least KL(p || q) over those kept, nats, for log p as float32 [vocab]; infinite where none is."""
        if self._rows is None:
            return math.inf
        probs = logp.exp()
        least = math.inf
        count = min(self._count, self._most)
        for start in range(0, count, AT_ONCE):
            kept = self._rows[start : min(start + AT_ONCE, count)]
            terms = torch.where(probs > 0, probs * (logp - kept), 0.0)  # [kept, vocab]
            least = min(least, float(terms.sum(-1).min()))
        return max(least, 0.0)


class LookBack:
    """Steps of one answer.

    Args:
        model: answers.
        seq: the answer.
        params: of the method.
    """

    def __init__(self, model: Model, seq: Sequence, params: LookBackParams) -> None:
        self.model = model
        self.seq = seq
        self.params = params
        self._past = Distributions(params.history)
        self._prefix: Distributions | None = None

    async def recall(self) -> None:
        """Read the steps of an answer that was begun before."""
        steps = min(len(self.seq.generated), self.params.history)
        if steps:
            for row in await self._read(self.seq.tokens[:-1], steps):
                self._past.add(_logp(row))

    async def step(self) -> Token:
        """Choose the next token."""
        seq = self.seq
        want = reported(seq) | LOGITS | ReadSpec(draw=None, top_processed=self.params.candidates)
        [row] = await self.model.extend(seq, want=want)
        logp = _logp(row)
        # In a thread: over a large vocabulary it takes as long as a forward does.
        repeats = await asyncio.to_thread(self._past.nearest, logp) <= self.params.alpha
        self._past.add(logp)
        allowed = [token for token, value in row.top_processed if value > -math.inf]
        token = row.top_processed[0][0]
        if repeats and len(allowed) > 1 and len(seq) < self.model.max_length:
            token = await self._nearest_to_prefix(allowed)
        return chosen_among(seq, row, token, float(logp[token]), self.model.name)

    async def _nearest_to_prefix(self, tokens: list[int]) -> int:
        """One of several tokens, drawn by how near the distribution after it is to one of the prompt's."""
        prefix = await self._read_prefix()
        rows = await self.model.expand(
            self.seq, DraftTree(tuple(tokens), (ROOT,) * len(tokens), self.model.name), 0, LOGITS
        )
        found = await asyncio.to_thread(lambda: [prefix.nearest(_logp(row)) for row in rows])
        costs = torch.tensor(found, dtype=torch.float64)
        key = noise_key(self.seq.seed, len(self.seq), Purpose.SELECT)
        # Infinite costs: a candidate after which comes what the prompt excludes.
        return tokens[int((gumbel([key], len(tokens), costs.device)[0] - costs).argmax())]

    async def _read_prefix(self) -> Distributions:
        """Distributions at the last places of the prompt, read where they are first needed."""
        if self._prefix is None:
            self._prefix = Distributions(self.params.prefix)
            prompt = self.seq.tokens[: self.seq.num_prompt_tokens]
            for row in await self._read(prompt, min(len(prompt), self.params.prefix)):
                self._prefix.add(_logp(row))
        return self._prefix

    async def _read(self, tokens: list[int], count: int) -> list[Readout]:
        """Read the last `count` places of a text, in one forward."""
        with reading(self.model, self.seq, tokens[: len(tokens) - count + 1]) as base:
            return await self.model.extend(base, tuple(tokens[len(tokens) - count + 1 :]), LOGITS, every=True)


def _logp(row: Readout) -> torch.Tensor:
    """Log-probabilities of the model's own distribution: float32 [vocab]."""
    assert row.logits is not None
    return row.logits.float().log_softmax(-1)
