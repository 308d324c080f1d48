"""Speculative decoding: the small model drafts a chain, the large one checks it in one forward."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Literal

from pydantic import Field

from decoding.drafters.model_chain import ModelChainDrafter
from decoding.model import Draw, ModelPool, Request
from decoding.verifiers.base import get_verifier
from turnout.registry import MethodParams, method
from turnout.types import Segment, TokenKind


class SpeculativeParams(MethodParams):
    """Parameters of `speculative`."""

    draft_length: Annotated[int, Field(ge=1, le=64, description="tokens drafted per round")] = 4
    verifier: Annotated[
        Literal["match", "rejection"],
        Field(
            description="match: output equals plain decoding with the same seed; "
            "rejection: same distribution, and the most accepted tokens for a draft drawn independently"
        ),
    ] = "match"


@method(params=SpeculativeParams, seeds=(111,), lossless=True, needs=frozenset({"small", "large"}))
async def speculative(request: Request, models: ModelPool, params: SpeculativeParams) -> AsyncIterator[Segment]:
    """The small model drafts, the large one verifies; the output law is the large model's.

    Seed 111 (Speculative decoding). An end of the answer inside a draft cuts the rest of the round.
    """
    seq, sizes = request.sequence, models.sizes
    verifier = get_verifier(params.verifier)
    drafter = ModelChainDrafter(Draw.DRAFT if verifier.proposals else Draw.SAMPLE)
    while not seq.finished:
        draft = await models.small.propose(seq, drafter, params.draft_length)
        verdict = await models.large.verify(seq, draft, verifier)
        emitted = seq.extend(verdict.tokens, sizes)
        drafter.observe(seq, draft, verdict)
        seq.meter.rounds += 1
        seq.meter.num_draft_tokens += len(draft)
        seq.meter.num_accepted_tokens += sum(token.kind is TokenKind.ACCEPTED for token in emitted)
        yield Segment(emitted, "finish" if seq.finished else "round")
