"""Bodies of the Messages API, translated into chat bodies: what a chat can ask for is parsed and checked there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from decoding.grammars.keywords import FORMATS, NAMED, SCHEMA, SCHEMAS, UNSUPPORTED
from decoding.grammars.rewritten import is_followed, is_since_2019
from deployments.extra_fields import CallFields
from deployments.faults import respell, spelled
from deployments.messages.bodies import (
    IGNORED,
    SAMPLING,
    Content,
    CountBody,
    Lenient,
    MessagesBody,
    MessageToolChoice,
    MessageTurn,
    OutputSchema,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingConfig,
    ToolOffer,
    ToolResultBlock,
    ToolUseBlock,
)
from deployments.schemas import Job, chat_job
from turnout.calls import GenerateCall
from turnout.errors import TurnoutError, invalid
from turnout.registry import validated

BLOCKS: Mapping[str, tuple[type[Lenient], ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "tool_result": (TextBlock,),
}
BETWEEN_BLOCKS = "\n"  # of what a user or a system prompt says in several; an answer's blocks are parts of one text
THINKING_EFFORT = "medium"  # of who asks for thinking, and not for how much
LATER_SYSTEM = ("<system>\n", "\n</system>")  # around what the system says after the first answer, in a user's turn
BILLING = "x-anthropic-billing-header:"  # begins a block of agents' system prompts that differs between sessions
FAILED = "Error: "  # begins the result of a call that failed: a chat has no other place for it
B = TypeVar("B", bound=CountBody)
# Fields that a chat body has by the same names.
PASSED = frozenset({"model", "stream", "decoding", "deadline_s", "cache", "chat_template_kwargs"}) | set(
    CallFields.model_fields
)


@dataclass(slots=True)
class _Chat:
    """Chat body in the making, and how its fields are called in the body that it is made of."""

    values: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def add(self, turn: dict[str, Any], origin: str) -> dict[str, Any]:
        """Append a turn that stands at `origin`."""
        self.names[f"messages.{len(self.turns)}"] = origin
        self.turns.append(turn)
        return turn

    def say(self, role: str, text: str, origin: str) -> None:
        """Append a text, to the last turn where it has the same role: templates expect turns to alternate."""
        last = self.turns[-1] if self.turns else {}
        if last.get("role") == role:
            last["content"] = BETWEEN_BLOCKS.join(filter(None, (last["content"], text)))
        else:
            self.add({"role": role, "content": text}, origin)


def messages_job(values: dict[str, Any]) -> Job:
    """Translate the body of /v1/messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field as it is called there.
    """
    if "max_tokens" not in values:
        raise invalid("max_tokens", "is needed")
    body, sampling = _read(MessagesBody, values)
    job = _job(body, sampling | {"stop": body.stop_sequences})
    return replace(job, calls=tuple(replace(call, include_prompt_len=job.stream) for call in job.calls))


def shows_thinking(values: dict[str, Any]) -> bool:
    """Whether the text of thinking is to be written; of a body that `messages_job` took."""
    return bool((values.get("thinking") or {}).get("display") != "omitted")


def count_call(values: dict[str, Any]) -> GenerateCall:
    """Translate the body of /v1/messages/count_tokens into the call that would read it.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field as it is called there.
    """
    ours = CountBody.model_fields.keys()
    asked = {name: value for name, value in values.items() if name in ours or name not in MessagesBody.model_fields}
    body, _ = _read(CountBody, asked)
    return _job(body, {}).calls[0]


def _read(kind: type[B], values: dict[str, Any]) -> tuple[B, dict[str, Any]]:
    """The body, and the sampling parameters, which are not checked yet."""
    known = SAMPLING | kind.model_fields.keys()
    values = {name: value for name, value in values.items() if name not in IGNORED}
    for name in values.keys() - known:
        raise invalid(name[:100], f"unknown; allowed here: {', '.join(sorted(known))}")
    rest = {name: value for name, value in values.items() if name not in SAMPLING}
    return validated(kind, rest, ""), {name: value for name, value in values.items() if name in SAMPLING}


def _job(body: CountBody, sampling: dict[str, Any]) -> Job:
    chat = _Chat(names={"stop": "stop_sequences"})
    passed = body.model_fields_set & PASSED
    chat.values = {name: getattr(body, name) for name in passed} | sampling
    _add_turns(chat, body)
    _add_tools(chat, body.tools, body.tool_choice)
    _add_form(chat, body)
    _add_thinking(chat, body.thinking, body.output_config.effort)
    try:
        job = chat_job(chat.values)
    except TurnoutError as error:
        raise respell(error, chat.names) from None
    shown = {tool.name: json.dumps(tool.input_schema) for tool in body.tools}
    job = replace(job, calls=tuple(_showing(call, shown) for call in job.calls))
    theirs = {ours: spelled(name, chat.names) for ours, name in job.spelling.items()}
    return replace(job, spelling=chat.names | theirs)


def _showing(call: GenerateCall, schemas: Mapping[str, str]) -> GenerateCall:
    """The call with its tools as they were offered, for the model to read."""
    tools = (replace(tool, parameters=schemas.get(tool.name, tool.parameters)) for tool in call.tools)
    return replace(call, tools=tuple(tools))


def relaxed(schema: Any) -> Any:
    """Return a JSON schema without the keywords that structures do not follow: agents' tools are full of them."""
    return _relaxed(schema, is_since_2019(schema))


def _relaxed(schema: Any, is_new: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in UNSUPPORTED and not is_followed(key, value, schema, is_new):
            continue
        if key == "format" and value not in FORMATS:
            continue
        if key in SCHEMA and not isinstance(value, list):
            value = _relaxed(value, is_new)
        elif (key in SCHEMAS or key == "items") and isinstance(value, list):
            value = [_relaxed(each, is_new) for each in value]
        elif key in (*NAMED, "dependencies") and isinstance(value, dict):
            value = {name: _relaxed(each, is_new) for name, each in value.items()}
        made[key] = value
    return made


def _add_turns(chat: _Chat, body: CountBody) -> None:
    texts = [each.text for each in _blocks(body.system, "system", "system") if isinstance(each, TextBlock)]
    if system := BETWEEN_BLOCKS.join(each for each in texts if not each.startswith(BILLING)):
        chat.say("system", system, "system")
    answers = [place for place, turn in enumerate(body.messages) if turn.role == "assistant"]
    first_answer = answers[0] if answers else len(body.messages)
    # Many templates take a system prompt at the beginning only.
    for place, turn in enumerate(body.messages[:first_answer]):
        if turn.role == "system":
            chat.say("system", _text(turn.content, f"messages.{place}.content", "system"), f"messages.{place}")
    for place, turn in enumerate(body.messages):
        where = f"messages.{place}"
        if turn.role == "assistant":
            _add_answer(chat, turn, where)
        elif turn.role == "user":
            _add_question(chat, turn, where)
        elif place > first_answer:
            text = _text(turn.content, f"{where}.content", "system")
            chat.say("user", f"{LATER_SYSTEM[0]}{text}{LATER_SYSTEM[1]}", where)
    last = chat.turns[-1] if chat.turns else {}
    if last.get("role") == "assistant":
        if last["tool_calls"]:
            raise invalid(f"messages.{len(body.messages) - 1}", "ends in a tool_use block; give its tool_result")
        if last["content"]:  # the answer begins with it
            chat.values["continue_final_message"] = True
        else:
            chat.turns.pop()
    chat.values["messages"] = chat.turns


def _add_question(chat: _Chat, turn: MessageTurn, where: str) -> None:
    """Results of calls come first, whatever stands between them: they answer the turn before."""
    blocks = _blocks(turn.content, f"{where}.content", "user")
    results = [(place, each) for place, each in enumerate(blocks) if isinstance(each, ToolResultBlock)]
    for place, result in results:
        at = f"{where}.content.{place}"
        text = _text(result.content, f"{at}.content", "tool_result")
        text = FAILED + text if result.is_error else text
        chat.add({"role": "tool", "tool_call_id": result.tool_use_id, "content": text}, at)
    texts = [each.text for each in blocks if isinstance(each, TextBlock)]
    if texts or not results:
        chat.say("user", BETWEEN_BLOCKS.join(texts), where)


def _add_answer(chat: _Chat, turn: MessageTurn, where: str) -> None:
    last = chat.turns[-1] if chat.turns else {}
    if last.get("role") != "assistant":
        last = chat.add({"role": "assistant", "content": "", "tool_calls": []}, where)
    index = len(chat.turns) - 1
    for place, block in enumerate(_blocks(turn.content, f"{where}.content", "assistant")):
        if isinstance(block, TextBlock):
            last["content"] += block.text
        elif isinstance(block, ThinkingBlock) and block.thinking:
            last["reasoning"] = last.get("reasoning", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            calls, at = last["tool_calls"], f"{where}.content.{place}"
            chat.names[f"messages.{index}.tool_calls.{len(calls)}"] = at
            chat.names[f"messages.{index}.tool_calls.{len(calls)}.function"] = at
            called = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": called})


def _blocks(content: Content, where: str, holder: str) -> list[Lenient]:
    """The blocks of a content.

    Args:
        content: text, or blocks.
        where: its field.
        holder: what has it, see `BLOCKS`.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a block is malformed, or of a type that is not supported there.
    """
    if isinstance(content, str):
        return [TextBlock(text=content)]
    kinds = {kind.model_fields["type"].default: kind for kind in BLOCKS[holder]}
    made = []
    for place, block in enumerate(content):
        kind, given = None, block.get("type")
        if isinstance(given, str):
            kind = kinds.get(given)
        if kind is None:
            allowed = ", ".join(sorted(kinds))
            raise invalid(f"{where}.{place}.type", f"{str(given)[:40]!r} is not supported here; allowed: {allowed}")
        made.append(validated(kind, block, f"{where}.{place}"))
    return made


def _text(content: Content, where: str, holder: str) -> str:
    blocks = _blocks(content, where, holder)
    return BETWEEN_BLOCKS.join(each.text for each in blocks if isinstance(each, TextBlock))


def _add_tools(chat: _Chat, tools: list[ToolOffer], choice: MessageToolChoice | None) -> None:
    made = []
    for place, tool in enumerate(tools):
        if tool.type != "custom":
            raise invalid(f"tools.{place}.type", f"{tool.type[:40]!r} is not supported; allowed: custom")
        function = tool.model_dump(include={"name", "description", "strict"})
        function["parameters"] = tool.input_schema if tool.strict else relaxed(tool.input_schema)
        made.append({"type": "function", "function": function})
        chat.names[f"tools.{place}.function"] = f"tools.{place}"
        chat.names[f"tools.{place}.function.parameters"] = f"tools.{place}.input_schema"
    if made:
        chat.values["tools"] = made
    if choice is None or (choice.type == "auto" and not tools):
        return
    if (choice.type == "tool") != bool(choice.name):
        raise invalid("tool_choice.name", "belongs to type tool, and is needed there")
    forms = {"auto": "auto", "any": "required", "none": "none"}
    named = {"type": "function", "function": {"name": choice.name}}
    chat.values["tool_choice"] = forms.get(choice.type, named)
    chat.names["tool_choice.function.name"] = "tool_choice.name"
    if choice.disable_parallel_tool_use:
        chat.values["parallel_tool_calls"] = False
        chat.names["parallel_tool_calls"] = "tool_choice.disable_parallel_tool_use"


def _add_form(chat: _Chat, body: CountBody) -> None:
    where, form = "output_config.format", body.output_config.format
    if body.output_format is not None:
        if form is not None:
            raise invalid("output_format", f"conflicts with {where}; give one of them")
        where, form = "output_format", body.output_format
    if isinstance(form, OutputSchema):
        chat.values["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        chat.names |= {"response_format": where, "response_format.json_schema": where}
        chat.names["response_format.json_schema.schema"] = f"{where}.schema"


def _add_thinking(chat: _Chat, thinking: ThinkingConfig | None, effort: str) -> None:
    """How much to think: off, as much as `effort` says, and no longer than the budget."""
    effort, where = "xhigh" if effort == "max" else effort, "output_config.effort"
    if thinking is not None:
        if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise invalid("thinking.budget_tokens", "belongs to type enabled, and is needed there")
        if thinking.type == "disabled":
            effort, where = "none", "thinking.type"
        elif not effort:
            effort, where = THINKING_EFFORT, "thinking.type"
        if thinking.budget_tokens is not None:
            chat.values["thinking_token_budget"] = thinking.budget_tokens
            chat.names["thinking_token_budget"] = "thinking.budget_tokens"
    if effort:
        chat.values["reasoning_effort"] = effort
        chat.names["reasoning_effort"] = where
