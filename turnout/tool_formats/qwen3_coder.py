"""Qwen3-Coder and Qwen3.5: a tag for the function and one for each parameter, whose values are text or JSON."""

from turnout.tool_formats.base import BREAK, NAME, CallSyntax, ToolFormat
from turnout.tool_formats.tagged import KEY, TaggedArguments

END = "</function>"
TAGS = CallSyntax(
    mark="<tool_call>",
    open=f"<tool_call>\n<function={NAME}>\n",
    close=f"{END}\n</tool_call>",
    separator=BREAK,
    arguments=TaggedArguments(f"<parameter={KEY}>\n", "\n</parameter>\n", END),
)
FORMAT = ToolFormat("qwen3_coder", (TAGS,), signs=("<tool_call>", "<function=", "<parameter="))
