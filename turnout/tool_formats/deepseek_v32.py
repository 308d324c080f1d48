"""DeepSeek V3.2 and V4: tags that begin with a marker of its own, each of which says whether its value is text."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat
from turnout.tool_formats.tagged import IS_TEXT, KEY, TaggedArguments

DSML = "\uff5cDSML\uff5c"
TURNS = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")  # of all DeepSeek's: V3.2 has V3's tokens for calls as well
CLOSE = f"</{DSML}invoke>"
ARGUMENTS = TaggedArguments(
    f'<{DSML}parameter name="{KEY}" string="{IS_TEXT}">', f"</{DSML}parameter>", CLOSE, after="\n"
)
V32, V4 = (
    CallSyntax(
        mark=f"<{DSML}{calls}>",
        begin=f"<{DSML}{calls}>\n",
        open=f'<{DSML}invoke name="{NAME}">\n',
        close=CLOSE,
        separator="\n",
        end=f"\n</{DSML}{calls}>",
        arguments=ARGUMENTS,
    )
    for calls in ("function_calls", "tool_calls")
)
FORMAT = ToolFormat("deepseek_v32", (V32, V4), signs=(DSML, "invoke name="), tokens=(DSML, *TURNS))
