"""Mistral up to its tokenizer v7: `[TOOL_CALLS]` and a list of JSON."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat

MARK = "[TOOL_CALLS]"
LIST = CallSyntax(
    mark=MARK,
    begin=f"{MARK}[",
    open=f'{{"name": "{NAME}", "arguments": ',
    close="}",
    separator=", ",
    end="]",
    ignored=r'(?:\s{0,16},\s{0,16}"id"\s{0,16}:\s{0,16}"[^"\\]{0,64}")?',
)
FORMAT = ToolFormat("mistral", (LIST,), signs=(MARK,), tokens=(MARK,), short_ids=True)
