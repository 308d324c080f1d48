"""The small model drafts while the large one verifies: neither waits for the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

from pydantic import Field, field_validator

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.lengths.base import LengthPolicy
from decoding.lengths.fixed import FixedLength
from decoding.model import ModelPool, NoiseKind, Request
from decoding.preverify import LateCandidate
from decoding.speed_ratio import Pace
from decoding.tree import DraftTree
from decoding.verifiers.base import Verifier, VerifyResult, with_rejected
from decoding.verifiers.match import MatchVerifier
from decoding.verifiers.rejection import RejectionVerifier
from turnout.errors import invalid
from turnout.registry import MethodParams, method
from turnout.types import Segment, Token, TokenKind

P = ParamSpec("P")
One = TypeVar("One")
Other = TypeVar("Other")


class PearlParams(MethodParams):
    """Parameters of `pearl`."""

    draft_length: Annotated[
        int | None,
        Field(
            ge=1,
            le=64,
            description="tokens drafted while the large model verifies once; auto, or absent: as many as there is time"
            " for, by measured step times",
        ),
    ] = None
    most: Annotated[int, Field(ge=1, le=64, description="most tokens drafted at once where draft_length is auto")] = 16
    verifier: Annotated[
        Literal["match", "rejection"],
        Field(
            description="match: output equals plain decoding with the same seed; rejection: same distribution, and the"
            " most accepted tokens"
        ),
    ] = "match"

    @field_validator("draft_length", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return None if value == "auto" else value


class Pearl:
    """Rounds in which the two models work at the same time.

    `tail` is the end of an earlier block: tokens that follow the sequence, drafted and not verified. In every round
    the large model reads the sequence and the tail, and the small one drafts a block behind the tail. What the large
    model read at the tail's end is what the block's first token is judged by: where all of the tail and this token
    stay, the rest of the block is the next tail (post-verify; with an empty tail, pre-verify), and what is drafted is
    never waited for. Where one is rejected, the tail and the block are dropped.

    Every place of an answer but its last is judged once, with noise of its own, whatever the blocks were: so their
    length, which depends on how fast the models are, never changes a token.

    Args:
        request: what to answer.
        models: `small` drafts, `large` verifies; not one and the same.
        params: the request's.
    """

    def __init__(self, request: Request, models: ModelPool, params: PearlParams) -> None:
        seq = request.sequence
        self._seq, self._small, self._large, self._sizes = seq, models.small, models.large, models.sizes
        self._match = params.verifier == "match"
        self._details = seq.sampling.token_details
        self._drafter = ModelChainDrafter(candidates=Candidates.FIXED if self._match else Candidates.DRAWN)
        self._drafter.draw = NoiseKind.DRAFT  # nothing chooses the rounds by tokens: see above
        self._length: LengthPolicy = FixedLength()
        self._verifier: Verifier = MatchVerifier() if self._match else RejectionVerifier()
        self._open_end = RejectionVerifier()
        self._open_end.open_end = True
        self._pace = Pace(seq, self._small, self._large, params.most, params.draft_length)
        self._clock = models.clock
        self._nothing = DraftTree.empty(self._small.name)
        self._tail = self._nothing

    async def run(self) -> AsyncGenerator[Segment, None]:
        """Segments, one per round."""
        seq = self._seq
        while not seq.finished:
            tail, depth = self._tail, self._room()
            verifier = self._verifier if self._match or depth == 0 else self._open_end
            (block, draft_s), (verdict, verify_s) = await side_by_side(
                self._timed(self._draft, depth), self._timed(self._large.verify, seq, tail, verifier)
            )
            written = with_rejected(tail, verdict) if self._details else verdict.tokens
            emitted = list(seq.extend(written[: len(tail)] if depth else written, self._sizes))
            kept = [1 + place for place in range(min(len(verdict.path), len(emitted)))]
            self._tail = self._nothing
            if depth and not seq.finished and len(verdict.path) == len(tail):
                token, stays = await self._first(block, verdict)
                if self._details and not stays:
                    token = token._replace(rejected=block.tokens[:1])
                emitted += seq.extend([token], self._sizes)
                if stays:
                    kept.append(0)
                    self._tail = chain(block, 1, len(block))
            seq.meter.speculation.add_round(
                depths=block.depths(),
                num_accepted=len(kept),
                num_emitted=len(emitted),
                draft_s=draft_s,
                verify_s=verify_s,
                accepted_depths=kept,
            )
            self._pace.observe(len(block), draft_s, verify_s)
            yield Segment(tuple(emitted), "finish" if seq.finished else "round")

    async def _timed(
        self, work: Callable[P, Coroutine[Any, Any, One]], *args: P.args, **named: P.kwargs
    ) -> tuple[One, float]:
        """Run `work`; return its result, and its time in seconds."""
        started = self._clock()
        done = await work(*args, **named)
        return done, self._clock() - started

    def _room(self) -> int:
        """Tokens to draft now: nothing behind an end of the answer, and its last place is the large model's own."""
        tail = self._tail.tokens
        if tail and tail[-1] in self._seq.end_ids:
            return 0
        return max(min(self._pace.block, self._seq.num_remaining - 1 - len(tail)), 0)

    async def _draft(self, depth: int) -> DraftTree:
        if depth == 0:
            return self._nothing
        self._drafter.after = self._tail.tokens
        block = await self._small.propose(self._seq, self._drafter, DraftBudget(depth, depth), self._length)
        return block.within(self._large.vocab_size)

    async def _first(self, block: DraftTree, verdict: VerifyResult) -> tuple[Token, bool]:
        """Return the token in place of the block's first, the whole tail being accepted; whether it is that one."""
        candidate = chain(block, 0, min(len(block), 1))
        if not self._match:
            return await self._judged(candidate, verdict)
        own = verdict.tokens[-1]
        if own.id in candidate.tokens:
            return own._replace(source=block.source, kind=TokenKind.ACCEPTED), True
        return own._replace(kind=TokenKind.RECOVERED if len(candidate) else TokenKind.BONUS), False

    async def _judged(self, candidate: DraftTree, verdict: VerifyResult) -> tuple[Token, bool]:
        """Return the token in the place of a drawn candidate, whether it is the candidate."""
        late = LateCandidate()
        self._large.observe(self._seq, late, candidate, verdict)
        await self._large.propose(self._seq, late, DraftBudget(1, 1), self._length)
        if late.token is not None:
            return late.token, late.accepted
        # The model was lost between the two, and with it what it had read: it reads again, with the same noise.
        verifier = self._open_end if len(candidate) else self._verifier
        again = await self._large.verify(self._seq, candidate, verifier)
        [token] = again.tokens
        return token, bool(again.path)


def chain(block: DraftTree, start: int, stop: int) -> DraftTree:
    """Some neighbouring tokens of a chain, as a chain."""
    return DraftTree.chain(list(block.tokens[start:stop]), block.source, list(block.proposals[start:stop]))


async def side_by_side(one: Coroutine[Any, Any, One], other: Coroutine[Any, Any, Other]) -> tuple[One, Other]:
    """Run both at once; if one fails or the caller is cancelled, the other ends too, before this returns."""
    first, second = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        return await asyncio.gather(first, second)
    finally:
        if not (first.done() and second.done()):
            first.cancel()
            second.cancel()
            await asyncio.wait((first, second))


@method(
    params=PearlParams,
    papers=(130,),
    lossless=True,
    needs=frozenset({"small", "large"}),
    resumable=True,
    drafts=True,
)
async def pearl(request: Request, models: ModelPool, params: PearlParams) -> AsyncIterator[Segment]:
    """The small model drafts while the large one verifies; neither waits for the other.

    Paper #130 (PEARL: Parallel Speculative Decoding with Adaptive Draft Length), its pre-verify and post-verify. It
    pays where each model has a device of its own; on a shared one the models take turns. The verified run grows as long
    as drafts are accepted, and a round then brings a whole block.
    """
    if models.small is models.large:
        raise invalid("method", "pearl needs two models, as both work on the answer at the same time; here is one")
    async with aclosing(Pearl(request, models, params).run()) as running:
        async for segment in running:
            yield segment
