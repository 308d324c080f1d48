"""Llama 3.1 and later: `{"name": ..., "parameters": ...}` at an answer's beginning, or after `<|python_tag|>`."""

from turnout.tool_formats.base import NAME, CallSyntax, ToolFormat

TAG = "<|python_tag|>"
OPEN = f'{{"name": "{NAME}", "parameters": '
BARE = CallSyntax(open=OPEN, close="}", separator="; ")
TAGGED = CallSyntax(mark=TAG, begin=TAG, open=OPEN, close="}", separator="; ")
FORMAT = ToolFormat("llama3_json", (BARE, TAGGED), signs=('{"name": function name, "parameters": ',), tokens=(TAG,))
