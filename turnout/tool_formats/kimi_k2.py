"""Kimi K2: name and number of a call, and JSON, between markers of its own."""

from turnout.tool_formats.base import ID, NAME, CallSyntax, ToolFormat

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKERS = (BEGIN, END, CALL, ARGUMENTS, END_CALL)
NUMBERED = CallSyntax(mark=BEGIN, begin=BEGIN, open=f"{CALL}functions.{NAME}:{ID}{ARGUMENTS}", close=END_CALL, end=END)
FORMAT = ToolFormat("kimi_k2", (NUMBERED,), signs=(BEGIN, ARGUMENTS), tokens=MARKERS)
