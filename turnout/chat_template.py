"""How a conversation is made a prompt: what a request tells the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turnout.errors import invalid

# What the server gives the template, or the function that renders it.
RESERVED = frozenset(
    {"messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "return_dict", "return_tensors", "tokenizer_kwargs", "padding", "truncation", "max_length"}
    | {"return_assistant_tokens_mask"}
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a request tells the chat template.

    Attributes:
        kwargs: variables of the template, by name.
        effort: `reasoning_effort`, which a pool turns into such variables; "": not given.
        add_generation_prompt: whether the prompt ends where the assistant's answer begins; None: unless the last
            message is continued.
        continue_final_message: whether the last message, an assistant's, is left open for the answer to go on with.
    """

    kwargs: dict[str, Any] = field(default_factory=dict)
    effort: str = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @property
    def begins_answer(self) -> bool:
        """`add_generation_prompt`, as it holds."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def check(self, roles: Sequence[str], place: str = "") -> None:
        """Refuse what contradicts itself or the conversation.

        Args:
            roles: of the conversation's messages.
            place: of the fields in the request, with a dot; "": they stand at its top.

        Raises:
            TurnoutError: INVALID_ARGUMENT, naming the field.
        """
        check_kwargs(self.kwargs, f"{place}chat_template_kwargs")
        if self.continue_final_message:
            if self.add_generation_prompt:
                other = "continue_final_message"
                raise invalid(f"{place}add_generation_prompt", f"conflicts with {other}; give one of them")
            if not roles or roles[-1] != "assistant":
                raise invalid(f"{place}continue_final_message", "needs a last message with role `assistant`")


NO_OPTIONS = TemplateOptions()


def check_kwargs(kwargs: dict[str, Any], field: str) -> None:
    """Refuse variables that are the server's.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the variable below `field`.
    """
    if taken := sorted(RESERVED & kwargs.keys()):
        raise invalid(f"{field}.{taken[0]}", "is set by the server, or has a field of its own")


def default_effort(effort: str) -> dict[str, Any]:
    """The variables that the templates of the model families read: Qwen, DeepSeek and Granite, GPT-OSS.

    A template ignores those that it does not know.
    """
    thinks = effort != "none"
    return {"enable_thinking": thinks, "thinking": thinks} | ({"reasoning_effort": effort} if thinks else {})
