"""Seed-OSS: a tag for the function and one for each parameter, whose values are text or JSON."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat
from turnout.tool_formats.tagged import KEY, TaggedArguments

BEGIN, END = "<seed:tool_call>", "</seed:tool_call>"
CLOSE = "</function>"
TAGS = CallSyntax(
    mark=BEGIN,
    open=f"{BEGIN}\n<function={NAME}>\n",
    close=f"{CLOSE}\n{END}",
    separator="\n",
    arguments=TaggedArguments(f"<parameter={KEY}>", "</parameter>", CLOSE, after="\n"),
)
FORMAT = ToolFormat("seed_oss", (TAGS,), signs=("<seed:bos>", "<function=", "<parameter="), tokens=(BEGIN, END))
