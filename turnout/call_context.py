"""The question of a call, and its context: text that the question is about, given apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnout.calls import ChatMessage, GenerateCall
from turnout.errors import invalid


def last_user(messages: Sequence[ChatMessage]) -> int | None:
    """The place of a conversation's question, the last message of its user; None: it has none."""
    return next((place for place in reversed(range(len(messages))) if messages[place].role == "user"), None)


def with_context(call: GenerateCall) -> GenerateCall:
    """The call with its context where models read it: before the prompt or the last user message, a blank line away.

    Raises:
        TurnoutError: INVALID_ARGUMENT: there is no text that it could stand before.
    """
    if not call.context:
        return call
    if call.messages is None:
        if not isinstance(call.prompt, str):
            raise invalid("context", "needs a prompt as text: put its token ids into the prompt")
        return replace(call, prompt=f"{call.context}\n\n{call.prompt}", context="")
    messages = list(call.messages)
    last = last_user(messages)
    if last is None:
        raise invalid("context", "needs a message with role `user`")
    messages[last] = replace(messages[last], content=f"{call.context}\n\n{messages[last].content}")
    return replace(call, messages=tuple(messages), context="")
