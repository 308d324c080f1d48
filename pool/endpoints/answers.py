"""Answers that are held until it is known whether they are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass, replace

from pool.endpoints.failover import TextModels, TextRequest
from pool.endpoints.text_model import Work
from turnout.calls import Chunk, GenerateCall


@dataclass(frozen=True, slots=True)
class Drafts:
    """Whole answers of one call, and what they took.

    Attributes:
        answers: one chunk each, in order.
        work: of all of them.
    """

    answers: list[Chunk]
    work: Work

    @classmethod
    async def write(cls, request: TextRequest, models: TextModels, role: str, call: GenerateCall) -> Drafts:
        """Write the answers of a call by the model of a role."""
        apart = TextRequest(request.call, one_model=request.one_model, shadow=request.shadow)
        found: list[list[Chunk]] = [[] for _ in range(call.sampling.n)]
        async with aclosing(models.answer(apart, role, call)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                found[chunk.index].append(chunk)
        return cls([_joined(parts, index) for index, parts in enumerate(found)], apart.work)

    def settle(self, into: Work, shown: Collection[int]) -> None:
        """Add what they took to a request; tokens of those that are not shown are counted as discarded.

        Args:
            into: the request's.
            shown: places of the answers that clients see.
        """
        every: Counter[str] = Counter(token.source for answer in self.answers for token in answer.tokens)
        kept: Counter[str] = Counter(token.source for place in shown for token in self.answers[place].tokens)
        for name, meter in self.work.meter.models.items():
            # Pieces of an endpoint's answer need not be tokens: its own count is divided as they are.
            share = kept[name] / every[name] if every[name] else float(bool(shown))
            left = round(share * meter.generated_tokens)
            meter.discarded_tokens += meter.generated_tokens - left
            meter.generated_tokens = left
        into.merge(self.work)


def _joined(parts: list[Chunk], index: int) -> Chunk:
    return Chunk(
        index,
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.tokens),
        parts[-1].finish_reason if parts else None,
        parts[-1].tool_calls if parts else (),
        tuple(each for part in parts for each in part.call_parts),
        "".join(part.reasoning for part in parts),
        parts[-1].stop if parts else None,
        parts[0].tool_format if parts else "",
    )


def as_asked(answer: Chunk, call: GenerateCall) -> Chunk:
    """An answer without what its caller did not ask for: log-probabilities and entropies that a method read."""
    sampling = call.sampling
    if sampling.logprobs is not None:
        return answer
    detailed = sampling.token_details
    tokens = tuple(
        replace(token, logprob=None, top=(), entropy_bits=token.entropy_bits if detailed else None)
        for token in answer.tokens
    )
    return replace(answer, tokens=tokens)
