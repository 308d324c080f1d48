"""One answer of a request: its sequence, its text, and what of both is still to be sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from decoding.noise import derive_seed
from decoding.sequence import Sequence
from decoding.thinking import ThinkingWalk
from pool.detokenizer import Detokenizer
from pool.prefix_stores import Share, shared
from pool.reasoning import answer_text, bound
from pool.resume import ResumeState, notes_of
from pool.stop_strings import StopStrings, detokenizer_of, text_of
from pool.structures import check_answer
from pool.text import TextTokenizer
from pool.usage import token_out
from pool.validation import PreparedRequest
from turnout.calls import Chunk
from turnout.errors import Code, TurnoutError
from turnout.registry import MethodInfo
from turnout.types import FinishReason, Token


@dataclass(slots=True)
class Answer:
    """One of the `n` answers of a request.

    Attributes:
        index: its number.
        sequence: its tokens.
        text: its text, up to a stop string.
        spans: gives each of its tokens its part of the text.
        walk: says which of its tokens are thinking; None: none is.
        delivery: what of it is still to be sent.
        started: set once it has a token, or has ended.
        taken: tokens that its method has given.
        ended: whether its last chunk has been sent.
        tool_format: how calls are written in its text; "": there are none.
    """

    index: int
    sequence: Sequence
    text: StopStrings
    spans: Detokenizer
    walk: ThinkingWalk | None
    delivery: ResumeState
    started: asyncio.Event = field(default_factory=asyncio.Event)
    taken: int = 0
    ended: bool = False
    tool_format: str = ""

    def skip(self, token_ids: Iterable[int]) -> None:
        """Advance the text over tokens that the client has."""
        for token_id in token_ids:
            self.spans.feed(token_id)
            self._thinks(token_id)

    def _thinks(self, token_id: int) -> bool:
        return self.walk is not None and self.walk.feed(token_id)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far that are thinking, its markers included."""
        return self.walk.num_reasoning if self.walk is not None else 0

    def take(self, given: tuple[Token, ...]) -> tuple[Token, ...]:
        """Take the next tokens from the method; return those that the client does not have."""
        self.taken += len(given)
        tokens = self.delivery.new(given)
        self.skip(token.id for token in given[: len(given) - len(tokens)])
        return tokens

    def chunk(self, tokens: tuple[Token, ...]) -> Chunk:
        """Make a chunk of the next tokens and the text so far."""
        text = self.delivery.text(self.text.take())
        outs = tuple(token_out(token, self.spans, self._thinks(token.id)) for token in tokens)
        reasoning = self.delivery.reasoning(self.text.take_reasoning())
        return Chunk(self.index, text, outs, reasoning=reasoning, tool_format=self.tool_format)

    def last_chunk(self) -> Chunk:
        """Make the chunk that ends it: the rest of its text, and the reason."""
        self.ended = True
        check_answer(self.sequence)
        reason = self.sequence.finish_reason or FinishReason.LENGTH
        if reason is FinishReason.STOP and (last := self.sequence.tokens[-1]) in self.sequence.end_ids:
            self.text.end(last)
        text = self.delivery.text(self.text.take(final=True))
        reasoning = self.delivery.reasoning(self.text.take_reasoning())
        self.delivery.end()
        stop, form = self._stop(reason), self.tool_format
        return Chunk(self.index, text, (), reason, reasoning=reasoning, stop=stop, tool_format=form)

    def _stop(self, reason: FinishReason) -> str | int | None:
        """What of the request's stop strings and stop token ids ended it; None: none of them did."""
        if reason is not FinishReason.STOP:
            return None
        last = self.sequence.tokens[-1]
        return last if last in self.sequence.sampling.stop_token_ids else self.text.found


def new_sequence(
    prepared: PreparedRequest, tokenizer: TextTokenizer, share: Share, index: int
) -> tuple[Sequence, StopStrings, Detokenizer, ThinkingWalk | None]:
    """Make the sequence of an answer, its text up to a stop string, and what finds each token's text and thinking.

    Args:
        prepared: the checked call.
        tokenizer: the pool's.
        share: decides whose cache the prompt belongs to.
        index: of the answer; each has noise of its own.
    """
    call, sampling = prepared.call, prepared.sampling
    spans, thinking = detokenizer_of(tokenizer, prepared.prompt, sampling), prepared.thinking
    text = text_of(answer_text(spans.clone(), thinking, tokenizer, call.reasoning != "hide"), sampling)
    sequence = Sequence(
        prepared.prompt,
        sampling,
        derive_seed(prepared.seed, index),
        tokenizer.eos_ids,
        text,
        shared(share, call, prepared.prompt),
        prepared.account or call.tenant,
        lossy=call.cache == "lossy",
        low_priority=call.priority == "batch",
    )
    sequence.owner = call.tenant
    sequence.renderings = dict(prepared.renderings)
    sequence.thinking = thinking
    inner = prepared.constraint.clone() if prepared.constraint is not None else None
    sequence.constraint = bound(inner, thinking, tokenizer, sampling.structure)
    return sequence, text, spans, ThinkingWalk(thinking, tokenizer) if thinking is not None else None


def resume(answers: list[Answer], method: MethodInfo, continues: bool) -> list[str]:
    """Let answers begin with what the client has of them.

    Args:
        answers: of a request.
        method: writes the rest.
        continues: whether its method continues from their tokens; otherwise only complete answers are taken over.

    Returns:
        Notes for the person who reads them.

    Raises:
        TurnoutError: UNAVAILABLE: a joint method cannot make them again, as one may depend on how fast another was.
    """
    begun = [answer for answer in answers if answer.delivery or answer.delivery.finished]
    if begun and method.joint and not continues:
        message = f"method {method.name!r} writes its answers together: once begun, they cannot be made again"
        raise TurnoutError(Code.UNAVAILABLE, f"{message}; send the request again")
    for answer in begun:
        if continues or answer.delivery.finished:
            answer.delivery.resume(answer.sequence)
            answer.skip(answer.delivery.tokens)
            answer.taken = answer.delivery.count
    return notes_of([answer.delivery for answer in begun], continues)
