"""JSON for models of no known family: between `<tool_call>` and `</tool_call>`, or alone at an answer's beginning."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat
from turnout.tool_formats.hermes import TAGGED

BARE = CallSyntax(open=f'{{"name": "{NAME}", "arguments": ', close="}", separator="\n")
FORMAT = ToolFormat("plain_json", (TAGGED, BARE))
