"""Gemma 4: as FunctionGemma, with other markers."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat
from turnout.tool_formats.function_gemma import EscapedArguments

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = CallSyntax(mark=BEGIN, open=f"{BEGIN}call:{NAME}", close=END, arguments=EscapedArguments(QUOTE))
FORMAT = ToolFormat("gemma4", (CALL,), signs=(BEGIN, QUOTE), tokens=(BEGIN, QUOTE))
