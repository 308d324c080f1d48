"""Mistral from its tokenizer v11 on: `[TOOL_CALLS]NAME[ARGS]` and the arguments."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat
from turnout.tool_formats.mistral import MARK

ARGS = "[ARGS]"
NAMED = CallSyntax(mark=MARK, open=f"{MARK}{NAME}{ARGS}")
FORMAT = ToolFormat(
    "mistral_args", (NAMED,), signs=(MARK, ARGS), tokens=(MARK, ARGS), special=(MARK, ARGS), short_ids=True
)
