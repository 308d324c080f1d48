"""Sequential Monte Carlo under a structure: several answers are written, and copied or dropped by their weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from decoding.adaptive_rejection import Drawn, draw
from decoding.candidates import charge, show
from decoding.decode_loop import reported, stream
from decoding.logits import process
from decoding.model import MEASURES, Model, ModelPool, ReadSpec, Request
from decoding.noise import Purpose, derive_seed, noise_key, uniform
from decoding.rollouts import together
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import FinishReason, Segment, Token

LARGE = 1 << 14  # tokens of a vocabulary
LAST = 1  # lane of the draw of the answer; those of resampling have none


class SmcParams(MethodParams):
    """Parameters of `smc`."""

    example: ClassVar = {"particles": 3}
    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    particles: Annotated[int, Field(ge=1, le=64, description="answers that are written at once")] = 8
    resample_below: Annotated[
        float,
        Field(
            ge=0.0,
            le=1.0,
            allow_inf_nan=False,
            description="answers are copied and dropped by their weights when their effective number falls below this"
            " share of `particles`; 0: never",
        ),
    ] = 0.5
    max_accepts: Annotated[
        int,
        Field(ge=2, le=64, description="permitted tokens to look for in each place: more make steadier weights"),
    ] = 2
    max_rejects: Annotated[
        int | None,
        Field(ge=2, le=1 << 20, description="refused tokens in one place after which an answer is given up; null: any"),
    ] = None


@dataclass(slots=True, eq=False)
class Particle:
    """Answer in the making.

    Attributes:
        seq: a fork of the request's sequence.
        log_weight: of what it has written since it was last resampled.
        dead: whether nothing may follow it.
    """

    seq: Sequence
    log_weight: float = 0.0
    dead: bool = False

    @property
    def writes(self) -> bool:
        """Whether more of it is to come."""
        return not self.dead and not self.seq.finished


@method(params=SmcParams, papers=(78,), lossless=False, needs=frozenset(), draws=True)
async def smc(request: Request, models: ModelPool, params: SmcParams) -> AsyncIterator[Segment]:
    """One model writes several answers under a structure; tokens are weighted, and one answer is drawn by weight.

    Paper #78 (Adaptive Weighted Rejection Sampling). A mask alone gives a beginning the model's probability, however
    improbable all ways are to end it. Here each token carries an estimate of how probable permitted tokens were
    (`decoding.adaptive_rejection`); answers that the model would not have begun so lose their weight, and are replaced
    by copies of others. The law of the answer approaches the request's own law (temperature and processors included)
    given that the text fits and ends within `max_tokens`, as `particles` grows; with one particle it is that of the
    mask. The structure is asked for a few tokens in each place; no mask is made of one that answers them singly.
    Nothing is shown before all are written. Usage
    has the log-probability that a text fits, as it was estimated, among its measures.
    """
    model, seq = models.by_role(params.model), request.sequence
    if seq.constraint is None or seq.sampling.greedy:
        why = "the request has no structure" if seq.constraint is None else "at temperature 0 there is one text"
        request.notes.append(f"smc: as plain, for {why}")
        async with aclosing(stream(model, seq, request.streams)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                yield segment
        return
    population = Population(model, seq, params)
    try:
        await population.write()
        best = population.chosen()
        if best is not None:
            request.extra.setdefault(MEASURES, {}).update(population.report())
            population.particles.remove(best)
            population.charge()
            segment = show(seq, best.seq, models)
            model.release(best.seq)
            yield segment
    finally:
        population.close()
    if best is None:
        population.charge()
        request.notes.append("smc: as plain, for no answer had a token that may follow within max_rejects")
        async with aclosing(stream(model, seq, request.streams)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                yield segment


class Population:
    """Particles of one answer, and how they are resampled.

    Args:
        model: writes.
        seq: the request's sequence; nothing is appended to it.
        params: of the method.

    Attributes:
        particles: one in each place; the noise of a place is its own, whichever answer is there.
        log_fits: logarithm of the estimated probability that the model's answer fits, up to the last resampling.
        asked: tokens that the structure was asked for.
        steps: tokens drawn.
        resampled: how often particles were.
    """

    def __init__(self, model: Model, seq: Sequence, params: SmcParams) -> None:
        self.model = model
        self.seq = seq
        self.params = params
        self.particles: list[Particle] = []
        self.log_fits = 0.0
        self.asked = self.steps = self.resampled = 0

    async def write(self) -> None:
        """Write all to their end."""
        await self.model.extend(self.seq, want=ReadSpec(draw=None))  # the forks share the prompt's blocks
        self.particles = [Particle(twin) for twin in self.model.fork_many([self.seq] * self.params.particles)]
        position = len(self.seq)
        while writing := [(place, each) for place, each in enumerate(self.particles) if each.writes]:
            position += 1
            drawn = await together([self._step(each, place) for place, each in writing])
            self.asked += sum(each.asked for each in drawn)
            self.steps += len(drawn)
            if any(each.writes for each in self.particles):
                self._resample(position)

    async def _step(self, particle: Particle, place: int) -> Drawn:
        """Append one token, and take its weight."""
        seq = particle.seq
        [row] = await self.model.extend(seq, want=reported(seq) | ReadSpec(draw=None, logits=True))
        assert row.logits is not None
        raw = row.logits.detach().float()
        if raw.numel() < LARGE:
            found, logprob = self._drawn(seq, raw, place)
        else:  # milliseconds, in which other requests' streams are not to wait
            found, logprob = await asyncio.to_thread(self._drawn, seq, raw, place)
        particle.log_weight += found.log_weight
        particle.dead = found.log_weight == -math.inf
        if not particle.dead:
            token = Token(found.token, self.model.name, logprob=logprob, entropy_bits=row.entropy_bits, top=row.top)
            seq.append(token, self.model.num_parameters)
        return found

    def _drawn(self, seq: Sequence, raw: torch.Tensor, place: int) -> tuple[Drawn, float]:
        """The next token, and its raw log-probability; appends nothing."""
        constraint, answer = seq.constraint, seq.answer
        assert constraint is not None
        found = draw(
            process(raw[None], [RowContext(seq, free=True)])[0],
            lambda token: constraint.permits(answer, (), token),
            seed=derive_seed(self.seq.seed, place),
            position=len(seq),
            max_accepts=self.params.max_accepts,
            max_rejects=self.params.max_rejects,
        )
        return found, float(torch.log_softmax(raw, -1)[found.token])

    def _resample(self, position: int) -> None:
        """Copy and drop particles where few of them have most of the weight: systematic resampling."""
        weights = self.weights()
        count = len(self.particles)
        effective = 1.0 / float(weights.square().sum())
        if not bool(weights.any()) or effective >= self.params.resample_below * count or count == 1:
            return
        self.log_fits += self._log_mean()
        self.resampled += 1
        first = uniform(noise_key(self.seq.seed, position, Purpose.SELECT))
        copies = systematic(weights, first)
        spare = [source for source, number in enumerate(copies) for _ in range(number - 1)]
        twins = iter(self.model.fork_many([self.particles[source].seq for source in spare]))
        kept = [each for each, number in zip(self.particles, copies, strict=True) if number]
        for each, number in zip(self.particles, copies, strict=True):
            if not number:
                charge(self.seq, each.seq)
                self.model.release(each.seq)
        self.particles = kept + [Particle(twin) for twin in twins]
        for each in self.particles:
            each.log_weight = 0.0

    def weights(self) -> torch.Tensor:
        """Return the particles' shares of the weight: float64 [particles]; zeros where all are dead."""
        logs = torch.tensor([each.log_weight for each in self.particles], dtype=torch.float64)
        return logs.softmax(-1) if bool(logs.isfinite().any()) else torch.zeros_like(logs)

    def _log_mean(self) -> float:
        logs = torch.tensor([each.log_weight for each in self.particles], dtype=torch.float64)
        return float(logs.logsumexp(-1)) - math.log(len(self.particles))

    def chosen(self) -> Particle | None:
        """Draw the answer by weight, of those that ended, or of all where all were cut; None: all are dead."""
        weights = self.weights()
        ended = torch.tensor([each.seq.finish_reason is FinishReason.STOP for each in self.particles])
        weights = weights * ended if bool((weights * ended).any()) else weights
        if not bool(weights.any()):
            return None
        point = uniform(noise_key(self.seq.seed, self.seq.num_prompt_tokens, Purpose.SELECT, LAST))
        sums = weights.cumsum(-1)
        return self.particles[int(torch.searchsorted(sums, point * float(sums[-1]), right=True))]

    def report(self) -> dict[str, float]:
        """Return what usage says of it, as measures."""
        weights = self.weights()
        return {
            "smc_log_fits": self.log_fits + self._log_mean(),
            "smc_effective_particles": 1.0 / float(weights.square().sum()),
            "smc_resampled": float(self.resampled),
            "smc_asked_per_token": self.asked / max(self.steps, 1),
        }

    def charge(self) -> None:
        """Add the work of all particles that are left to the request's."""
        for each in self.particles:
            charge(self.seq, each.seq)

    def close(self) -> None:
        """Release them."""
        for each in self.particles:
            self.model.release(each.seq)


def systematic(weights: torch.Tensor, first: float) -> list[int]:
    """Return how many copies of each particle are kept: [n], as many as there are particles.

    Args:
        weights: float64 [n], of sum 1.
        first: uniform in [0, 1): where the comb of n equidistant points begins.
    """
    count = len(weights)
    points = (torch.arange(count, dtype=torch.float64) + first) / count
    sums = weights.cumsum(-1)
    places = torch.searchsorted(sums / sums[-1], points, right=True).clamp(max=count - 1)
    return torch.bincount(places, minlength=count).tolist()
