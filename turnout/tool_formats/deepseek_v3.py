"""DeepSeek V3 and R1: kind, name and JSON in a code block between markers of its own."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat

BEGIN, END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
CALL, END_CALL, SEP = "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁call▁end\uff5c>", "<\uff5ctool▁sep\uff5c>"
BLOCKS = CallSyntax(
    mark=BEGIN,
    begin=BEGIN,
    open=f"{CALL}function{SEP}{NAME}\n```json\n",
    close=f"\n```{END_CALL}",
    separator="\n",
    end=END,
)
FORMAT = ToolFormat("deepseek_v3", (BLOCKS,), signs=(BEGIN, SEP, "```json"), tokens=(BEGIN, SEP))
