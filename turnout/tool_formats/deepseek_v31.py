"""DeepSeek V3.1: name and JSON between markers of its own."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat
from turnout.tool_formats.deepseek_v3 import BEGIN, CALL, END, END_CALL, SEP

PLAIN = CallSyntax(mark=BEGIN, begin=BEGIN, open=f"{CALL}{NAME}{SEP}", close=END_CALL, end=END)
FORMAT = ToolFormat("deepseek_v31", (PLAIN,), signs=(BEGIN, SEP))
