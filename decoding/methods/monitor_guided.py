"""Code whose names after a dot are among those that static analysis finds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from decoding.automaton_constraint import AutomatonMasks
from decoding.calibration import RAN
from decoding.decode_loop import reported, stretch_lengths
from decoding.identifier_automaton import BEGUN, DEREFERENCE, Dereference, NameAutomaton, code_tokens
from decoding.identifiers.base import PACKAGE, IdentifierProvider
from decoding.logits import keep_allowed
from decoding.model import Model, ModelPool, ReadSpec, Request, StopCondition
from decoding.token_trie import DEAD
from turnout.errors import invalid
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment, Token

FIELD = "method.params"
MOST_NAMES = 4096  # of a place; where there are more, any may follow
MOST_REFUSED = 16  # tokens of a place that are asked for; then none is taken that needs another question
TAIL = 32  # characters that a recorded suggestion is known by, with the length of the code


class Suggestion(BaseModel):
    """Names that were applied, as usage has them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: Annotated[int, Field(ge=0, description="characters of the code up to the dot")]
    after: Annotated[str, Field(max_length=TAIL, description="the last of them")]
    names: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...]


class MonitorGuidedParams(MethodParams):
    """Parameters of `monitor_guided`. The provider is a name, or an object of the name and parameters."""

    example: ClassVar = {"provider": "listed"}
    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    provider: Annotated[
        PartChoice,
        Field(
            description="who knows the names: jedi, listed; `turnout parts identifiers`",
            json_schema_extra={"x-slot": "identifiers"},
        ),
    ] = PartChoice(name="jedi")
    deadline_s: Annotated[
        float,
        Field(gt=0.0, le=10.0, allow_inf_nan=False, description="seconds for one question; then any name may follow"),
    ] = 0.5
    prompt_is_code: Annotated[bool, Field(description="whether the code begins with the prompt")] = True
    recorded: Annotated[
        dict[str, Annotated[tuple[Suggestion, ...], Field(max_length=4096)]] | None,
        Field(
            max_length=64,
            description="suggestions by their answer's seed, as an earlier usage has them, in place of the provider's",
        ),
    ] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.provider.find(PACKAGE, f"{FIELD}.provider")
        return self

    def check_parts(self, models: ModelPool) -> None:
        """See `MethodParams.check_parts`."""
        if self.recorded is None:
            self.provider.make(PACKAGE, f"{FIELD}.provider").check(models)


@dataclass(frozen=True, slots=True)
class Expected:
    """Names of which one is being written.

    Attributes:
        masks: of their automaton.
        state: where in it the text stands.
    """

    masks: AutomatonMasks
    state: int


@method(params=MonitorGuidedParams, papers=(206,), lossless=False, needs=frozenset(), resumable=True, draws=True)
async def monitor_guided(request: Request, models: ModelPool, params: MonitorGuidedParams) -> AsyncIterator[Segment]:
    """One model writes code; after a dot, only names may follow that static analysis finds there.

    Paper #206 (Monitor-guided Decoding). Where text ends with a dot a provider is asked which names may follow, while
    other requests are decoded. Tokens must then begin or continue one of them, or end it with what is no part of a
    name. A token that holds a dot and a name is judged by itself, and chosen again where it does not fit: with the same
    noise, so that it is the masked draw's. Where nothing is known, or a name cannot be continued, the model is free,
    and answers without a dot are those of `plain`. Suggestions that were applied, and deadlines that passed, are in
    usage as `recorded` of its parameters, with which an answer is repeated as it was. An answer that moves to another
    replica asks anew there, and its usage has what was asked since.
    """
    seq = request.sequence
    if seq.sampling.structure is not None:
        raise invalid("structure", "does not go with method 'monitor_guided', which has a constraint of its own")
    model, lengths = models.by_role(params.model), stretch_lengths()
    params.check_parts(models)
    guide = Guide(request, models, model, params)
    try:
        await guide.open()
        expected = await guide.begun()
        while not seq.finished:
            if expected is None:
                rule = Dereference(guide.tokens.marks)
                segment = await model.decode(seq, StopCondition((rule,), max_tokens=next(lengths)))
                if segment.tokens:
                    yield segment
                if seq.finished or segment.stopped_by != rule.name:
                    continue
                if segment.tokens and guide.tokens.marks.get(segment.tokens[-1].id):
                    expected = await guide.begun()
                    continue
            token, expected = await guide.step(expected)
            seq.append(token, model.num_parameters)
            yield Segment((token,), "finish" if seq.finished else "max_tokens")
    finally:
        if guide.applied:
            request.extra[RAN] = {"recorded": {str(seq.seed): list(guide.applied.values())}}
        await guide.close()


class Guide:
    """Monitor of one answer: its code so far, and the names that may follow.

    Args:
        request: the request.
        models: the pool.
        model: writes.
        params: of the method.

    Attributes:
        applied: suggestions in the order in which they were first asked for, as usage has them.
    """

    def __init__(self, request: Request, models: ModelPool, model: Model, params: MonitorGuidedParams) -> None:
        self.seq = request.sequence
        self.model = model
        self.params = params
        self.applied: dict[tuple[int, str], dict[str, Any]] = {}
        self._texts = models.tokenizer
        self._provider: IdentifierProvider = params.provider.make(PACKAGE, f"{FIELD}.provider")
        self._recorded = {
            (each.at, each.after): each.names for each in (params.recorded or {}).get(str(self.seq.seed), ())
        }
        self._masks: dict[tuple[int, str], AutomatonMasks | None] = {}
        prompt = self._texts.decode(self.seq.tokens[: self.seq.num_prompt_tokens]) if params.prompt_is_code else ""
        self._code = prompt.encode(errors="replace")
        self._read = 0

    async def open(self) -> None:
        """Read the vocabulary, away from the event loop; done once for a tokenizer."""
        self.tokens = await asyncio.to_thread(code_tokens, self._texts, self.model.vocab_size)

    async def close(self) -> None:
        """See `IdentifierProvider.close`."""
        await self._provider.close()

    @property
    def code(self) -> bytes:
        """All of it so far, special tokens left out."""
        answer = self.seq.answer
        self._code += b"".join(map(self.tokens.trie.tokens.__getitem__, answer[self._read :]))
        self._read = len(answer)
        return self._code

    async def begun(self) -> Expected | None:
        """Return what may follow if the code ends with a dot, or with the beginning of a name after one."""
        found = BEGUN.search(self.code)
        return None if found is None else (await self._after_dot(self.code[: found.start() + 1], found[1]))[1]

    async def step(self, expected: Expected | None) -> tuple[Token, Expected | None]:
        """Choose the next token, and return what is expected behind it; appends nothing."""
        [row] = await self.model.extend(self.seq, want=reported(self.seq) | ReadSpec(draw=None, logits=True))
        assert row.logits is not None
        raw = row.logits.detach().float()
        scores = raw.clone()
        if expected is not None:
            mask, is_stuck = expected.masks.at(expected.state)
            expected, scores = (None, scores) if is_stuck else (expected, keep_allowed(raw[None], [0], [mask])[0])
        refused = 0
        while True:
            [chosen] = await self.model.choose(self.seq, scores[None], [()], ReadSpec())
            fits, after = await self._after(expected, chosen.token)
            if fits:
                break
            refused += 1
            scores[chosen.token] = -math.inf
            if refused == MOST_REFUSED:
                scores[self.tokens.within] = -math.inf
            if not bool(scores.isfinite().any()):  # no token leads to a name: the model is free
                expected, scores, refused = None, raw.index_fill(0, self._inner(raw), -math.inf), MOST_REFUSED
        logprob = float(torch.log_softmax(raw, -1)[chosen.token])
        token = Token(chosen.token, self.model.name, logprob=logprob, entropy_bits=row.entropy_bits, top=row.top)
        return token, after

    def _inner(self, like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.tokens.within, dtype=torch.int64, device=like.device)

    async def _after(self, expected: Expected | None, token: int) -> tuple[bool, Expected | None]:
        """Whether a token may follow, and what is expected behind it."""
        data = self.tokens.trie.tokens[token]
        if token in self.seq.end_ids or not data:
            return True, None  # where the mask has let it
        after = None
        if expected is not None:
            state = expected.masks.after(expected.state, token)
            if state == DEAD:
                return False, None
            after = _unless_done(expected.masks, state)
        for dot in DEREFERENCE.finditer(data):
            fits, after = await self._after_dot(self.code + data[: dot.end()], data[dot.end() :])
            if not fits:
                return False, None
        return True, after

    async def _after_dot(self, code: bytes, rest: bytes) -> tuple[bool, Expected | None]:
        """Whether what stands behind a dot begins one of the names there, and what is expected behind it."""
        masks = await self._names(code.decode(errors="replace"))
        if masks is None:
            return True, None
        automaton = masks.automaton
        assert isinstance(automaton, NameAutomaton)
        state = automaton.read(rest)
        return state != DEAD, _unless_done(masks, state)

    async def _names(self, code: str) -> AutomatonMasks | None:
        """The names that may follow code that ends with a dot; None: any."""
        key = (len(code), code[-TAIL:])
        if key not in self._masks:
            names, is_late = await self._asked(code, key)
            if names or is_late:
                self.applied[key] = {"at": key[0], "after": key[1], "names": names}
            made = AutomatonMasks(NameAutomaton(names), self.tokens.trie, self.seq.end_ids) if names else None
            self._masks[key] = made
        return self._masks[key]

    async def _asked(self, code: str, key: tuple[int, str]) -> tuple[list[str], bool]:
        """Names, and whether the deadline passed before there were any."""
        if self.params.recorded is not None:
            return list(self._recorded.get(key, ())), key in self._recorded
        try:
            found = await asyncio.wait_for(self._provider.names(code), self.params.deadline_s)
        except TimeoutError:
            return [], True
        names = sorted({name for name in found if name.isidentifier()})
        return names if len(names) <= MOST_NAMES else [], False


def _unless_done(masks: AutomatonMasks, state: int) -> Expected | None:
    """What is expected at a state; None: the name is behind it."""
    automaton = masks.automaton
    assert isinstance(automaton, NameAutomaton)
    return None if state in (DEAD, automaton.free) else Expected(masks, state)
