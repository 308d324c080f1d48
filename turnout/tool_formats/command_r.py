"""Command R7B, Command A and later of Cohere's: a list of JSON between markers; what is said has markers as well."""

from __future__ import annotations

import regex

from turnout.tool_formats.base import ID, NAME, CallSyntax, Literal, ToolFormat

BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
SAYS, SAID = ("<|START_RESPONSE|>", "<|START_TEXT|>"), ("<|END_RESPONSE|>", "<|END_TEXT|>")
ACTIONS = CallSyntax(
    mark=BEGIN,
    begin=f"{BEGIN}[\n    ",
    open=f'{{"tool_call_id": "{ID}", "tool_name": "{NAME}", "parameters": ',
    close="}",
    separator=",\n    ",
    end=f"\n]{END}",
)


class CommandR(ToolFormat):
    """Cohere's format, whose text lies between markers too."""

    def text_rules(self, literal: Literal) -> list[str]:
        """See `ToolFormat.text_rules`."""
        first, last = (" | ".join(map(literal, marks)) for marks in (SAYS, SAID))
        return [f"text: ({first})? TEXT ({last})?", r"TEXT: /(.|\n)*/"]

    def answer_rule(self, literal: Literal) -> str:
        """See `ToolFormat.answer_rule`."""
        first, last = (" | ".join(map(literal, marks)) for marks in (SAYS, SAID))
        return f"({first})? answer ({last})?"


FORMAT = CommandR(
    "command_r",
    (ACTIONS,),
    signs=(BEGIN, '"tool_name": "'),
    tokens=(BEGIN, END),
    special=(*SAYS, *SAID),
    markup=regex.compile("|".join(regex.escape(each) for each in (*SAYS, *SAID))),
)
