"""Isotropic and proximal search: the next token keeps to the answer so far, and apart from what was said before it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, FiniteFloat
from torch.nn.functional import normalize

from decoding.candidates import reading
from decoding.decode_loop import chosen_among, reported
from decoding.model import Model, ModelPool, Readout, ReadSpec, Request, token_of
from decoding.noise import Purpose, gumbel, noise_key
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment, Token

LAST = -1
STATE = ReadSpec(draw=None, hidden=frozenset({LAST}))


class IpsParams(MethodParams):
    """Parameters of `ips`."""

    example: ClassVar[Mapping[str, Any]] = {"candidates": 3}
    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    candidates: Annotated[int, Field(ge=1, le=64, description="best tokens to choose from")] = 8
    weight: Annotated[
        FiniteFloat,
        Field(ge=0.0, le=1.0, description="of a token's probability; the rest is that of its hidden state; 1: greedy"),
    ] = 0.6
    first: Annotated[
        int, Field(ge=1, le=4096, description="tokens at the answer's start that follow plain decoding")
    ] = 2
    utterances: Annotated[int, Field(ge=1, le=256, description="latest utterances of the prompt that are read")] = 16
    choice: Annotated[
        Literal["best", "drawn"],
        Field(description="best: by the greatest score, as published; drawn: by softmax(score), best at temperature 0"),
    ] = "best"


@method(params=IpsParams, papers=(114,), lossless=False, needs=frozenset(), resumable=True)
async def ips(request: Request, models: ModelPool, params: IpsParams) -> AsyncIterator[Segment]:
    """Each of the best tokens is read on by one step, and one is chosen by its probability and its hidden state.

    Paper #114 (IPS, for dialogue). score(v) = w p(v) + (1 - w) (prox - iso): prox is the mean cosine between the last
    hidden state after v and those of the answer's tokens so far; iso that between the mean state of the answer with v
    and the states at the ends of the prompt's utterances. An utterance ends with a token that would end an answer; a
    prompt without one is an utterance. All candidates are read in one forward. p is the law that tokens are drawn from,
    at temperature 0 that of temperature 1.
    """
    model, seq = models.by_role(params.model), request.sequence
    search = Ips(model, seq, params)
    await search.recall()
    while not seq.finished:
        token = await search.step()
        seq.append(token, model.num_parameters)
        yield Segment((token,), "finish" if seq.finished else "max_tokens")


class Ips:
    """Steps of one answer.

    Args:
        model: answers.
        seq: the answer.
        params: of the method.
    """

    def __init__(self, model: Model, seq: Sequence, params: IpsParams) -> None:
        self.model = model
        self.seq = seq
        self.params = params
        self._own = OwnStates()
        self._utterances: torch.Tensor | None = None

    async def recall(self) -> None:
        """Read the states of an answer that was begun before, but for its last token's."""
        prompt, begun = self.seq.tokens[: self.seq.num_prompt_tokens], self.seq.answer[:-1]
        if begun:
            with reading(self.model, self.seq, prompt) as base:
                rows = await self.model.extend(base, tuple(begun), STATE, every=True)
            for row in rows[1:]:
                self._own.add(state_of(row))

    async def step(self) -> Token:
        """Choose the next token."""
        seq, params = self.seq, self.params
        plain = len(seq.generated) < params.first
        want = reported(seq) | STATE | (ReadSpec() if plain else ReadSpec(draw=None, top_processed=params.candidates))
        [row] = await self.model.extend(seq, want=want)
        if seq.generated:
            self._own.add(state_of(row))
        if plain:
            return token_of(row, self.model.name)
        best = [(token, logp) for token, logp in row.top_processed if logp > -math.inf]
        token = row.top_processed[0][0]
        if len(best) > 1 and params.weight < 1.0 and len(seq) < self.model.max_length:
            token = await self._chosen(best)
        known = dict(row.top).get(token) if seq.sampling.logprobs is not None else None
        logprob = dict(row.top_processed)[token] if known is None and seq.sampling.logprobs is not None else known
        return chosen_among(seq, row, token, logprob, self.model.name)

    async def _chosen(self, best: list[tuple[int, float]]) -> int:
        """One of several tokens, with their log-probabilities."""
        tokens = tuple(token for token, _ in best)
        tree = DraftTree(tokens, (ROOT,) * len(tokens), self.model.name)
        rows = await self.model.expand(self.seq, tree, 0, STATE)
        after = torch.stack([state_of(row) for row in rows])
        probs = torch.tensor([logp for _, logp in best], dtype=torch.float32).exp()
        found = scores(probs, after, self._own, await self._read_utterances(), self.params.weight)
        if self.params.choice == "drawn" and not self.seq.sampling.greedy:
            key = noise_key(self.seq.seed, len(self.seq), Purpose.SELECT)
            found = found + gumbel([key], len(tokens), found.device)[0]
        return tokens[int(found.argmax())]

    async def _read_utterances(self) -> torch.Tensor:
        """States at the ends of the prompt's utterances: float32 [utterances, hidden], read once."""
        if self._utterances is None:
            prompt = self.seq.tokens[: self.seq.num_prompt_tokens]
            ends = [place for place, token in enumerate(prompt) if token in self.seq.end_ids] or [len(prompt) - 1]
            found = []
            for place in ends[-self.params.utterances :]:
                with reading(self.model, self.seq, prompt[: place + 1]) as base:
                    found.append(state_of((await self.model.extend(base, want=STATE))[0]))
            self._utterances = torch.stack(found)
        return self._utterances


class OwnStates:
    """Hidden states of the answer's tokens so far, of which two sums are all that is kept.

    Attributes:
        count: tokens.
        total: sum of their states: float64 [hidden].
        directions: sum of their states, each of length 1: float64 [hidden].
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = self.directions = torch.zeros(())

    def add(self, state: torch.Tensor) -> None:
        """Take the state of the next token: float32 [hidden]."""
        state = state.double()
        self.count += 1
        self.total = self.total + state
        self.directions = self.directions + normalize(state, dim=-1)


def scores(
    probs: torch.Tensor, after: torch.Tensor, answer: OwnStates, utterances: torch.Tensor, weight: float
) -> torch.Tensor:
    """Return the score of each candidate: float32 [m].

    Args:
        probs: float32 [m] of the candidates.
        after: float32 [m, hidden] states after them.
        answer: states of the answer's tokens so far, one at least.
        utterances: float32 [u, hidden] states at the ends of utterances, u >= 1.
        weight: of the probability.
    """
    prox = normalize(after, dim=-1) @ (answer.directions / answer.count).float()
    means = ((answer.total + after) / (answer.count + 1)).float()
    iso = (normalize(means, dim=-1) @ normalize(utterances, dim=-1).T).mean(-1)
    return weight * probs + (1 - weight) * (prox - iso)


def state_of(row: Readout) -> torch.Tensor:
    """Return the last hidden state of a row: float32 [hidden], on the CPU."""
    return row.hidden[LAST].detach().float().cpu()
