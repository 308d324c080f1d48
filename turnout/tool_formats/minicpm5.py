"""MiniCPM 5: a tag for the function and one for each parameter, whose values are text or JSON."""

from turnout.tool_formats.base import BREAK, NAME, CallSyntax, ToolFormat
from turnout.tool_formats.tagged import KEY, TaggedArguments

MARK, END = '<function name="', "</function>"
TAGS = CallSyntax(
    mark=MARK,
    open=f'{MARK}{NAME}">',
    close=END,
    separator=BREAK,
    arguments=TaggedArguments(f'<param name="{KEY}">', "</param>", END),
)
FORMAT = ToolFormat("minicpm5", (TAGS,), signs=(MARK, '<param name="'))
