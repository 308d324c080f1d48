"""Request bodies of the Messages API; sampling parameters are validated apart."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from deployments.decoding_body import Decoding
from deployments.extra_fields import CallFields
from deployments.request_fields import BodyPart
from deployments.schemas import SAMPLING_FIELDS
from turnout.calls import CACHE_CLASSES

# Clients send these; they change nothing here: prefixes are cached without being marked, and the context is not edited.
IGNORED: frozenset[str] = frozenset(
    {"anthropic_beta", "anthropic_version", "betas", "cache_control", "context_management", "diagnostics", "metadata"}
    | {"service_tier", "speed", "user_profile_id", "workspace_id"}
)
# One answer, whose stop strings have another name; a message has no place for log-probabilities.
SAMPLING = SAMPLING_FIELDS - {"logprobs", "n", "stop"}

Content = str | list[dict[str, Any]]


class Lenient(BodyPart):
    """Part of a body whose unknown fields are ignored: clients send blocks back with what else they put into them."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class TextBlock(Lenient):
    """Text of a system prompt, a message, or a tool's result."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(Lenient):
    """What the model thought; signatures are not checked."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""


class RedactedThinkingBlock(Lenient):
    """Thinking that only its server can read: it is left out."""

    type: Literal["redacted_thinking"] = "redacted_thinking"


class ToolUseBlock(Lenient):
    """A call that the model made."""

    type: Literal["tool_use"] = "tool_use"
    id: Annotated[str, Field(min_length=1)]
    name: str
    input: dict[str, Any]


class ToolResultBlock(Lenient):
    """What a call returned, as text."""

    type: Literal["tool_result"] = "tool_result"
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: Content = ""
    is_error: bool = False


class MessageTurn(Lenient):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Content,
        Field(
            description="text, or blocks: text; of role user also tool_result; of role assistant also tool_use,"
            " thinking and redacted_thinking"
        ),
    ]


class ToolOffer(Lenient):
    """One of `tools`: a function that the caller runs."""

    type: Annotated[str, Field(description="custom; the API's own tools are not supported")] = "custom"
    name: str = ""
    description: str = ""
    input_schema: Annotated[dict[str, Any], Field(default_factory=dict, description="JSON schema of the input")]
    strict: Annotated[
        bool | None, Field(description="refuse keywords of the schema that cannot be followed; absent: leave them out")
    ] = None


class MessageToolChoice(BodyPart):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(description="of the tool that must be called, with type tool")] = ""
    disable_parallel_tool_use: bool = False


class ThinkingConfig(BodyPart):
    """`thinking`: absent, the pool's default holds."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int | None, Field(ge=1, description="most tokens to think for, with type enabled")] = None
    display: Annotated[
        Literal["summarized", "omitted"] | None,
        Field(description="omitted leaves the text of thinking blocks empty; else it is all shown"),
    ] = None


class OutputSchema(BodyPart):
    """What the answer's text must fit."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Lenient):
    """`output_config`."""

    effort: Annotated[str, Field(description="as reasoning_effort of a chat; max is xhigh")] = ""
    format: OutputSchema | None = None


class CountBody(BodyPart):
    """POST /v1/messages/count_tokens."""

    model: str = ""
    messages: Annotated[list[MessageTurn], Field(min_length=1)]
    system: Annotated[Content, Field(description="text, or text blocks")] = ""
    tools: list[ToolOffer] = Field(default_factory=list)
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: Annotated[OutputSchema | None, Field(description="older name of output_config.format")] = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="variables of the chat template")


class MessagesBody(CountBody, CallFields):
    """POST /v1/messages."""

    stop_sequences: Annotated[list[str], Field(description="strings that end the answer")] = Field(default_factory=list)
    stream: bool = False
    decoding: Decoding = Decoding()
    deadline_s: Annotated[float | None, Field(json_schema_extra={"exclusiveMinimum": 0})] = None
    cache: Annotated[str, Field(json_schema_extra={"enum": ["", *CACHE_CLASSES]})] = ""
