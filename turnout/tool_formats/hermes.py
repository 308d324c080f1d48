"""Hermes, Qwen2.5 and Qwen3: JSON between `<tool_call>` and `</tool_call>`."""

from turnout.tool_formats.base import BREAK, NAME, CallSyntax, ToolFormat

TAGGED = CallSyntax(
    mark="<tool_call>",
    open=f'<tool_call>\n{{"name": "{NAME}", "arguments": ',
    close="}\n</tool_call>",
    separator=BREAK,
)
FORMAT = ToolFormat("hermes", (TAGGED,), signs=("<tool_call>", '"arguments": '), tokens=("<tool_call>", "</tool_call>"))
