"""A role's answer, by its model or, where that cannot be asked, by another one of the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from pool.endpoints.text_model import TextModel, Work
from turnout.calls import ChatMessage, Chunk, GenerateCall
from turnout.config import FailoverConfig
from turnout.cost import Meter, ModelMeter
from turnout.errors import Code, TurnoutError
from turnout.types import MOST_TOKENS

MAY_BE_ELSEWHERE = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)


@dataclass(slots=True)
class TextRequest:
    """Request to a method over texts.

    Attributes:
        call: with its seed; the whole of what is asked.
        work: what has been done for it.
        one_model: the caller asked for one model: no other one answers.
        shadow: it runs again what has been answered; see `pool.endpoints.shadow_places`.
    """

    call: GenerateCall
    work: Work = field(default_factory=Work)
    one_model: bool = False
    shadow: bool = False

    @property
    def seed(self) -> int:
        """Seed of the call."""
        return self.call.sampling.seed or 0


@dataclass(slots=True)
class _PassedOn:
    """What of an answer has been passed on."""

    text: str = ""
    tokens: int = 0
    only_text: bool = True
    begun: bool = False

    def take(self, chunk: Chunk) -> None:
        self.begun = True
        self.text += chunk.text
        self.tokens += len(chunk.tokens)
        self.only_text = self.only_text and not (chunk.reasoning or chunk.call_parts or chunk.index)


@dataclass(frozen=True, slots=True)
class TextModels:
    """Models of a pool, as methods over texts use them.

    Attributes:
        models: by name.
        roles: role -> name.
        failover: which answer for each other; None: none.
    """

    models: Mapping[str, TextModel]
    roles: Mapping[str, str]
    failover: FailoverConfig | None = None

    def name(self, role: str) -> str:
        """Name of a role's model."""
        return self.roles[role]

    async def answer(self, request: TextRequest, role: str, call: GenerateCall) -> AsyncIterator[Chunk]:
        """Answer a call by the model of a role, or by another one where that is configured and the first is down.

        Args:
            request: gets what was done, and a note where another model answered.
            role: whose model is asked first.
            call: asks it.

        Raises:
            TurnoutError: no model could answer, or an answer broke off that cannot continue elsewhere.
        """
        names = [self.roles[role]] if request.one_model or request.shadow else self._in_turn(role)
        for place, name in enumerate(names):
            passed_on, before = _PassedOn(), _written(request, name)
            try:
                answered = self.models[name].answer(call, request.work, request.shadow)
                async with aclosing(answered) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        passed_on.take(chunk)
                        yield chunk
                return
            except TurnoutError as error:
                following = names[place + 1] if place + 1 < len(names) else None
                if following is None or error.code not in MAY_BE_ELSEWHERE:
                    raise
                if passed_on.begun:
                    self._count(request, name, passed_on, before)
                    call = self._continued(call, passed_on, error)
                verb = "continued" if passed_on.begun else "answered"
                request.work.note(f"{following} {verb} in place of {name}: {error.message}")
                request.work.switches += 1

    def _in_turn(self, role: str) -> list[str]:
        """Models that may answer for a role, its own first, each once."""
        if self.failover is None:
            return [self.roles[role]]
        others = self.failover.roles or tuple(self.roles)
        if role not in others:
            return [self.roles[role]]
        return list(dict.fromkeys([self.roles[role], *(self.roles[other] for other in others)]))

    def _continued(self, call: GenerateCall, passed_on: _PassedOn, error: TurnoutError) -> GenerateCall:
        """The call that continues from what was passed on.

        Raises:
            TurnoutError: the same error: this is not configured, or no model could continue from there.
        """
        continues = self.failover is not None and self.failover.continue_elsewhere
        if not continues or not passed_on.only_text or call.sampling.n > 1 or call.sampling.structure is not None:
            raise error
        left = call.sampling.max_tokens - passed_on.tokens
        if call.sampling.max_tokens < MOST_TOKENS and left < 1:
            raise error
        sampling = call.sampling.model_copy(update={"max_tokens": left} if left < MOST_TOKENS // 2 else {})
        if call.messages is None:
            return replace(call, prompt=f"{call.prompt}{passed_on.text}", sampling=sampling)
        *before, last = call.messages
        if call.template.continue_final_message:
            messages = (*before, replace(last, content=last.content + passed_on.text))
        else:
            messages = (*before, last, ChatMessage("assistant", passed_on.text))
        template = replace(call.template, continue_final_message=True, add_generation_prompt=None)
        return replace(call, messages=messages, sampling=sampling, template=template)

    def _count(self, request: TextRequest, name: str, passed_on: _PassedOn, before: int) -> None:
        """Count what a model wrote, as it says itself, or by what was passed on."""
        counted = _written(request, name) - before
        if not counted:
            tokens = passed_on.tokens
            meter = ModelMeter(self.models[name].num_parameters, decode_tokens=tokens, generated_tokens=tokens)
            request.work.meter.merge(Meter({name: meter}))
        passed_on.tokens = max(passed_on.tokens, counted)


def _written(request: TextRequest, name: str) -> int:
    """Tokens that a model is known to have written for a request."""
    meter = request.work.meter.models.get(name)
    return meter.generated_tokens if meter is not None else 0
