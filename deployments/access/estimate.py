"""About how many tokens a prompt has, before anybody has looked."""

from __future__ import annotations

from turnout.calls import GenerateCall, ScoreCall

CHARS_PER_TOKEN = 4  # until it is known
TURN_TOKENS = 4  # what a template adds to a message, about


def estimated_tokens(call: GenerateCall | ScoreCall) -> int:
    """About how many tokens a call has the models read."""
    if isinstance(call, ScoreCall):
        return _estimated(call.prompt) + sum(_estimated(completion) for completion in call.completions)
    if call.messages is not None:
        return sum(_estimated(turn.content) + TURN_TOKENS for turn in call.messages)
    return _estimated(call.prompt or "")


def _estimated(text: str | tuple[int, ...]) -> int:
    return len(text) if isinstance(text, tuple) else -(-len(text) // CHARS_PER_TOKEN)
