"""Self-infilling: where the model is unsure it writes the end of its text first, and then what joins both."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import Field

from decoding.candidates import charge
from decoding.decode_loop import stream
from decoding.model import MEASURES, Decision, Model, ModelPool, Readout, ReadSpec, Request, StopCondition
from decoding.noise import Purpose, derive_seed, noise_key, uniform
from decoding.sequence import Sequence
from decoding.state import Stateful
from decoding.text import TextCodec, codec_of, continue_with, text_within
from turnout.errors import invalid
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import FinishReason, Segment, Token

FIELD = "method.params"
LANE = 3  # of draws whether to interrupt
Mark = Annotated[str, Field(min_length=1, max_length=64)]


class SelfInfillParams(MethodParams):
    """Parameters of `self_infill`."""

    example: ClassVar = {"prefix_mark": "{", "suffix_mark": "|", "middle_mark": "}", "suffix_prompt": "a", "tau": 0.5}
    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    prefix_mark: Annotated[Mark, Field(description="the model's token before a beginning")] = "<fim_prefix>"
    suffix_mark: Annotated[Mark, Field(description="its token before an end")] = "<fim_suffix>"
    middle_mark: Annotated[Mark, Field(description="its token before what joins both")] = "<fim_middle>"
    suffix_prompt: Annotated[Mark, Field(description="what an end begins with")] = "return"
    tau: Annotated[
        float,
        Field(ge=0.0, le=1.0, allow_inf_nan=False, description="unsure: the best token is less probable; 0: never"),
    ] = 0.1
    at_random: Annotated[
        bool, Field(description="interrupt with probability 1 - p / (2 tau), p that of the best token; false: always")
    ] = False
    loops: Annotated[int, Field(ge=0, le=8, description="times that the end, and then the rest, are written anew")] = 1
    suffix_tokens: Annotated[int, Field(ge=1, le=4096, description="most tokens of an end")] = 128


class Unsure(Stateful):
    """Stop rule: the best token is not probable enough; the token that was drawn is left out.

    Args:
        tau: least probability.
        seed: of the draws; None: every such place counts.
        first: position of the first token.
    """

    name = "unsure"
    want = ReadSpec(draw=None, top=1)
    changing = ("position",)

    def __init__(self, tau: float, seed: int | None, first: int) -> None:
        self.tau = tau
        self.seed = seed
        self.position = first

    def observe(self, token: int, row: Readout) -> Decision:
        """See `StopRule.observe`."""
        best, position = math.exp(row.top[0][1]), self.position
        self.position += 1
        if best >= self.tau:
            return Decision.GO_ON
        if self.seed is None or uniform(noise_key(self.seed, position, Purpose.SWITCH, LANE)) < 1 - best / self.tau / 2:
            return Decision.DROP
        return Decision.GO_ON


@method(params=SelfInfillParams, papers=(41,), lossless=False, needs=frozenset())
async def self_infill(request: Request, models: ModelPool, params: SelfInfillParams) -> AsyncIterator[Segment]:
    """A model that can fill in the middle writes the end before it where it is unsure, then what joins both.

    Paper #41 (Self-Infilling Code Generation). Text is written from left to right until the best token is improbable;
    then its end, from `suffix_prompt` on, and then the middle with both around it. In a loop the end is written anew
    after beginning and middle, and the rest anew before that end. A middle that does not end by itself does not join,
    and is left out: the beginning is then continued from left to right. The marks stand in no text and in no other
    phase. The law is that of the phases, one after the other. Nothing is shown before all is written. Requests for what
    parts cannot keep (a structure, thinking, a least length, log-probabilities) are answered by plain decoding.
    """
    model, seq = models.by_role(params.model), request.sequence
    if why := _unsupported(seq):
        request.notes.append(f"self_infill: as plain, for {why}")
        async with aclosing(stream(model, seq, request.streams)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                yield segment
        return
    program = Program(model, seq, codec_of(models, "method"), params)
    try:
        tokens = await program.write()
        measured = dict(zip(("joined", "tried", "loops"), (*program.joined, program.loops), strict=True))
        request.extra.setdefault(MEASURES, {}).update({f"self_infill_{name}": float(n) for name, n in measured.items()})
    finally:
        written = program.close()
    shown = seq.extend(tokens, models.sizes)
    seq.meter.of(model.name, model.num_parameters).discarded_tokens += max(written - len(shown), 0)
    yield Segment(shown, "finish")


def _unsupported(seq: Sequence) -> str:
    """Why an answer is not written in parts; "": it is."""
    if seq.constraint is not None:
        return "a structure is written from left to right"
    if not seq.end_ids:
        return "no token ends the answer"
    if seq.thinking is not None and seq.thinking.start != "closed":
        return "the model may think before it answers"
    if seq.sampling.min_tokens:
        return "min_tokens is of an answer in one part"
    if seq.sampling.logprobs is not None:
        return "tokens that are put in have no log-probability"
    return ""


@dataclass(slots=True)
class Phase:
    """Phase of an answer: its tokens.

    Attributes:
        tokens: without the one that ended them.
        ended: whether they ended by themselves.
    """

    tokens: list[Token] = field(default_factory=list)
    ended: bool = False


class Program:
    """Phases of one answer.

    Args:
        model: writes.
        seq: the request's; nothing is appended to it.
        codec: the pool's tokenizer.
        params: of the method.

    Attributes:
        joined: middles that joined, of those that were tried: [joined, tried].
        loops: ends that were written anew and taken.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the tokenizer has no token for a mark.
    """

    def __init__(self, model: Model, seq: Sequence, codec: TextCodec, params: SelfInfillParams) -> None:
        self.model = model
        self.seq = seq
        self.params = params
        self.codec = codec
        self.joined = [0, 0]
        self.loops = 0
        self.marks = tuple(self._mark(name) for name in ("prefix_mark", "suffix_mark", "middle_mark"))
        self.prompt = continue_with(codec, params.suffix_prompt)
        self._made: list[Sequence] = []
        prompt, begins = seq.tokens[: seq.num_prompt_tokens], codec.encode("")
        count = len(begins) if prompt[: len(begins)] == begins else 0
        self._given = (prompt[:count], prompt[count:])  # what begins every text stays before the mark

    def _mark(self, name: str) -> int:
        text = getattr(self.params, name)
        ids = continue_with(self.codec, text)
        if len(ids) != 1:
            raise invalid(f"{FIELD}.{name}", f"must be one token of this pool's tokenizer; {text!r} is {len(ids)}")
        return ids[0]

    async def write(self) -> list[Token]:
        """Return the tokens of the answer, with the one that ends it where it ended."""
        before, prompt = self._given
        left = self._sequence([*before, self.marks[0], *prompt], self.seq.num_remaining)
        found: Phase | None = None
        if await self._interrupted(left):
            prefix = list(left.generated)
            found = await self._infilled(prefix, list(self.prompt))
        if found is None:
            await self.model.decode(left)
            found = _phase(left)
        for _ in range(self.params.loops):
            again = await self._looped(found)
            if again is None:
                break
            found, self.loops = again, self.loops + 1
        return found.tokens + ([Token(min(self.seq.end_ids), self.model.name)] if found.ended else [])

    async def _interrupted(self, left: Sequence) -> bool:
        """Write the beginning; whether it is left for the end, which its last line has not begun already."""
        rule = Unsure(self.params.tau, self.seq.seed if self.params.at_random else None, len(left))
        while not left.finished:
            segment = await self.model.decode(left, StopCondition((rule,)))
            if segment.stopped_by != rule.name:
                break
            if self.params.suffix_prompt not in self._text(left.generated).rpartition("\n")[2]:
                return True
            await self.model.decode(left, StopCondition(max_tokens=1))
        return False

    async def _infilled(self, prefix: list[Token], begun: list[int]) -> Phase | None:
        """The whole text around a beginning, and an end that has begun; None: no middle joins them."""
        before, prompt = self._given
        pre, suf, mid = self.marks
        room = self.seq.num_remaining - len(prefix) - len(begun) - 2
        if room < 1:
            return None
        context = [*before, pre, *prompt, *(token.id for token in prefix), suf, *begun]
        end = self._sequence(context, min(self.params.suffix_tokens, room), also_ends=mid)
        await self.model.decode(end)
        suffix = [Token(token, self.model.name) for token in begun] + _phase(end).tokens
        room = self.seq.num_remaining - len(prefix) - len(suffix) - 1
        if room < 1:
            return None
        context = context[: len(context) - len(begun)] + [token.id for token in suffix]
        middle = self._sequence([*context, mid], room)
        await self.model.decode(middle)
        written = _phase(middle)
        self.joined = [self.joined[0] + written.ended, self.joined[1] + 1]
        return Phase(prefix + written.tokens + suffix, True) if written.ended else None

    async def _looped(self, found: Phase) -> Phase | None:
        """The end anew after all that is before it, then the rest anew before that end; None: as it was is better."""
        before, prompt = self._given
        kept = found.tokens[: self._start_of_suffix(found.tokens)]
        room = self.seq.num_remaining - len(kept)
        if len(kept) == len(found.tokens) or room < 1:
            return None
        right = self._sequence([*before, *prompt, *(token.id for token in kept)], room)
        await self.model.decode(right)
        end = _phase(right)
        cut = self._start_of_suffix(end.tokens)
        if not end.ended or cut == len(end.tokens):
            return None
        whole = Phase(kept + end.tokens, True)
        begun = [token.id for token in end.tokens[: cut + self._size_of_prompt(end.tokens[cut:])]]
        return await self._infilled([], begun) or whole

    def _start_of_suffix(self, tokens: list[Token]) -> int:
        """Place of the token in which the last `suffix_prompt` begins; the number of tokens where there is none."""
        place = self._bytes(tokens).rfind(self.params.suffix_prompt.encode())
        return len(tokens) if place < 0 else self._reaching(tokens, place + 1) - 1

    def _size_of_prompt(self, tokens: list[Token]) -> int:
        """Number of tokens up to the end of the first `suffix_prompt`."""
        wanted = self.params.suffix_prompt.encode()
        return self._reaching(tokens, self._bytes(tokens).find(wanted) + len(wanted))

    def _reaching(self, tokens: list[Token], size: int) -> int:
        """Fewest first tokens that have as many bytes."""
        count = 0
        while size > 0:
            size -= len(self.codec.token_bytes(tokens[count].id))
            count += 1
        return count

    def _bytes(self, tokens: list[Token]) -> bytes:
        return b"".join(self.codec.token_bytes(token.id) for token in tokens)

    def _text(self, tokens: list[Token]) -> str:
        return text_within(self.codec, [token.id for token in tokens])

    def _sequence(self, tokens: list[int], room: int, also_ends: int | None = None) -> Sequence:
        """A context of its own: without the marks but the one that ends it."""
        seq = self.seq
        barred = tuple((mark,) for mark in self.marks if mark != also_ends)
        sampling = seq.sampling.model_copy(
            update={"max_tokens": room, "min_tokens": 0, "bad_word_ids": (*seq.sampling.bad_word_ids, *barred)}
        )
        ends = seq.end_ids if also_ends is None else {*seq.end_ids, also_ends}
        stop = seq.stop.clone() if seq.stop is not None else None
        seed = derive_seed(seq.seed, len(self._made))
        made = Sequence(tokens, sampling, seed, ends, stop, seq.sharing, seq.tenant, seq.lossy, seq.low_priority)
        made.owner, made.networks = seq.owner, seq.networks
        self._made.append(made)
        return made

    def close(self) -> int:
        """Release all contexts and take over their work; return how many tokens were written in them."""
        written = sum(len(each.generated) for each in self._made)
        for each in self._made:
            charge(self.seq, each, shown=True)
            self.model.release(each)
        return written


def _phase(seq: Sequence) -> Phase:
    ended = seq.finish_reason is FinishReason.STOP
    by_token = ended and seq.tokens[-1] in seq.end_ids
    return Phase(seq.generated[:-1] if by_token else list(seq.generated), ended)
