"""Mistral from its tokenizer v11 on: `[TOOL_CALLS]NAME[ARGS]` and the arguments; v11 writes an id between them."""

from turnout.tool_formats.base import ID, NAME, CallSyntax, ToolFormat
from turnout.tool_formats.mistral import MARK

CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
NAMED = CallSyntax(mark=MARK, open=f"{MARK}{NAME}{ARGS}")
WITH_ID = CallSyntax(mark=MARK, open=f"{MARK}{NAME}{CALL_ID}{ID}{ARGS}")
FORMAT = ToolFormat(
    "mistral_args",
    (NAMED, WITH_ID),
    signs=(MARK, ARGS),
    tokens=(MARK, ARGS),
    short_ids=True,
)
