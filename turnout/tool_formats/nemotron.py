"""Nemotron Nano 2: a list of JSON between `<TOOLCALL>` and `</TOOLCALL>`."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat

BEGIN, END = "<TOOLCALL>", "</TOOLCALL>"
LIST = CallSyntax(
    mark=BEGIN, begin=f"{BEGIN}[", open=f'{{"name": "{NAME}", "arguments": ', close="}", separator=", ", end=f"]{END}"
)
FORMAT = ToolFormat("nemotron", (LIST,), signs=(f"{BEGIN}[",))
