"""MiniMax M1: lines of JSON between `<tool_calls>` and `</tool_calls>`."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat

BEGIN, END = "<tool_calls>", "</tool_calls>"
LINES = CallSyntax(
    mark=BEGIN,
    begin=f"{BEGIN}\n",
    open=f'{{"name": "{NAME}", "arguments": ',
    close="}",
    separator="\n",
    end=f"\n{END}",
)
FORMAT = ToolFormat("minimax_m1", (LINES,), signs=(f"{BEGIN}\\n{{",))
