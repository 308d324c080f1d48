"""From a call to work: everything checked that can be before a model is asked."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from decoding.constraints.base import Constraint
from decoding.thinking import Thinking
from pool.contrast import PreparedContrast, prepare_contrast, render_contrast
from pool.doubt import METHOD, check_doubt, params_with_doubt
from pool.processors import are_prefix_pure, check_use, with_processors
from pool.prompt_ids import bad_word_ids, encode_prompt, num_chars, with_suffix
from pool.reasoning import thinking_of_call
from pool.request_defaults import NO_DEFAULTS, RequestDefaults
from pool.resume import check_delivered
from pool.text import LONG, TextTokenizer
from router.decision import Decision
from turnout.call_context import with_context
from turnout.calls import AUTO, GenerateCall, cache_class
from turnout.errors import Code, TurnoutError, invalid, not_found, out_of_range
from turnout.pool_config import USUAL_ROLES
from turnout.registry import ALONE, MethodInfo, MethodParams, get_method
from turnout.tool_formats.grammar import CallRules, form_of_calls
from turnout.types import MAX_SEED, SamplingParams, given_limits

# What a router may set instead of the caller; see `Decision.sampling`.
ROUTED_SAMPLING = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "max_tokens", "max_tokens_share", "greedy_temperature",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResolvedMethod:
    """A method and its parameters, validated."""

    method: MethodInfo
    params: MethodParams

    @property
    def notes(self) -> list[str]:
        """What the person who reads the answer is to know of it."""
        if not self.method.lossless or self.method.keeps_law(self.params):
            return []
        return [f"not lossless: {self.method.name} with these parameters has a law of its own"]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A call that passed every check.

    Attributes:
        call: as it came, with the sampling parameters that hold.
        plan: how it is answered; None while a router has to choose.
        prompt: token ids.
        seed: given or drawn.
        max_tokens: most tokens of an answer that the context has room for.
        constraint: what answers must fit, compiled; each takes a clone. None: nothing.
        account: whose time on the models it takes; "": the tenant's.
        renderings: the conversation in the templates and tokens of models with another vocabulary, by model.
        thinking: how the answers' thinking is found; None: it is not.
        contrast: streams that the answering model's logits are combined with; None: there are none.
    """

    call: GenerateCall
    plan: ResolvedMethod | None
    prompt: list[int]
    seed: int
    max_tokens: int
    constraint: Constraint | None = None
    account: str = ""
    renderings: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    thinking: Thinking | None = None
    contrast: PreparedContrast | None = None

    @property
    def tool_format(self) -> str:
        """How calls of tools are written in its answers; "": there are none."""
        return form_of_calls(self.call.sampling.structure)

    @property
    def joint(self) -> bool:
        """Whether one run of its method writes all answers."""
        return self.plan is not None and self.plan.method.joint

    @property
    def continues(self) -> bool:
        """Whether answers can be continued from their first tokens."""
        plan, sampling = self.plan, self.call.sampling
        if plan is None or not plan.method.continues(plan.params, sampling.greedy):
            return False
        return sampling.greedy or not sampling.processors or are_prefix_pure(sampling)

    @property
    def sampling(self) -> SamplingParams:
        """The call's, with the room there is."""
        return self.call.sampling.model_copy(update={"max_tokens": self.max_tokens})


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """What a pool accepts.

    Attributes:
        pool: the pool's own name in `call.model`.
        members: member model name -> role.
        tokenizer: the pool's.
        max_length: most tokens of prompt and answer.
        vocab_size: ids allowed are below this.
        default_method: used when the call names none and nothing routes.
        default_params: its parameters.
        routed: whether the pool has a router for calls that leave the method open.
        roles: that the pool fills.
        defaults: what holds where a request leaves it open.
        foreign: models with another vocabulary than the pool's, by role.
        tokenizers: of these models, by name.
        thinking: how thinking is found in answers; None: it is not.
    """

    pool: str
    members: dict[str, str]
    tokenizer: TextTokenizer
    max_length: int
    vocab_size: int
    default_method: str
    default_params: dict[str, Any]
    routed: bool = False
    roles: frozenset[str] = frozenset(USUAL_ROLES)
    defaults: RequestDefaults = NO_DEFAULTS
    foreign: Mapping[str, str] = field(default_factory=dict)
    tokenizers: Mapping[str, TextTokenizer] = field(default_factory=dict)
    thinking: Thinking | None = None

    def prepare(self, call: GenerateCall) -> PreparedRequest:
        """Check everything that can be checked before work starts.

        Raises:
            TurnoutError: INVALID_ARGUMENT, NOT_FOUND or OUT_OF_RANGE, naming the field and what is allowed.
        """
        cache_class(call.cache)
        check_delivered(call, self.vocab_size)
        call = self.defaults.applied(call)
        inner = self._plan_of(call)
        check_doubt(call, inner.method if inner is not None else None)
        plan = self._with_doubt(call, inner)
        part = prepare_contrast(call, plan.method if plan is not None else None, self.roles, self.foreign)
        prompt = self._encoded(call)
        if len(prompt) >= self.max_length:
            name = "messages" if call.messages is not None else "prompt"
            fitting = f"at most {self.max_length - 1} fit the context of {self.max_length}"
            raise out_of_range(name, f"{len(prompt)} tokens; {fitting}")
        call = self._in_format(call)
        sampling = call.sampling
        check_min_tokens(sampling)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(sampling, name) or ():
                if not 0 <= token < self.vocab_size:
                    raise out_of_range(name, f"token id {token}; allowed: 0 to {self.vocab_size - 1}")
        if sampling.bad_words:
            ids = bad_word_ids(sampling.bad_words, self.tokenizer)
            sampling = sampling.model_copy(update={"bad_word_ids": ids})
        if sampling.processors:
            sampling = with_processors(sampling, self.tokenizer, self.vocab_size)
            check_use(sampling, inner.method if inner is not None else None, part is not None)
        call = replace(call, sampling=sampling)
        seed = sampling.seed if sampling.seed is not None else secrets.randbelow(MAX_SEED)
        most = min(sampling.max_tokens, self.max_length - len(prompt))
        thinking = thinking_of_call(self.thinking, call, prompt, self.tokenizer)
        made = PreparedRequest(
            call, plan, prompt, seed, most, renderings=self._renderings(call, plan), thinking=thinking
        )
        if part is None:
            return made
        contrast = render_contrast(part, call, prompt, self.tokenizer, self.vocab_size, self.max_length)
        return replace(made, contrast=contrast, max_tokens=min(most, self.max_length - contrast.longest))

    def _in_format(self, call: GenerateCall) -> GenerateCall:
        """The call whose answers may call tools in the way of the pool's models."""
        structure = call.sampling.structure
        if structure is None or structure.kind != "tools":
            return call
        rules = CallRules.of(structure).in_format(self.tokenizer.tools.form)
        return replace(call, sampling=call.sampling.model_copy(update={"structure": rules.structure}))

    def _encoded(self, call: GenerateCall, whole: bool = False) -> list[int]:
        """Return the token ids of a call's prompt, without those that it is to be cut by.

        Args:
            call: with the pool's defaults.
            whole: it need not fit the context.
        """
        kept, most = call.sampling.truncate_prompt_tokens, self.max_length - 1
        if kept is None:
            return encode_prompt(call, self.tokenizer, self.vocab_size, None if whole else most)
        if kept > most:
            raise out_of_range("truncate_prompt_tokens", f"at most {most} fit the context of {self.max_length}")
        if kept < 1:
            kept = max(self.max_length - call.sampling.max_tokens, 1) if call.sampling.max_tokens <= most else most
        return encode_prompt(call, self.tokenizer, self.vocab_size)[-kept:]

    def _renderings(self, call: GenerateCall, plan: ResolvedMethod | None) -> dict[str, tuple[int, ...]]:
        """Return a conversation as models with another vocabulary were taught to read it.

        Left out are those without a chat template that takes it, which read the pool's prompt as text, conversations
        that are cut, and long ones: they are encoded in a thread, whose tokenizer is only the pool's.
        """
        found: dict[str, tuple[int, ...]] = {}
        drafts = plan is not None and plan.method.across_vocabularies
        cut = call.sampling.truncate_prompt_tokens is not None
        if call.messages is not None and drafts and not cut and num_chars(call) <= LONG:
            turns = with_context(call).messages or ()
            for model, tokenizer in self.tokenizers.items():
                with suppress(TurnoutError):
                    found[model] = tuple(tokenizer.encode_chat(turns, call.tools, None, call.template))
        return found

    async def admit(self, call: GenerateCall) -> PreparedRequest:
        """As `prepare`, without holding up the event loop over a long text."""
        return await self.tokenizer.either(
            num_chars(call), lambda tokenizer: replace(self, tokenizer=tokenizer).prepare(call)
        )

    async def tokens(self, call: GenerateCall) -> list[int]:
        """Token ids of a call's prompt or conversation, without holding up the event loop over a long text.

        Raises:
            TurnoutError: see `encode_prompt`.
        """
        filled = self.defaults.applied(call)
        return await self.tokenizer.either(
            num_chars(call), lambda tokenizer: replace(self, tokenizer=tokenizer)._encoded(filled, whole=True)
        )

    def _plan_of(self, call: GenerateCall) -> ResolvedMethod | None:
        if call.model not in (self.pool, *self.members):
            raise not_found("model", call.model, [self.pool, *self.members])
        routes = self.routed and call.model not in self.members and call.method in (None, AUTO)
        if not routes and (limits := given_limits(call.limits)):
            raise invalid(f"limits.{limits[0]}", "is for a pool's routing: leave it out, or leave the method open")
        if call.model in self.members:
            if call.model in self.foreign.values():
                raise invalid(
                    "model", f"{call.model!r} has another vocabulary than {self.pool!r}; give it its own pool"
                )
            if call.method not in (None, ALONE):
                raise invalid("method", f"{call.model!r} is one model and answers alone ({ALONE}); ask {self.pool!r}")
            return self.plan(ALONE, {**call.params, "model": self.members[call.model]})
        if routes:
            if call.params:
                raise invalid("params", "belong to a method: name one, or leave them out where the router chooses")
            return None
        if call.method == AUTO:
            raise invalid("method", f"{AUTO}: pool {self.pool!r} has no routing; name a method, or none")
        return self.plan(call.method or self.default_method, call.params)

    def plan(self, name: str, params: dict[str, Any]) -> ResolvedMethod:
        """A method with these parameters over the pool's own.

        Raises:
            TurnoutError: no such method, a parameter is wrong, or the pool has no model for a role.
        """
        method = get_method(name)
        # What the pool sets for its default method is calibrated for its models: it holds for everyone who uses it.
        chosen = self.default_params if method.name == self.default_method else {}
        parsed = method.parse(method.params.over(chosen, params))
        method.check_roles(parsed, self.roles)
        self._check_models(method, parsed)
        return ResolvedMethod(method, parsed)

    def _with_doubt(self, call: GenerateCall, plan: ResolvedMethod | None) -> ResolvedMethod | None:
        """The method with its doubt measured, where the call asks for it."""
        params = params_with_doubt(call, plan.method, plan.params) if plan is not None else None
        return plan if params is None else self.plan(METHOD, params)

    def _check_models(self, method: MethodInfo, params: MethodParams) -> None:
        """Refuse a method that this pool's models cannot be asked for."""
        method.check_vocabularies(params, self.foreign)

    def follow(self, prepared: PreparedRequest, decision: Decision) -> PreparedRequest:
        """The call as a router decided: its plan, its sampling parameters, and the prompt with the suffix.

        Raises:
            TurnoutError: INTERNAL: the decision sets something that no request may have.
        """
        sampling = decided_sampling(prepared.call.sampling, decision)
        call = replace(prepared.call, sampling=sampling)
        plan = self._with_doubt(call, self.plan(decision.method, decision.params))
        if decision.suffix:
            longer = with_suffix(call, decision.suffix, self.tokenizer)
            prompt = self._encoded(longer, whole=True)
            if len(prompt) < self.max_length:
                left = min(sampling.max_tokens, self.max_length - len(prompt))
                return replace(prepared, call=longer, plan=plan, prompt=prompt, max_tokens=left)
        return replace(prepared, call=call, plan=plan, max_tokens=min(sampling.max_tokens, prepared.max_tokens))


def check_min_tokens(sampling: SamplingParams) -> None:
    """Refuse more least tokens than an answer may have: by the request, or by the pool where it names no limit.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    if sampling.min_tokens > sampling.max_tokens:
        raise invalid("min_tokens", f"must be at most max_tokens, {sampling.max_tokens} (got {sampling.min_tokens})")


def decided_sampling(given: SamplingParams, decision: Decision) -> SamplingParams:
    """Return a call's sampling parameters with what a router sets of them.

    Raises:
        TurnoutError: INTERNAL: not a router's to set, or out of range.
    """
    changed = dict(decision.sampling)
    share, warm = changed.pop("max_tokens_share", 1.0), changed.pop("greedy_temperature", None)
    if warm is not None and given.greedy:
        changed["temperature"] = warm
    try:
        if unknown := set(decision.sampling) - ROUTED_SAMPLING:
            raise ValueError(f"sampling.{min(unknown)} is not a router's to set")
        most = min(changed.get("max_tokens", given.max_tokens), given.max_tokens)
        changed["max_tokens"] = max(min(max(1, int(share * most)), most), given.min_tokens)
        return SamplingParams.model_validate({**given.model_dump(), **changed})
    except ValueError as error:
        raise TurnoutError(Code.INTERNAL, f"routing policy {decision.policy!r}: {error}") from None
