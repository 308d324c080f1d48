"""Foresight sampling: each next step is drawn by how well, and how much alike, the answer would go on after it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Items
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat, model_validator

from decoding.decode_loop import stream
from decoding.model import Model, ModelPool, ReadSpec, Request, StopCondition, TokenText
from decoding.noise import Purpose, derive_seed, gumbel, noise_key, round_seed
from decoding.recorder import watched
from decoding.rollouts import Branches, branches_of
from decoding.sequence import Sequence
from decoding.steps import StepEnd, StepRule, step_marks
from decoding.text_clusters import k_means, tf_idf
from turnout.errors import FieldError
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment, Token

SHARPNESS = 0.1  # temperature of advantages and of step log-probabilities where they are drawn from
WIDTH, STEP, LAST = 1, 2, 3  # lanes of draws
FINAL_CLUSTERS = 2
MOST_AT_ONCE = 64
Mark = Annotated[str, Field(min_length=1, max_length=64)]


class PhiDecodingParams(MethodParams):
    """Parameters of `phi_decoding`."""

    example: ClassVar[Mapping[str, Any]] = {"beams": 2, "samples": 2, "max_steps": 2, "separators": [" "]}
    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    roller: Annotated[
        ModelRole | None, Field(description="role of the model that looks ahead; absent: the one that answers")
    ] = None
    beams: Annotated[int, Field(ge=1, le=16, description="answers that are written at once")] = 4
    samples: Annotated[int, Field(ge=1, le=16, description="next steps drawn for each of them")] = 4
    max_steps: Annotated[int, Field(ge=1, le=64, description="steps chosen with foresight; the rest is drawn")] = 8
    min_steps: Annotated[int, Field(ge=1, le=64, description="steps after which agreement may end the foresight")] = 4
    sigma: Annotated[
        FiniteFloat,
        Field(
            ge=0.0,
            le=1e6,
            description="no foresight for steps whose mean log-probability is that many standard deviations below the"
            " mean of all",
        ),
    ] = 1.0
    clusters: Annotated[int, Field(ge=1, le=16, description="clusters of what was foreseen")] = 3
    agreement: Annotated[
        FiniteFloat,
        Field(ge=0.0, le=2.0, description="foresight ends where the largest cluster has a greater share; 1: never"),
    ] = 0.7
    separators: Annotated[
        tuple[Mark, ...], Field(min_length=1, max_length=16, description="strings that end a step")
    ] = ("\n",)
    max_step_tokens: Annotated[int, Field(ge=1, le=4096, description="longest step, tokens")] = 512
    rollout_tokens: Annotated[
        int | None, Field(ge=1, le=1 << 20, description="longest look ahead, tokens; absent: to the end of the answer")
    ] = None
    rollout_temperature: Annotated[
        FiniteFloat, Field(ge=0.0, le=2.0, description="of looking ahead; steps have the request's temperature")
    ] = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beams * self.samples > MOST_AT_ONCE:
            most = f"at most {MOST_AT_ONCE // self.beams} with {self.beams} beams, for {MOST_AT_ONCE} steps at once"
            raise FieldError("samples", f"{self.samples}; {most}")
        return self


@dataclass(slots=True, eq=False)
class Beam:
    """Answer in the making, and the foresight value that its last step had."""

    seq: Sequence
    value: float = 0.0


@dataclass(slots=True, eq=False)
class Candidate:
    """Next step of a beam.

    Attributes:
        seq: the answer with it.
        parent: foresight value of the beam that it continues.
        likelihood: mean log-probability of its tokens, nats.
        value: mean log-probability of the tokens that were foreseen after it; its own where nothing may follow.
        foreseen: their text.
        rolled: whether any were.
    """

    seq: Sequence
    parent: float
    likelihood: float
    step: str = ""
    value: float = -math.inf
    foreseen: str = ""
    rolled: bool = False

    @property
    def advantage(self) -> float:
        """Its foresight value above that of what it continues."""
        return self.value - self.parent


@method(params=PhiDecodingParams, papers=(7,), lossless=False, needs=frozenset())
async def phi_decoding(request: Request, models: ModelPool, params: PhiDecodingParams) -> AsyncIterator[Segment]:
    """Several answers grow step by step; a step is drawn by what a rollout after it is worth.

    Paper #7 (phi-Decoding). Each answer in the making gets several next steps. Those that are improbable for this place
    are left out; after each other one the answer is written on, by `roller`. A step's value is the mean log-probability
    of that rollout alone, in the law of who wrote it; its advantage is that value above the value of the step before.
    Steps with a positive advantage are drawn by the mean of two distributions: of their advantages, and of the sizes of
    the clusters that their rollouts' texts form. Where most rollouts agree, foresight ends, all answers are completed,
    and one of the larger cluster is drawn by advantage. At temperature 0 all steps would be the same, and it is plain
    decoding. Nothing is shown before all is written; a request that is made again begins anew.
    """
    model, seq = models.by_role(params.model), request.sequence
    if seq.sampling.greedy:
        async with aclosing(stream(model, seq, request.streams)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                yield segment
        return
    marks = await asyncio.to_thread(step_marks, models.tokenizer, model.vocab_size, params.separators)
    await model.extend(seq, want=ReadSpec(draw=None))  # its forks share what it has cached
    roller = model if params.roller is None else models.by_role(params.roller)
    if roller is not model:  # rollouts find the prompt's blocks, and do not all read it at once
        await roller.extend(seq, want=ReadSpec(draw=None))
    with branches_of(seq) as branches:
        search = Foresight(model, roller, models.tokenizer, seq, branches, params, StepEnd(marks, params.separators))
        await search.look()
        best = await search.completed()
        request.extra["phi_decoding"] = {"steps": search.steps, "rollouts": search.rollouts, "pruned": search.pruned}
        segment = branches.show(best, models)
    yield segment


class Foresight:
    """The beams of one answer, and how their next steps are chosen.

    Args:
        model: answers.
        roller: looks ahead.
        tokenizer: theirs.
        seq: the request's.
        branches: of it.
        params: of the method.
        end: finds ends of steps.

    Attributes:
        beams: as many as `params.beams`.
        steps: chosen so far.
        rollouts: written so far.
        pruned: steps that were left out before a rollout.
    """

    def __init__(
        self,
        model: Model,
        roller: Model,
        tokenizer: TokenText,
        seq: Sequence,
        branches: Branches,
        params: PhiDecodingParams,
        end: StepEnd,
    ) -> None:
        self.model = model
        self.roller = roller
        self.params = params
        self.steps = self.rollouts = self.pruned = 0
        self._tokenizer = tokenizer
        self._branches = branches
        self._seed = seq.seed
        self._until = StopCondition((StepRule(end),), params.max_step_tokens) | watched()
        self.beams = [Beam(each) for each in branches.fork(model, [seq] * params.beams, [seq.seed] * params.beams)]

    async def look(self) -> None:
        """Choose steps with foresight, until enough are, all beams have ended, or what is foreseen agrees."""
        agreed = False
        while self.steps < self.params.max_steps and not agreed and any(not each.seq.finished for each in self.beams):
            candidates = await self._drawn()
            kept = self._wide(candidates)
            await self._foresee(kept)
            agreed = await self._take(kept, candidates)

    async def _drawn(self) -> list[Candidate]:
        """Next steps of all beams; one that has ended stays as it is."""
        writing = [each for each in self.beams if not each.seq.finished for _ in range(self.params.samples)]
        seed = round_seed(self._seed, self.steps)
        seeds = [derive_seed(seed, place) for place in range(len(writing))]
        forks = await self._branches.write(self.model, [each.seq for each in writing], seeds, self._until)
        found = []
        for beam, fork in zip(writing, forks, strict=True):
            tokens = fork.generated[len(beam.seq.generated) :]
            likelihood = mean_logprob(tokens)
            found.append(Candidate(fork, beam.value, likelihood, self._text(tokens), likelihood))
        ended = [each for each in self.beams if each.seq.finished]
        return found + [Candidate(each.seq, each.value, each.value, "", each.value) for each in ended]

    def _wide(self, candidates: list[Candidate]) -> list[Candidate]:
        """Candidates that are not improbable for this place; at least as many as there are beams, if there are."""
        key = noise_key(self._seed, self.steps, Purpose.SELECT, WIDTH)
        likelihoods = [each.likelihood for each in candidates]
        places = pruned_in_width(likelihoods, self.params.sigma, self.params.beams, key)
        self.pruned += len(candidates) - len(places)
        return [candidates[place] for place in places]

    async def _foresee(self, candidates: list[Candidate]) -> None:
        """Write on after each, and take the value and the text of that."""
        rolled = [each for each in candidates if not each.seq.finished]
        seed = round_seed(self._seed, self.steps)
        first = self.params.beams * self.params.samples  # seeds before are those of steps
        seeds = [derive_seed(seed, first + place) for place in range(len(rolled))]
        until = StopCondition(max_tokens=self.params.rollout_tokens) | watched()
        forks = await self._branches.write(
            self.roller, [each.seq for each in rolled], seeds, until, self.params.rollout_temperature
        )
        self.rollouts += len(rolled)
        for each, fork in zip(rolled, forks, strict=True):
            tokens = fork.generated[len(each.seq.generated) :]
            each.value, each.foreseen, each.rolled = mean_logprob(tokens), self._text(tokens), True
        self._branches.drop(forks)

    async def _take(self, kept: list[Candidate], candidates: list[Candidate]) -> bool:
        """Make beams of as many candidates; return whether foresight is over."""
        count, key = self.params.beams, noise_key(self._seed, self.steps, Purpose.SELECT, STEP)
        better = [each for each in kept if each.rolled and each.advantage > 0]
        self.steps += 1
        agreed = False
        if len(better) < count:
            logits = torch.tensor([each.advantage for each in kept], dtype=torch.float64) / SHARPNESS
            chosen = [kept[place] for place in drawn_without_replacement(logits, count, key)]
        else:
            labels = await asyncio.to_thread(alike, [each.foreseen for each in better], self.params.clusters, key)
            shares = cluster_shares(labels)
            logits = combined([each.advantage for each in better], shares).log()
            chosen = [better[place] for place in drawn_without_replacement(logits, count, key)]
            agreed = max(shares) > self.params.agreement and self.steps >= self.params.min_steps
        same = count > 1 and len({each.step for each in chosen}) == 1
        before = [each.seq for each in self.beams]
        self.beams = [Beam(each.seq, each.value) for each in chosen]
        left = {each.seq for each in self.beams}
        gone = dict.fromkeys([*before, *(each.seq for each in candidates)])
        self._branches.drop([each for each in gone if each not in left])
        return agreed or same

    async def completed(self) -> Sequence:
        """Complete all beams, and draw one."""
        writing = [each for each in self.beams if not each.seq.finished]
        seed = round_seed(self._seed, self.params.max_steps)
        seeds = [derive_seed(seed, place) for place in range(len(writing))]
        forks = await self._branches.write(self.model, [each.seq for each in writing], seeds, watched())
        found = []
        for beam, fork in zip(writing, forks, strict=True):
            tokens = fork.generated[len(beam.seq.generated) :]
            found.append(Candidate(fork, beam.value, 0.0, "", mean_logprob(tokens), self._text(tokens), True))
        ended = [Candidate(each.seq, each.value, 0.0, "", each.value) for each in self.beams if each.seq.finished]
        key = noise_key(self._seed, self.params.max_steps, Purpose.SELECT, LAST)
        return (await asyncio.to_thread(final_choice, found + ended, key)).seq

    def _text(self, tokens: Items[Token]) -> str:
        return self._tokenizer.decode(token.id for token in tokens)


def mean_logprob(tokens: Items[Token]) -> float:
    """Return the mean log-probability of tokens, nats."""
    return sum(token.logprob or 0.0 for token in tokens) / len(tokens)


def pruned_in_width(likelihoods: list[float], sigma: float, least: int, key: int) -> list[int]:
    """Return the places of values above the mean less `sigma` standard deviations; the others fill up to `least`.

    Args:
        likelihoods: mean log-probabilities of steps, nats.
        sigma: standard deviations, of all values.
        least: how many stay, if there are as many; those that fill up are drawn without replacement.
        key: of that draw.
    """
    values = torch.tensor(likelihoods, dtype=torch.float64)
    bound = float(values.mean()) - sigma * float(values.std(correction=0))
    kept = [place for place, value in enumerate(likelihoods) if value > bound]
    rest = [place for place, value in enumerate(likelihoods) if value <= bound]
    if len(kept) < least and rest:
        added = drawn_without_replacement(values[rest] / SHARPNESS, least - len(kept), key)
        kept += [rest[place] for place in added]
    return sorted(kept)


def alike(texts: Items[str], clusters: int, key: int) -> list[int]:
    """Return the cluster of each text by its words; of many long ones that takes a while."""
    return k_means(tf_idf(texts), clusters, key)


def cluster_shares(labels: Items[int]) -> list[float]:
    """Return, for each member, the share of all that is in its cluster."""
    sizes = Counter(labels)
    return [sizes[label] / len(labels) for label in labels]


def combined(advantages: Items[float], shares: Items[float]) -> torch.Tensor:
    """Return the mean of two distributions, by advantage and by the size of the cluster: float64 [n], of sum 1."""
    by_value = (torch.tensor(advantages, dtype=torch.float64) / SHARPNESS).softmax(-1)
    return (by_value + torch.tensor(shares, dtype=torch.float64).softmax(-1)) / 2


def drawn_without_replacement(logits: torch.Tensor, count: int, key: int) -> list[int]:
    """Return places drawn one after the other by softmax(logits), no place twice: float64 [n], at most n of them."""
    noisy = logits + gumbel([key], len(logits), logits.device)[0]
    return noisy.topk(min(count, len(logits))).indices.tolist()


def final_choice(found: Items[Candidate], key: int) -> Candidate:
    """Draw a completed answer: of the larger one of two clusters of those with an advantage, by it; else of all."""
    better = [each for each in found if each.rolled and each.advantage > 0]
    if better:
        labels = alike([each.foreseen for each in better], FINAL_CLUSTERS, key)
        largest = Counter(labels).most_common(1)[0][0]
        better = [each for each, label in zip(better, labels, strict=True) if label == largest]
    else:
        better = list(found)
    logits = torch.tensor([each.advantage for each in better], dtype=torch.float64) / SHARPNESS
    return better[drawn_without_replacement(logits, 1, key)[0]]
