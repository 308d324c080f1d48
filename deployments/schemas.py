"""Request bodies of the OpenAI-compatible endpoints, and their translation into calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from decoding.structures import checked_structure
from deployments.bodies import read_object
from deployments.decoding_body import Decoding
from deployments.extra_fields import (
    NO_EXTRAS,
    NOT_IN_STREAMS,
    UNSUPPORTED,
    ExtraFields,
    Extras,
    refuse_unsupported,
)
from deployments.faults import respell
from deployments.request_fields import ROLES, BodyPart, parse_prompts, parse_sampling, request_id, session_name
from deployments.response_format import ResponseFormat, structure_of
from deployments.tools import CalledTool, ToolBody, ToolChoice, choice_name, offered
from turnout.calls import CACHE_CLASSES, ChatMessage, GenerateCall, ReasoningMode, cache_class
from turnout.chat_template import TemplateOptions
from turnout.errors import TurnoutError, invalid
from turnout.registry import explain
from turnout.structure import Structure
from turnout.tools import ToolCall
from turnout.types import SamplingParams

# OpenAI clients send these; they change nothing here.
IGNORED_FIELDS = frozenset(
    {"metadata", "moderation", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
    | {"service_tier", "spaces_between_special_tokens", "store", "user", "verbosity"}
    | {"guided_decoding_backend", "web_search_options"}
)
# What the bodies ask for by other names: see `Decoding` and `response_format`.
SAMPLING_FIELDS = frozenset(SamplingParams.model_fields) - {"token_details", "structure", "bad_word_ids", "processors"}
FIRST = "whether a text begins with what the tokenizer puts before all; of chats only the template says: false"
B = TypeVar("B", bound="CommonBody")


class StreamOptions(BodyPart):
    """What a stream carries beyond text."""

    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, Field(description="with include_usage: counts in every part")] = False
    include_obfuscation: Annotated[bool, Field(description="accepted and ignored")] = False


class CommonBody(ExtraFields):
    """Fields of both endpoints; sampling parameters are validated apart."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    decoding: Annotated[Decoding, Field(description="how to decode: method, params, session, limits, ...")] = Decoding()
    deadline_s: Annotated[
        float | None, Field(description="seconds it may take", json_schema_extra={"exclusiveMinimum": 0})
    ] = None
    cache: Annotated[str, Field(description="exact or lossy KV", json_schema_extra={"enum": ["", *CACHE_CLASSES]})] = ""
    response_format: ResponseFormat | None = None


class CompletionBody(CommonBody):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool = False
    add_special_tokens: Annotated[bool, Field(description=FIRST)] = True


Ignored = Annotated[Any, Field(description="of role assistant: accepted and ignored")]
# What servers put into the messages of their answers, and clients send back with the conversation.
ANSWER_FIELDS = frozenset(
    {"annotations", "audio", "citations", "executed_tools", "extra_content", "images", "parsed", "prefix"}
    | {"provider_specific_fields", "reasoning", "reasoning_content", "reasoning_details", "refusal"}
    | {"thinking", "thinking_blocks", "tool_calls"}
)


class ChatTurn(BodyPart):
    """One message; text content may come in parts.

    What was thought is read as vLLM, SGLang, DeepSeek and xAI (reasoning, reasoning_content) and Ollama (thinking) name
    it. The fields without a use here are those of answers by OpenAI (annotations, audio, parsed), OpenRouter
    (reasoning_details, images, citations), Mistral (prefix), Groq (executed_tools), LiteLLM (provider_specific_fields,
    thinking_blocks) and Gemini (extra_content).
    """

    role: Annotated[str, Field(json_schema_extra={"enum": [*ROLES, "developer"]})]
    content: str | list[dict[str, Any]] | None = None
    name: Annotated[str | None, Field(description="accepted and ignored")] = None
    tool_calls: list[CalledTool] = Field(default_factory=list)
    tool_call_id: str = ""
    refusal: Annotated[str | None, Field(description="of role assistant: the text, where there is no content")] = None
    prefix: Annotated[
        Literal[False] | None, Field(description="of role assistant: false is ignored; true is not supported")
    ] = None
    annotations: Ignored = None
    audio: Ignored = None
    citations: Ignored = None
    executed_tools: Ignored = None
    extra_content: Ignored = None
    images: Ignored = None
    parsed: Ignored = None
    provider_specific_fields: Ignored = None
    reasoning: Annotated[Any, Field(description="of role assistant: what was thought, as text")] = None
    reasoning_content: Annotated[Any, Field(description="the same")] = None
    reasoning_details: Ignored = None
    thinking: Annotated[Any, Field(description="the same")] = None
    thinking_blocks: Ignored = None


class ChatBody(CommonBody):
    """POST /v1/chat/completions."""

    messages: list[ChatTurn] = Field(default_factory=list)
    tools: list[ToolBody] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, Field(description="whether an answer may call several tools")] = True
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="variables of the chat template")
    reasoning_effort: Annotated[str, Field(description="none turns thinking off where the template can")] = ""
    add_generation_prompt: Annotated[bool | None, Field(description="absent: unless a message is continued")] = None
    continue_final_message: Annotated[bool, Field(description="go on with the last message, an assistant's")] = False
    add_special_tokens: Annotated[Literal[False], Field(description=FIRST)] = False
    include_reasoning: Annotated[bool, Field(description="false: what was thought is left out of the answer")] = True
    separate_reasoning: Annotated[bool, Field(description="false: it stays in the content, as the model wrote it")] = (
        True
    )

    @property
    def reasoning_mode(self) -> ReasoningMode:
        """Where the thinking goes."""
        if not self.separate_reasoning:
            return "raw"
        return "split" if self.include_reasoning else "hide"

    def template(self) -> TemplateOptions:
        """Return what the chat template gets.

        Raises:
            TurnoutError: see `TemplateOptions.check`.
        """
        made = TemplateOptions(
            self.chat_template_kwargs, self.reasoning_effort, self.add_generation_prompt, self.continue_final_message
        )
        made.check([turn.role for turn in self.messages])
        return made


# What the fields of both bodies are where they are absent: to an endpoint without such a field it says nothing.
ABSENT = {
    name: info.get_default(call_default_factory=True)
    for body in (CompletionBody, ChatBody)
    for name, info in body.model_fields.items()
}


@dataclass(frozen=True, slots=True)
class Job:
    """What a body asks for: one call per prompt, answered together.

    Attributes:
        request_id: the caller's, in the body; "" without.
        extras: what answers hold besides.
        writes: whether anything is to be written; else the prompts are echoed alone, scored where log-probabilities
            are asked for.
    """

    calls: tuple[GenerateCall, ...]
    stream: bool
    include_usage: bool
    echo: bool
    spelling: Mapping[str, str]
    writes: bool = True
    request_id: str = ""
    extras: Extras = NO_EXTRAS

    def named(self, call_id: str) -> Job:
        """The same job under an id, which its answer and every log then have; several calls are numbered."""
        if len(self.calls) == 1:
            return replace(self, calls=(replace(self.calls[0], request_id=call_id),))
        calls = (replace(call, request_id=f"{call_id}.{place}") for place, call in enumerate(self.calls))
        return replace(self, calls=tuple(calls))

    def traced(self, traceparent: str) -> Job:
        """The same job in the caller's trace, where it has one."""
        if not traceparent:
            return self
        return replace(self, calls=tuple(replace(call, trace=traceparent) for call in self.calls))


def read_json(data: bytes) -> dict[str, Any]:
    """Parse a body; what is null, or changes nothing here, is left out.

    Raises:
        TurnoutError: see `read_object`.
    """
    return without_ignored(read_object(data))


def without_ignored(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is null, or changes nothing here."""
    return {name: value for name, value in values.items() if value is not None and name not in IGNORED_FIELDS}


def completion_job(values: dict[str, Any]) -> Job:
    """Translate the body of /v1/completions."""
    sampling_values, rest = _split(values, CompletionBody, SAMPLING_FIELDS)
    body = _validate(CompletionBody, rest)
    # Elsewhere, too, a prompt is scored that way; a bool is no number of tokens.
    scores = body.echo and type(sampling_values.get("max_tokens")) is int and sampling_values["max_tokens"] == 0
    if scores:
        del sampling_values["max_tokens"]
    sampling = parse_sampling(sampling_values)
    prompts = parse_prompts(body.prompt)
    job = _job(body, sampling, [(prompt, None) for prompt in prompts], _spelling(), echo=body.echo)
    calls = tuple(replace(call, add_special_tokens=body.add_special_tokens) for call in job.calls)
    return replace(job, calls=calls, writes=not scores)


def chat_job(values: dict[str, Any]) -> Job:
    """Translate the body of /v1/chat/completions."""
    names = _spelling()
    if "max_completion_tokens" in values:
        if values.get("max_tokens", values["max_completion_tokens"]) != values["max_completion_tokens"]:
            raise invalid("max_tokens", "conflicts with max_completion_tokens; give one of them")
        values = {**values, "max_tokens": values["max_completion_tokens"]}
        del values["max_completion_tokens"]
        names["max_tokens"] = "max_completion_tokens"
    sampling_values, rest = _split(values, ChatBody, SAMPLING_FIELDS - {"logprobs"})
    body = _validate(ChatBody, rest)
    if body.logprobs:
        sampling_values["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    try:
        sampling = parse_sampling(sampling_values)
    except TurnoutError as error:
        raise respell(error, names) from None
    if "messages" not in rest:
        raise invalid("messages", "is needed")
    messages = tuple(chat_message(turn, f"messages.{place}") for place, turn in enumerate(body.messages))
    job = _job(body, sampling, [(None, messages)], names, echo=False)
    [call] = job.calls
    tools, structure = offered(body.tools, body.tool_choice, body.parallel_tool_calls, call.sampling.structure)
    if structure is not call.sampling.structure:
        names["structure.answer"], names["structure"] = names["structure"], "tools"
        call = replace(call, sampling=call.sampling.model_copy(update={"structure": structure}))
    choice, template = choice_name(body.tool_choice), body.template()
    call = replace(call, tools=tools, tool_choice=choice, template=template, reasoning=body.reasoning_mode)
    return replace(job, calls=(call,))


def _split(
    values: dict[str, Any], body: type[CommonBody], sampling_fields: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    known = sampling_fields | set(body.model_fields)
    for name, value in values.items():
        refuse_unsupported(name, value)
        if name not in known and name not in UNSUPPORTED and value != ABSENT.get(name):
            raise invalid(name[:100], f"unknown; allowed here: {', '.join(sorted(known))}")
    sampling = {name: value for name, value in values.items() if name in sampling_fields}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = (sampling["stop"],)
    return sampling, {name: value for name, value in values.items() if name in body.model_fields}


def _validate(kind: type[B], values: dict[str, Any]) -> B:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise explain(error, "", kind) from None


def _spelling() -> dict[str, str]:
    names = {name: f"decoding.{name}" for name in ("method", "params", "session", "limits", "processors")}
    names |= {name: f"decoding.{name}" for name in ("contrast", "context", "uncertainty", "abstain_above")}
    return names | {"method.params": "decoding.params"}


def chat_message(turn: ChatTurn, field: str) -> ChatMessage:
    """One turn of a conversation.

    Raises:
        TurnoutError: INVALID_ARGUMENT: what it has does not belong together.
    """
    role = "system" if turn.role == "developer" else turn.role
    calls = tuple(_called(each, f"{field}.tool_calls.{place}") for place, each in enumerate(turn.tool_calls))
    if role != "assistant":
        for name in sorted(turn.model_fields_set & ANSWER_FIELDS):
            if getattr(turn, name):
                raise invalid(f"{field}.{name}", "only allowed on messages with role `assistant`")
    if (role == "tool") != bool(turn.tool_call_id):
        raise invalid(f"{field}.tool_call_id", "belongs to role tool, and is needed there")
    content = turn.refusal if turn.content is None else turn.content
    thoughts = (turn.reasoning_content, turn.reasoning, turn.thinking)
    reasoning = next((each for each in thoughts if isinstance(each, str) and each), "")
    if content is None and not calls and not reasoning:
        raise invalid(f"{field}.content", "is needed")
    return ChatMessage(role, _text(content or "", field, role), calls, turn.tool_call_id, reasoning)


def _called(call: CalledTool, field: str) -> ToolCall:
    text = call.function.arguments.strip() or "{}"  # what many models write for a function without parameters
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{field}.function.arguments", "must be a JSON object, as text")
    return ToolCall(call.id, call.function.name, text)


def _text(content: str | list[dict[str, Any]], field: str, role: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    for place, part in enumerate(content):
        kind = next((each for each in kinds if part.get("type") == each), "")
        if not kind or not isinstance(part.get(kind), str):
            raise invalid(f"{field}.content.{place}", 'must be a text part: {"type": "text", "text": ...}')
        texts.append(part[kind])
    return "".join(texts)


def structure_asked(body: CommonBody) -> tuple[Structure | None, str]:
    """The structure a body asks for, by any name, and the field that does.

    Raises:
        TurnoutError: INVALID_ARGUMENT: see `structure_of`; or it is asked for by several names.
    """
    by_other_name = body.structure()
    if by_other_name is None:
        return structure_of(body.response_format, body.decoding.structure)
    field, own = by_other_name
    if body.decoding.structure is not None or (body.response_format and body.response_format.type != "text"):
        raise invalid(field, "conflicts with response_format and decoding.structure; give one of them")
    return checked_structure(own, field), field


def _job(
    body: CommonBody,
    sampling: SamplingParams,
    inputs: list[tuple[str | tuple[int, ...] | None, tuple[ChatMessage, ...] | None]],
    names: dict[str, str],
    *,
    echo: bool,
) -> Job:
    try:
        session = session_name(body.decoding.session)
    except TurnoutError as error:
        raise respell(error, names) from None
    structure, names["structure"] = structure_asked(body)
    names |= {"method.params.uncertainty": "decoding.uncertainty"} if body.decoding.uncertainty is not None else {}
    decoding = body.with_beams(body.decoding, sampling.n, names)
    own = {"token_details": body.decoding.tokens, "processors": tuple(body.decoding.processors)}
    sampling = sampling.model_copy(update={**own, "structure": structure})
    calls = tuple(
        GenerateCall(
            request_id=request_id(),
            model=body.model,
            sampling=sampling,
            prompt=prompt,
            messages=messages,
            method=decoding.method,
            params=decoding.params,
            deadline_s=body.deadline_s,
            session=session,
            explain=body.decoding.explain,
            candidates=body.decoding.candidates,
            parse_special=body.decoding.parse_special,
            limits=body.decoding.limits,
            cache=cache_class(body.cache),
            rank=body.priority,
            cache_salt=body.cache_salt,
            contrast=body.decoding.contrast,
            context=body.decoding.context,
            uncertainty=body.decoding.uncertainty,
            abstain_above=body.decoding.abstain_above,
        )
        for prompt, messages in inputs
    )
    options = body.stream_options
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", NOT_IN_STREAMS)
    extras = body.extras(body.stream and options.include_usage and options.continuous_usage_stats)
    named = request_id(body.request_id) if body.request_id else ""
    return Job(calls, body.stream, options.include_usage, echo, names, request_id=named, extras=extras)
