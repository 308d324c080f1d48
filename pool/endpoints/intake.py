"""What a pool with endpoints accepts: methods over texts, and no token ids."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pool.contrast import refuse_contrast
from pool.doubt import refuse_doubt
from pool.endpoints.text_model import estimated_tokens
from pool.pool import Pool
from pool.prompt_ids import with_suffix
from pool.validation import PreparedRequest, RequestValidator, check_min_tokens, decided_sampling
from router.decision import Decision
from turnout.call_context import with_context
from turnout.calls import GenerateCall, cache_class
from turnout.errors import Code, TurnoutError, invalid
from turnout.registry import MethodInfo, MethodParams
from turnout.types import MAX_SEED


@dataclass(frozen=True, slots=True)
class TextIntake(RequestValidator):
    """What a pool accepts of whose models some are endpoints; it has no tokenizer.

    Attributes:
        endpoints: these models, by role.
        reader: the small model where it is computed here: routing policies may read prompts with it.
    """

    endpoints: Mapping[str, str] = field(default_factory=dict)
    reader: Pool | None = None

    def prepare(self, call: GenerateCall) -> PreparedRequest:
        """See `RequestValidator.prepare`; the prompt is as many tokens as are estimated, all of them 0."""
        cache_class(call.cache)
        if any(each.tokens or each.chars or each.finished for each in call.delivered):
            message = "the answer had begun where its process ended, and an endpoint's answers cannot be made again"
            raise TurnoutError(Code.UNAVAILABLE, f"{message}; send the request again")
        if (call.prompt is None) == (call.messages is None):
            raise invalid("prompt", "give either a prompt or messages")
        if not (call.prompt or call.messages):
            raise invalid("prompt" if call.messages is None else "messages", "is empty")
        if call.prompt is not None and not isinstance(call.prompt, str):
            role, model = next(iter(self.endpoints.items()))
            raise invalid("prompt", f"token ids need the tokens of the models, and {model!r} ({role}) is an endpoint")
        if not call.add_special_tokens:
            role, model = next(iter(self.endpoints.items()))
            raise invalid("add_special_tokens", f"must be true: {model!r} ({role}) is an endpoint, which reads texts")
        refuse_contrast(call, *next(iter(self.endpoints.items())))
        refuse_doubt(call, *next(iter(self.endpoints.items())))
        call = with_context(call)
        plan = self._plan_of(call)
        seed = call.sampling.seed if call.sampling.seed is not None else secrets.randbelow(MAX_SEED)
        sampling = self.defaults.filled(call.sampling).model_copy(update={"seed": seed})
        check_min_tokens(sampling)
        prompt = [0] * estimated_tokens(call)
        return PreparedRequest(replace(call, sampling=sampling), plan, prompt, seed, sampling.max_tokens)

    async def admit(self, call: GenerateCall) -> PreparedRequest:
        """See `RequestValidator.admit`; what a router decides about is read by the small model where it is here."""
        prepared = self.prepare(call)
        if prepared.plan is None and self.reader is not None:
            prepared = replace(prepared, prompt=await self.reader.tokens(call))
        return prepared

    def _check_models(self, method: MethodInfo, params: MethodParams) -> None:
        method.check_text(params, self.endpoints)

    def follow(self, prepared: PreparedRequest, decision: Decision) -> PreparedRequest:
        """See `RequestValidator.follow`."""
        given = prepared.call.sampling
        decided = decided_sampling(given, decision)
        # What is not set stays open, for the endpoint's own defaults.
        changed = {name: value for name, value in decided if value != getattr(given, name)}
        call = replace(prepared.call, sampling=given.model_copy(update=changed))
        if decision.suffix:
            call = with_suffix(call, decision.suffix, self.tokenizer)
        plan = self.plan(decision.method, decision.params)
        return replace(prepared, call=call, plan=plan, max_tokens=call.sampling.max_tokens)
