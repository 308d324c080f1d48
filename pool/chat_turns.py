"""Messages of a conversation as chat templates take them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from turnout.calls import ChatMessage

PROBE = "qzx"  # a message that no template writes by itself


def turn_of(message: ChatMessage) -> dict[str, Any]:
    """Return a message with what the templates of the model families read of it."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [call.for_template for call in message.tool_calls]
    if message.reasoning:
        turn |= dict.fromkeys(("reasoning", "reasoning_content"), message.reasoning)
        if not (message.tool_calls and message.content):  # GPT-OSS's template takes one of them with a call
            turn["thinking"] = message.reasoning
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def takes_parts(tokenizer: Any) -> bool:
    """Return whether the chat template leaves out a content that is a string, and knows parts, as LLaVA's does."""

    def knows(content: Any) -> bool:
        with suppress(Exception):  # whatever a template raises
            return PROBE in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        return False

    return bool(tokenizer.chat_template) and not knows(PROBE) and knows(in_parts(PROBE))


def in_parts_of(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content in parts."""
    return turn if turn["content"] is None else {**turn, "content": in_parts(turn["content"])}


def in_parts(content: str) -> list[dict[str, str]]:
    """Return a message's content as templates of models of text and images have it."""
    return [{"type": "text", "text": content}]
