"""The contrast of a request, checked before the first token, and the prompts of its streams as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from decoding.contrast.base import PACKAGE, Asked, Contrast, RequestContrast, StreamPrompt
from pool.prefix_stores import Share, shared
from pool.prompt_ids import encode_prompt, question_of
from pool.text import TextTokenizer
from turnout.call_context import last_user
from turnout.calls import ChatMessage, GenerateCall
from turnout.errors import invalid, out_of_range
from turnout.registry import IS_ROLE, MethodInfo, all_methods

FIELD = "contrast"


@dataclass(frozen=True, slots=True)
class PreparedContrast:
    """Contrast that passed every check.

    Attributes:
        part: combines the streams.
        prompts: token ids of its prompts, by name.
    """

    part: Contrast
    prompts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of its longest prompt; 0 without any."""
        return max(map(len, self.prompts.values()), default=0)

    @property
    def num_tokens(self) -> int:
        """Tokens of all of its prompts, and the most that are written to choose among them."""
        return sum(map(len, self.prompts.values())) + (0 if self.part.is_off else self.part.decide_tokens)

    def of_call(self, call: GenerateCall, share: Share) -> RequestContrast:
        """Return what methods see; each prompt has the scope of its own tokens in the cache."""
        prompts = {name: StreamPrompt(ids, shared(share, call, list(ids))) for name, ids in self.prompts.items()}
        return RequestContrast(self.part, prompts)


def prepare_contrast(
    call: GenerateCall,
    method: MethodInfo | None,
    roles: frozenset[str],
    foreign: Mapping[str, str],
) -> Contrast | None:
    """Return the contrast that a call asks for; None: it asks for none.

    Args:
        call: the call.
        method: that answers it; None while a router has to choose.
        roles: that the pool fills.
        foreign: models with another vocabulary than the pool's, by role.

    Raises:
        TurnoutError: NOT_FOUND or INVALID_ARGUMENT, naming the field and what is allowed.
    """
    if call.contrast is None:
        return None
    able = ", ".join(each.name for each in all_methods() if each.contrasts)
    if method is None:
        raise invalid(FIELD, f"needs a named method where the router chooses; allowed: {able}")
    if not method.contrasts:
        raise invalid(FIELD, f"method {method.name!r} does not read it; allowed: {able}")
    if call.sampling.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", f"not allowed with {FIELD}: its streams read whole prompts")
    part: Contrast = call.contrast.make(PACKAGE, FIELD)
    if part.is_off:
        return part
    for name, info in type(part.params).model_fields.items():
        if IS_ROLE not in info.metadata:
            continue
        role = getattr(part.params, name)
        if role not in roles:
            allowed = ", ".join(sorted(roles))
            raise invalid(f"{FIELD}.{name}", f"no model has the role {role!r}; the pool's roles: {allowed}")
        if role in foreign:
            raise invalid(f"{FIELD}.{name}", f"the vocabulary of {foreign[role]!r} is not the pool's")
    return part


def render_contrast(
    part: Contrast, call: GenerateCall, prompt: list[int], tokenizer: TextTokenizer, vocab_size: int, max_length: int
) -> PreparedContrast:
    """Return a contrast with its prompts as token ids.

    A prompt without any token is the last token of the request's.

    Args:
        part: of the call.
        call: with its context apart.
        prompt: the request's.
        tokenizer: the pool's.
        vocab_size: ids allowed are below this.
        max_length: most tokens of a stream's prompt and the answer.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the request lacks what a stream is made of; OUT_OF_RANGE: a stream does not fit.
    """
    if part.is_off:
        return PreparedContrast(part)
    found = {}
    asked = _asked(call, tokenizer)
    for name, changed in part.prompts(asked).items():
        ids = _encoded(_changed(call, asked, changed), tokenizer, vocab_size) or prompt[-1:]
        if len(ids) >= max_length:
            fitting = f"at most {max_length - 1} fit the context of {max_length}"
            raise out_of_range(FIELD, f"the stream {name!r} of {part.name!r} has {len(ids)} tokens; {fitting}")
        found[name] = tuple(ids)
    return PreparedContrast(part, found)


def _asked(call: GenerateCall, tokenizer: TextTokenizer) -> Asked:
    if call.messages is None:
        return Asked(question_of(call, tokenizer), call.context)
    first = call.messages[0]
    return Asked(question_of(call, tokenizer), call.context, first.content if first.role == "system" else "")


def _changed(call: GenerateCall, asked: Asked, changed: Asked) -> GenerateCall:
    """Return the call with other texts; what is as it was stays as it was given.

    A system message that a prompt has no place for stands before its context.
    """
    if call.messages is None:
        kept = changed.question == asked.question and not changed.system
        context = "\n\n".join(each for each in (changed.system, changed.context) if each)
        return replace(call, context=context, prompt=call.prompt if kept else changed.question)
    messages = list(call.messages)
    if (last := last_user(messages)) is not None:
        messages[last] = replace(messages[last], content=changed.question)
    if asked.system:
        del messages[0]
    if changed.system:
        messages.insert(0, ChatMessage("system", changed.system))
    return replace(call, context=changed.context, messages=tuple(messages))


def _encoded(call: GenerateCall, tokenizer: TextTokenizer, vocab_size: int) -> list[int]:
    """Token ids of a stream's prompt; none where it is an empty text."""
    if call.messages is None and not (call.prompt or call.context):
        return tokenizer.encode("")
    return encode_prompt(call, tokenizer, vocab_size)


def refuse_contrast(call: GenerateCall, role: str, model: str) -> None:
    """Refuse what needs the logits of models, of a pool with an endpoint.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    if call.contrast is not None:
        raise invalid(FIELD, f"needs the logits of the models, and {model!r} ({role}) is an endpoint")
