"""GPT-OSS's harmony: a call is a message in the commentary channel to `functions.NAME`.

The recipient stands behind the channel, as the model's own library writes it, or before it, as its chat template does.
"""

from __future__ import annotations

import regex

from turnout.tool_formats.base import NAME, CallSyntax, Literal, ToolFormat

START, END, RETURN, CALL = "<|start|>", "<|end|>", "<|return|>", "<|call|>"
CHANNEL, CONSTRAIN, MESSAGE = "<|channel|>", "<|constrain|>", "<|message|>"
MARK = f"{CHANNEL}commentary to=functions."
TO_FUNCTION = CallSyntax(mark=MARK, open=f"{MARK}{NAME} {CONSTRAIN}json{MESSAGE}")
FIRST = " to=functions."
RECIPIENT_FIRST = tuple(
    CallSyntax(mark=FIRST, open=f"{FIRST}{NAME}{CHANNEL}commentary {kind}{MESSAGE}")
    for kind in ("json", f"{CONSTRAIN}json")
)
MARKUP = regex.compile(
    r"<\|start\|>assistant|<\|channel\|>(?P<channel>analysis|commentary|final)\s{0,4}"
    r"(?:(?:<\|constrain\|>)?\s{0,4}json)?<\|message\|>|<\|end\|>|<\|return\|>|<\|call\|>"
)


class Harmony(ToolFormat):
    """Harmony, whose text lies in channels too."""

    def text_rules(self, literal: Literal) -> list[str]:
        """See `ToolFormat.text_rules`."""
        header = f'{literal(CHANNEL)} ("analysis" | "commentary" | "final") {literal(MESSAGE)}'
        return [
            f'text: ({header} | {literal(END)} {literal(START)} "assistant" | TEXT)*',
            # What begins like a recipient is one: no other text takes it.
            r"TEXT: /(.|\n)+/ & ~/ to=functions\.(.|\n)*/",
        ]

    def answer_rule(self, literal: Literal) -> str:
        """See `ToolFormat.answer_rule`."""
        final = f'{literal(CHANNEL)} "final" {literal(MESSAGE)}'
        return f"{self.before_calls(literal)} ({final})? answer"

    def before_calls(self, literal: Literal) -> str:
        """See `ToolFormat.before_calls`: thinking, in a message of its own."""
        thinking = f'{literal(CHANNEL)} "analysis" {literal(MESSAGE)} TEXT? {literal(END + START)} "assistant"'
        return f"({thinking})?"


FORMAT = Harmony(
    "harmony",
    (TO_FUNCTION, *RECIPIENT_FIRST),
    signs=(f"{CHANNEL}commentary", "functions."),
    tokens=(CHANNEL, CONSTRAIN, MESSAGE, CALL),
    special=(START, END, RETURN, CALL),
    single=True,
    thinks=True,
    markup=MARKUP,
)
