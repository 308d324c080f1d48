"""Apriel: a list of JSON between `<tool_calls>` and `</tool_calls>`."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat

BEGIN, END = "<tool_calls>", "</tool_calls>"
LIST = CallSyntax(
    mark=BEGIN, begin=f"{BEGIN}[", open=f'{{"name": "{NAME}", "arguments": ', close="}", separator=", ", end=f"]{END}"
)
FORMAT = ToolFormat("apriel", (LIST,), signs=(f"{BEGIN}[", END, '"arguments": '))
