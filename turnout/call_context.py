"""The context of a call: text that its question is about, given apart."""

from __future__ import annotations

from dataclasses import replace

from turnout.calls import GenerateCall
from turnout.errors import invalid


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
    last = max((place for place, turn in enumerate(messages) if turn.role == "user"), default=None)
    if last is None:
        raise invalid("context", "needs a message with role `user`")
    messages[last] = replace(messages[last], content=f"{call.context}\n\n{messages[last].content}")
    return replace(call, messages=tuple(messages), context="")
