"""GLM from 4.5 on, and those that write as it does: a tag for each parameter's name and one for its value."""

from turnout.tool_formats.base import BREAK, NAME, CallSyntax, ToolFormat
from turnout.tool_formats.tagged import KEY, TaggedArguments

BEGIN, END = "<tool_call>", "</tool_call>"
PAIRS = TaggedArguments(f"<arg_key>{KEY}</arg_key>{BREAK}<arg_value>", "</arg_value>", END, after=BREAK)
CALL = CallSyntax(mark=BEGIN, open=f"{BEGIN}{NAME}{BREAK}", close=END, separator=BREAK, arguments=PAIRS)
SIGNS = (BEGIN, "<arg_key>", "<arg_value>")
FORMAT = ToolFormat("glm4", (CALL,), signs=SIGNS, tokens=SIGNS)
