"""Translation between the Python client's values and `turnout.v1` messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from turnout.calls import (
    ChatMessage,
    Chunk,
    EndToken,
    MethodDescription,
    ModelDescription,
    PromptToken,
    ScoredTokens,
    TokenOut,
    Usage,
)
from turnout.client_options import Options
from turnout.errors import Code, TurnoutError, invalid
from turnout.part_choice import PartChoice
from turnout.proto import generation_pb2 as pb
from turnout.registry import explain, validated
from turnout.structure import Structure
from turnout.tools import Tool, ToolCall, ToolCallPart
from turnout.types import FinishReason, TokenKind
from turnout.usage_messages import struct_values, usage

Prompt = str | Sequence[int]
Messages = Iterable[ChatMessage | Mapping[str, Any]]
TOOL_MODES, PART_OPTIONS = ("none", "auto", "required"), ("contrast", "uncertainty")
SAMPLING_FIELDS = frozenset(pb.Sampling.DESCRIPTOR.fields_by_name)
PLAIN_OPTIONS = frozenset(
    {"model", "method", "deadline_s", "request_id", "session", "explain", "cache", "cache_salt", "priority"}
    | {"token_details", "parse_special", "prompt_logprobs", "context", "abstain_above", "candidates"}
)
CHAT_OPTIONS = frozenset(
    {"parallel_tool_calls", "reasoning", "reasoning_effort", "add_generation_prompt", "continue_final_message"}
)
RETRY_AFTER = "retry-after-s"
RETRY_IN_MESSAGE = re.compile(r"; try again in (\d+\.\d) s$")
FIELD_OF_MESSAGE = re.compile(r"^([A-Za-z_][\w.]*): ")
UNKNOWN_APPLICATION = re.compile(r"Application (metadata not set|'.*' not found)\. Ping ")  # Ray Serve's sentence


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation.

    Attributes:
        id: the request's id, as in the server's log.
        model: the pool or model that answered.
        choices: one per answer, whole.
        usage: tokens and cost of the call.
        prompt_tokens: of the prompt, where the call asked for `prompt_logprobs`.
    """

    id: str
    model: str
    choices: tuple[Chunk, ...]
    usage: Usage
    prompt_tokens: tuple[PromptToken, ...] = ()

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        """What was thought before the first answer."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """What the first answer asks for."""
        return self.choices[0].tool_calls

    @property
    def tokens(self) -> tuple[TokenOut, ...]:
        """Tokens of the first answer, each with the model that wrote it."""
        return self.choices[0].tokens


def generate_request(prompt: Prompt | None, messages: Messages | None, options: Options) -> pb.GenerateRequest:
    """The message of a call.

    Raises:
        TurnoutError: INVALID_ARGUMENT, where a value has no place in the message.
    """
    if (prompt is None) == (messages is None):
        raise invalid("prompt", "give exactly one of prompt and messages")
    request = pb.GenerateRequest()
    for name, value in options.items():
        if value is not None:
            _set_option(request, name, value)
    if isinstance(prompt, str):
        _assign("prompt", request, {"prompt": prompt})
    elif prompt is not None:
        _assign("prompt_ids", request.prompt_ids, {"ids": tuple(prompt)})
    if messages is not None:
        request.chat.SetInParent()
        for message in messages:
            _assign("messages", request.chat, {"messages": [_turn(message)]})
    return request


def _turn(message: ChatMessage | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(message, ChatMessage):
        return asdict(message)
    calls = [
        {"id": each.get("id"), **{name: each["function"].get(name) for name in ("name", "arguments")}}
        for each in message.get("tool_calls") or ()
    ]
    return {
        **{name: message.get(name) for name in ("role", "content", "tool_call_id")},
        "tool_calls": calls,
        "reasoning": _thought(message),
    }


def _thought(message: Mapping[str, Any]) -> str | None:
    return next((message[name] for name in ("reasoning", "reasoning_content") if message.get(name)), None)


def _tool(tool: Tool | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(tool, Tool):
        return asdict(tool)
    function = tool["function"]
    made = {name: function.get(name) for name in ("name", "description")}
    return {**made, "parameters": json.dumps(function.get("parameters") or {})}


def _set_part(message: pb.Part, value: Any, field: str) -> None:
    try:
        choice = PartChoice.model_validate(value)
    except ValidationError as error:
        raise explain(error, field, PartChoice) from None
    message.name = choice.name
    message.params.update(to_jsonable_python(choice.params))


def _set_option(request: pb.GenerateRequest, name: str, value: Any) -> None:
    if name == "params":
        try:
            request.params.update(dict(value))
        except (TypeError, ValueError) as error:
            raise invalid("params", f"must be JSON-like: {error}") from None
    elif name == "limits":
        _assign(name, request.limits, dict(value))
    elif name == "structure":
        _set_structure(request.structure, value)
    elif name == "tools":
        _assign(name, request.chat, {"tools": [_tool(each) for each in value]})
    elif name == "chat_template_kwargs":
        request.chat.chat_template_kwargs.update(dict(value))
    elif name in CHAT_OPTIONS:
        _assign(name, request.chat, {name: value})
    elif name == "tool_choice":
        _assign(name, request.chat.tool_choice, {"mode" if value in TOOL_MODES else "name": value})
    elif name in PLAIN_OPTIONS:
        _assign(name, request, {name: value})
    elif name == "processors":
        for place, each in enumerate(value):
            _set_part(request.sampling.processors.add(), each, f"processors.{place}")
    elif name in PART_OPTIONS:
        _set_part(getattr(request, name), value, name)
    elif name in SAMPLING_FIELDS:
        value = (value,) if name == "stop" and isinstance(value, str) else value
        _assign(f"sampling.{name}", request.sampling, {name: value})
    else:
        others = {*PART_OPTIONS, "chat_template_kwargs", "limits", "params", "structure", "tools", "tool_choice"}
        allowed = sorted({*SAMPLING_FIELDS, *PLAIN_OPTIONS, *CHAT_OPTIONS, *others})
        raise invalid(name, f"unknown; allowed here: {', '.join(allowed)}")


def _set_structure(message: pb.Structure, value: Mapping[str, Any]) -> None:
    structure = validated(Structure, dict(value), "structure")
    kind, text = structure.kind, structure.value
    if kind in ("json_schema", "regex", "grammar"):
        if kind != "json_schema" and not isinstance(value.get(kind, text), str):
            raise invalid("structure", f"{kind} must be a text")
        setattr(message, kind, text)
    elif kind == "json_object" and text in ("", "true"):
        message.json_object = True
    elif kind == "choice" and structure.texts:
        message.choice.texts.extend(structure.texts)
    else:  # also what is refused there
        message.other.kind, message.other.value = kind, text


def _assign(field: str, message: Any, values: dict[str, Any]) -> None:
    try:
        message.MergeFrom(type(message)(**values))
    except (TypeError, ValueError) as error:
        raise invalid(field, f"has the wrong type or size: {error}") from None


def score_request(prompt: Prompt, completions: Iterable[Prompt], model: str, top: int) -> pb.ScoreRequest:
    """The message of a score call."""
    return pb.ScoreRequest(
        model=model, prompt=text_or_ids(prompt), completions=[text_or_ids(each) for each in completions], top=top
    )


def text_or_ids(value: Prompt) -> pb.TextOrIds:
    """The message of a text or of token ids."""
    if isinstance(value, str):
        return pb.TextOrIds(text=value)
    return pb.TextOrIds(token_ids=pb.TokenIds(ids=list(value)))


def chunk(message: pb.Choice | pb.ChoiceDelta) -> Chunk:
    """A choice, or a part of one."""
    new = getattr(message, "call_parts", ())  # of a part alone
    reason = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").replace("TOOL_CALLS", "STOP")
    return Chunk(
        index=message.index,
        text=message.text,
        tokens=tuple(_token(token) for token in message.tokens),
        finish_reason=None if reason == "UNSPECIFIED" else FinishReason[reason],
        tool_calls=tuple(ToolCall(each.id, each.name, each.arguments) for each in message.tool_calls),
        call_parts=tuple(ToolCallPart(each.index, each.id, each.name, each.arguments) for each in new),
        reasoning=message.reasoning,
        stop=getattr(message, stop) if (stop := message.WhichOneof("stop_reason")) else None,
    )


def _token(message: pb.TokenInfo) -> TokenOut:
    kind = pb.TokenKind.Name(message.kind).removeprefix("TOKEN_KIND_")
    return TokenOut(
        id=message.id,
        text=message.text,
        source=message.source,
        kind=TokenKind.DECODED if kind == "UNSPECIFIED" else TokenKind[kind],
        logprob=message.logprob if message.HasField("logprob") else None,
        entropy_bits=message.entropy_bits if message.HasField("entropy_bits") else None,
        top=_top(message),
        rejected=tuple(message.rejected),
        broken=_broken(message),
        thinking=message.thinking,
    )


def _top(message: pb.TokenInfo | pb.PromptToken) -> tuple[tuple[int, str, float], ...]:
    return tuple((top.id, top.text, top.logprob) for top in message.top)


def _broken(message: pb.TokenInfo | pb.PromptToken) -> tuple[tuple[int, bytes], ...]:
    raws = {message.id: message.raw, **{top.id: top.raw for top in message.top}}
    return tuple((token_id, raw) for token_id, raw in raws.items() if raw)


def _prompt_token(message: pb.PromptToken) -> PromptToken:
    return PromptToken(
        id=message.id,
        text=message.text,
        logprob=message.logprob if message.HasField("logprob") else None,
        rank=message.rank if message.HasField("rank") else None,
        top=_top(message),
        broken=_broken(message),
    )


def result(message: pb.GenerateResponse) -> Result:
    """A finished generation."""
    choices = tuple(chunk(choice) for choice in message.choices)
    read = tuple(_prompt_token(token) for token in message.prompt_tokens)
    return Result(message.id, message.model, choices, usage(message.usage), read)


def scored(message: pb.ScoreResponse) -> list[ScoredTokens]:
    """Scored completions, in the order asked for."""
    return [ScoredTokens(tuple(_token(t) for t in each.tokens), tuple(each.greedy)) for each in message.scored]


def models(message: pb.ListModelsResponse) -> list[ModelDescription]:
    """Every name a request may use."""
    return [
        ModelDescription(
            name=each.name,
            architecture=each.architecture,
            num_parameters=each.num_parameters,
            vocab_size=each.vocab_size,
            max_length=each.max_length,
            roles=dict(each.roles),
            default_method=each.default_method,
            default_params=struct_values(each.default_params),
            routed=each.routed,
            ends=tuple(EndToken(end.id, end.text) for end in each.ends),
            ends_source=each.ends_source,
            revision=each.revision,
            other_vocabulary=each.other_vocabulary,
            tool_format=each.tool_format,
        )
        for each in message.models
    ]


def methods(message: pb.ListMethodsResponse) -> list[MethodDescription]:
    """Every decoding method."""
    return [
        MethodDescription(each.name, each.summary, tuple(each.seeds), each.lossless, struct_values(each.params_schema))
        for each in message.methods
    ]


def credentials(api_key: str) -> tuple[tuple[str, str], ...]:
    """Metadata that says who calls."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def error(code: grpc.StatusCode, details: str | None, metadata: Iterable[tuple[str, Any]] | None = ()) -> TurnoutError:
    """A failed call as the error that the server meant."""
    retry = next((float(value) for key, value in metadata or () if key == RETRY_AFTER), None)
    message = details or code.name
    if code is grpc.StatusCode.NOT_FOUND and UNKNOWN_APPLICATION.match(message):
        # What a proxy says that was started a moment ago, and has not heard yet what it stands before.
        return TurnoutError(Code.UNAVAILABLE, "nothing is served there at the moment; try again")
    if retry is None and (found := RETRY_IN_MESSAGE.search(message)):
        retry = float(found[1])  # of a stream that is refused, Ray Serve passes on code and message only
    found = FIELD_OF_MESSAGE.match(message)
    known = code.name in Code.__members__
    field = found[1] if found and known else None
    return TurnoutError(Code[code.name] if known else Code.INTERNAL, message, field, retry)
