"""The grammar of answers that may call functions, in Lark's notation as llguidance takes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from turnout.structure import Structure
from turnout.tool_formats import tool_format
from turnout.tool_formats.base import (
    BREAK,
    ID,
    ID_PATTERN,
    NAME,
    CallSyntax,
    Literal,
    ToolFormat,
    before_token,
    ending_in,
)


@dataclass(frozen=True)
class CallRules:
    """What calls an answer may hold; as a `Structure` it has kind `tools`.

    Attributes:
        functions: JSON schemas of arguments by function.
        required: whether the answer must call one of them.
        parallel: whether it may call several.
        answer: what an answer without a call must fit; None: nothing.
        form: name of the tool format; "": the pool's.
    """

    functions: Mapping[str, Any]
    required: bool = False
    parallel: bool = True
    answer: Structure | None = None
    form: str = ""

    @classmethod
    def of(cls, structure: Structure) -> CallRules:
        """Read what `structure` has written."""
        values = json.loads(structure.value)
        answer = values.pop("answer")
        return cls(**values, answer=None if answer is None else Structure.model_validate(answer))

    @property
    def structure(self) -> Structure:
        """The structure.

        Raises:
            ValidationError: they are too large.
        """
        answer = None if self.answer is None else self.answer.model_dump()
        values = {"functions": dict(self.functions), "required": self.required, "parallel": self.parallel}
        text = json.dumps(values | {"answer": answer, "form": self.form}, ensure_ascii=False)
        return Structure(kind="tools", value=text)

    def in_format(self, form: ToolFormat) -> CallRules:
        """The same rules in a format; where answers have a structure of their own, calls have a mark."""
        return replace(self, form=(form if self.answer is None else form.marked).name)


def grammar_of(rules: CallRules, special: Mapping[str, int], answer: str | None = None) -> str:
    """Return the grammar of the answers that rules allow.

    Args:
        rules: with a format.
        special: ids of the vocabulary's special tokens by name: a grammar names them by id.
        answer: right-hand side of the rule for what an answer without a call must fit, where the rules have one.
    """
    form = tool_format(rules.form)

    def literal(text: str) -> str:
        return _literal(text, special)

    starts: list[str] = []
    lines: list[str] = []
    for place, syntax in enumerate(form.syntaxes):
        before, rest = _split(syntax, special, literal)
        lines += _calls(place, syntax, rules, rest, literal, several=rules.parallel and not form.single)
        if rules.required or rules.answer is not None:
            starts.append(f"{form.before_calls(literal)} {literal(syntax.mark)} calls_{place}")
        elif not syntax.mark:
            starts.append(f"calls_{place}")
        elif before is None or form.thinks:
            lead, mark = before_token(literal(syntax.mark))
            starts.append(f"{f'SAID_{place}' if lead else 'text'} {mark} calls_{place}")
            lines += [ending_in(f"SAID_{place}", lead)] if lead else []
        else:
            starts.append(f"said_{place} calls_{place}")
            lines.append(f"said_{place}[lazy]: TEXT {before}")
    if rules.answer is not None and not rules.required:
        starts.insert(0, form.answer_rule(literal))
        lines.append(f"answer: {answer}")
    elif not rules.required:
        starts.insert(0, "text")
    if not {"text", "TEXT", "TEXT?"}.isdisjoint(" ".join([*starts, *lines]).split()):
        lines += form.text_rules(literal)
    return "\n".join([f"start: {' | '.join(starts)}", *lines])


def _split(syntax: CallSyntax, special: Mapping[str, int], literal: Literal) -> tuple[str | None, str]:
    """How text may end in a syntax's mark, None where that has special tokens; and what follows the mark up to NAME."""
    whole = syntax.begin + syntax.open
    rest = whole.removeprefix(syntax.mark).partition(NAME)[0]
    ends = bool(syntax.mark) and not any(name in syntax.mark for name in special)
    return literal(syntax.mark) if ends else None, rest


def _calls(
    place: int, syntax: CallSyntax, rules: CallRules, rest: str, literal: Literal, *, several: bool
) -> list[str]:
    """Rules for calls after the mark."""
    before, _, after = syntax.open.partition(NAME)
    more = f"({literal(syntax.separator + before)} call_{place})*" if several else ""
    lines = [f"calls_{place}: {literal(rest)} call_{place} {more} {literal(syntax.end)}"]
    ways = []
    for number, (name, schema) in enumerate(rules.functions.items()):
        ways.append(f"{literal(name + after)} arguments_{place}_{number} {literal(syntax.close)}")
        lines += syntax.arguments.rules(f"arguments_{place}_{number}", schema, literal)
    return [*lines, f"call_{place}: {' | '.join(ways)}"]


def _literal(text: str, special: Mapping[str, int]) -> str:
    """A text, in which special tokens are meant, as part of a rule."""
    names = sorted((name for name in special if name in text), key=len, reverse=True)
    meant = {ID: f"/{ID_PATTERN}/", BREAK: r'"\n"?'} | {name: f"<[{special[name]}]>" for name in names}
    pieces = re.split(f"({'|'.join(map(re.escape, [*names, ID, BREAK]))})", text)
    return " ".join(meant.get(piece) or json.dumps(piece, ensure_ascii=False) for piece in pieces if piece)


def form_of_calls(structure: Structure | None) -> str:
    """Return how calls of tools are written in answers of a structure, as the pool settled it; "": there are none."""
    return CallRules.of(structure).form if structure is not None and structure.kind == "tools" else ""
