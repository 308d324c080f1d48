"""MiniMax M2: tags for the calls, the function and each parameter, whose values are text or JSON."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat
from turnout.tool_formats.tagged import KEY, TaggedArguments

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
CLOSE = "</invoke>"
INVOKES = CallSyntax(
    mark=BEGIN,
    begin=f"{BEGIN}\n",
    open=f'<invoke name="{NAME}">\n',
    close=CLOSE,
    separator="\n",
    end=f"\n{END}",
    arguments=TaggedArguments(f'<parameter name="{KEY}">', "</parameter>", CLOSE, after="\n"),
)
FORMAT = ToolFormat("minimax_m2", (INVOKES,), signs=(BEGIN, '<invoke name="'), tokens=(BEGIN, END))
