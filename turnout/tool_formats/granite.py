"""Granite 3 and Phi-4-mini: `<|tool_call|>` and a list of JSON."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat

MARK = "<|tool_call|>"
LIST = CallSyntax(
    mark=MARK, begin=f"{MARK}[", open=f'{{"name": "{NAME}", "arguments": ', close="}", separator=", ", end="]"
)
FORMAT = ToolFormat("granite", (LIST,), signs=(f"{MARK} followed by a JSON list",), tokens=(MARK,))
