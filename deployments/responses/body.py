"""Body of POST /v1/responses: its fields, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from deployments.bodies import read_object
from deployments.request_fields import BodyPart
from deployments.schemas import ABSENT, SAMPLING_FIELDS, ChatBody
from deployments.tools import NAME
from turnout.errors import invalid
from turnout.registry import explain, validated

# Sent by OpenAI's clients and agents; they change nothing here.
IGNORED = frozenset(
    {"client_metadata", "max_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    | {"moderation", "safety_identifier", "service_tier", "stream_options"}
)
# Of the chat body, what stands in a response's body under another name or in another form, or has no place in it.
OTHERWISE = frozenset(
    {"messages", "max_tokens", "logprobs", "n", "response_format", "reasoning_effort", "stream_options", "verbosity"}
    | {"add_generation_prompt", "continue_final_message", "functions", "function_call"}
    | {"prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"}
)
UNSUPPORTED = {
    "background": "is not supported: must be false; ask for a stream, or wait for the answer",
    "conversation": "is not supported; use previous_response_id",
    "prompt": "is not supported: no prompts are kept here; give instructions and input",
    "context_management": "is not supported: nothing is left out of a conversation",
}
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
Text64 = Annotated[str, Field(max_length=64)]
Text512 = Annotated[str, Field(max_length=512)]


class TextFormat(BodyPart):
    """`text.format`: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text64 | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: Annotated[bool | None, Field(description="as in the chat body's response_format")] = None


class TextConfig(BodyPart):
    """`text`."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Field(description="accepted and ignored")] = None


class ReasoningConfig(BodyPart):
    """`reasoning`; what was thought is in the answer, so that a summary of it is not made."""

    effort: Annotated[str | None, Field(description="as reasoning_effort in the chat body")] = None
    summary: Annotated[
        Literal["auto", "concise", "detailed"] | None, Field(description="accepted and ignored: all is shown")
    ] = None
    generate_summary: Annotated[
        Literal["auto", "concise", "detailed"] | None, Field(description="accepted and ignored")
    ] = None
    context: Annotated[Literal["auto"] | None, Field(description="the chat template decides")] = None
    mode: Literal["standard"] | None = None


class FunctionTool(BodyPart):
    """One of `tools`."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=NAME)]
    description: str = ""
    parameters: Annotated[dict[str, Any], Field(default_factory=dict, description="JSON schema of the arguments")]
    strict: Annotated[bool | None, Field(description="as in the chat body's tools")] = None
    defer_loading: Literal[False] | None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: Annotated[dict[str, Any] | None, Field(description="accepted and ignored")] = None


class NamedChoice(BodyPart):
    """`tool_choice` of one function."""

    type: Literal["function"]
    name: str


class AllowedChoice(BodyPart):
    """`tool_choice` of some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedChoice], Field(min_length=1)]


CHOICES: dict[Any, type[NamedChoice | AllowedChoice]] = {"function": NamedChoice, "allowed_tools": AllowedChoice}
WORDS = ("none", "auto", "required")


class ResponseBody(BodyPart):
    """POST /v1/responses; further fields are those of the chat body that have no counterpart here."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str = ""
    input: Annotated[str | list[dict[str, Any]], Field(description="a text, or items")]
    instructions: str = ""
    previous_response_id: str = ""
    store: Annotated[bool, Field(description="keep the response, where the server keeps any")] = True
    stream: bool = False
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    max_output_tokens: Annotated[int | None, Field(json_schema_extra={"minimum": 1})] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: list[str] = Field(default_factory=list, json_schema_extra={"items": {"enum": list(INCLUDABLE)}})
    truncation: Annotated[
        Literal["disabled"] | None, Field(description="auto is not supported: nothing is left out of a conversation")
    ] = None
    background: Literal[False] | None = None
    metadata: Annotated[dict[Text64, Text512], Field(max_length=16)] = Field(default_factory=dict)
    user: Annotated[str | None, Field(description="repeated, and otherwise ignored")] = None

    @property
    def logprobs(self) -> int | None:
        """Alternatives to report of each token; None: no log-probabilities."""
        if self.top_logprobs is None and LOGPROBS not in self.include:
            return None
        return self.top_logprobs or 0


OWN = frozenset(ResponseBody.model_fields)
CHAT_FIELDS = (SAMPLING_FIELDS | frozenset(ChatBody.model_fields)) - OTHERWISE - OWN


@dataclass(frozen=True, slots=True)
class Given:
    """A body as it was read.

    Attributes:
        body: its own fields.
        items: of its input: a text is a user's message.
        more: fields that are the chat body's.
    """

    body: ResponseBody
    items: tuple[dict[str, Any], ...]
    more: dict[str, Any]


def read_body(data: bytes, ignored_tools: tuple[str, ...] = ()) -> Given:
    """Parse a body.

    Args:
        data: of the body.
        ignored_tools: types of tools that are left out.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field and what is allowed.
    """
    values = {name: value for name, value in read_object(data).items() if value is not None and name not in IGNORED}
    for name, value in values.items():
        if name in UNSUPPORTED and value is not False:
            raise invalid(name, UNSUPPORTED[name])
        if name not in OWN and name not in CHAT_FIELDS and value != ABSENT.get(name):
            known = ", ".join(sorted(OWN | CHAT_FIELDS))
            raise invalid(name[:100], f"unknown; allowed here: {known}")
    if values.get("truncation", "disabled") != "disabled":
        raise invalid("truncation", "must be disabled: nothing is left out of a conversation")
    items = _items(values)
    values = {**values, **_checked_tools(values, ignored_tools)}
    try:
        body = ResponseBody.model_validate({name: value for name, value in values.items() if name in OWN})
    except ValidationError as error:
        raise explain(error, "", ResponseBody) from None
    for place, each in enumerate(body.include):
        if each not in INCLUDABLE:
            raise invalid(f"include.{place}", f"must be one of {', '.join(INCLUDABLE)} (got {each[:60]!r})")
    return Given(body, items, {name: value for name, value in values.items() if name in CHAT_FIELDS})


def _items(values: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """`input` as items.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it is neither a text nor a list of objects.
    """
    given = values.get("input")
    if isinstance(given, str):
        return ({"type": "message", "role": "user", "content": given},)
    if not isinstance(given, list):
        raise invalid("input", "is needed" if given is None else "must be a text, or a list of items")
    for place, item in enumerate(given):
        if not isinstance(item, dict):
            raise invalid(f"input.{place}", "must be an item, an object")
    return tuple(given)


def _checked_tools(values: dict[str, Any], ignored: tuple[str, ...]) -> dict[str, Any]:
    """`tools` and `tool_choice`, without tools of ignored types; other types are refused by name.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    tools, choice = values.get("tools", []), values.get("tool_choice")
    kept = []
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in ignored:
            continue
        if kind != "function":
            shown = json.dumps(kind, ensure_ascii=False)[:60]
            message = f"must be function (got {shown}): this server runs no tools of its own; leave it out"
            raise invalid(f"tools.{place}.type", f"{message}, or have responses.ignored_tools name the type")
        kept.append(tool)
    found = {"tools": kept if isinstance(tools, list) else tools, "tool_choice": _checked_choice(choice)}
    return {name: value for name, value in found.items() if name in values}


def _checked_choice(choice: Any) -> Any:
    """`tool_choice`, an object of it as a model.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind not in CHOICES:
            raise invalid("tool_choice.type", f"must be {' or '.join(CHOICES)}; or tool_choice {' or '.join(WORDS)}")
        return validated(CHOICES[kind], choice, "tool_choice")
    if choice is not None and choice not in WORDS:
        raise invalid("tool_choice", f"must be {', '.join(WORDS)}, or an object of type {' or '.join(CHOICES)}")
    return choice
