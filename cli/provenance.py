"""Showing an answer: which model wrote which piece of text, and what it cost on the meters."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cli.output import print_table
from turnout.calls import Chunk, ModelDescription, Usage
from turnout.cost import ModelMeter
from turnout.standard_streams import shows

if TYPE_CHECKING:
    from rich.console import Console

LARGE_STYLE = "bold magenta underline"
MARKS, ASCII_MARKS = ("⟦", "⟧"), ("[[", "]]")  # around text of the large model, where styles cannot be shown


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one model wrote."""

    text: str
    source: str


@dataclass(slots=True)
class Attribution:
    """Says which model wrote which part of an answer's text, as the text arrives.

    Texts of all tokens joined are the answer's text, which may lag behind them. A character that several models'
    tokens make is that of the last one.
    """

    _waiting: deque[tuple[str, str]] = field(default_factory=deque)
    _last_source: str = ""

    def feed(self, chunk: Chunk) -> list[Piece]:
        """Return the pieces of the text that `chunk` brought."""
        self._waiting.extend((token.text, token.source) for token in chunk.tokens if token.text)
        pieces: list[Piece] = []
        rest = chunk.text
        while rest:
            # The last token of a text that ends in the middle of a character has no part in it.
            text, self._last_source = self._waiting.popleft() if self._waiting else (rest, self._last_source)
            if len(text) > len(rest):
                self._waiting.appendleft((text[len(rest) :], self._last_source))
            part, rest = rest[: len(text)], rest[len(text) :]
            if pieces and pieces[-1].source == self._last_source:
                pieces[-1] = Piece(pieces[-1].text + part, self._last_source)
            else:
                pieces.append(Piece(part, self._last_source))
        return pieces


@dataclass(slots=True)
class Answers:
    """Collects whole answers from chunks."""

    _choices: dict[int, Chunk] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> None:
        """Append to answer `chunk.index`."""
        before = self._choices.get(chunk.index, Chunk(chunk.index, "", ()))
        self._choices[chunk.index] = Chunk(
            chunk.index, before.text + chunk.text, before.tokens + chunk.tokens, chunk.finish_reason
        )

    def whole(self) -> list[Chunk]:
        """The answers, in order."""
        return [self._choices[index] for index in sorted(self._choices)]


class Marked:
    """Writes answers as they come, with the text of the large model marked.

    Args:
        out: where to write; style is used where it can show it, brackets elsewhere.
        model: what was asked; the role "large" of that pool is marked, of the first pool when empty.
        streams: write each chunk at once; several answers at a time are written when complete.
        marks: whether to mark at all.

    Attributes:
        large: name of the model whose text is marked; empty until the models are announced.
    """

    def __init__(self, out: Console, model: str = "", streams: bool = True, marks: bool = True) -> None:
        self._out = out
        self._model = model
        self._streams = streams
        self._marks = marks
        self.large = ""
        self._open = False
        self._open_mark, self._close_mark = MARKS if shows(out.file, "".join(MARKS)) else ASCII_MARKS
        self._live = Attribution()
        self._answers = Answers()

    def announce(self, models: list[ModelDescription]) -> None:
        """Learn from the server's models which one is the large one."""
        pools = [model for model in models if model.roles and self._model in ("", model.name)]
        if pools and self._marks:
            self.large = pools[0].roles.get("large", "")

    def show(self, chunk: Chunk) -> None:
        """Take the next chunk of an answer."""
        if self._streams:
            self._write(self._live.feed(chunk))
        else:
            self._answers.add(chunk)

    def finish(self) -> None:
        """Write what was held back, and end the line."""
        for chunk in self._answers.whole():
            self._out.print(f"--- answer {chunk.index + 1} of {len(self._answers.whole())} ---")
            self._write(Attribution().feed(chunk))
            self._close()
            self._out.print()
        if self._streams:
            self._close()
            self._out.print()

    def _write(self, pieces: list[Piece]) -> None:
        from rich.text import Text

        styled = self._out.color_system is not None and not self._out.no_color
        for piece in pieces:
            large = piece.source == self.large
            if not styled and large != self._open:
                self._out.print(self._open_mark if large else self._close_mark, end="")
                self._open = large
            self._out.print(Text(piece.text, style=LARGE_STYLE if large and styled else ""), end="")

    def _close(self) -> None:
        if self._open:
            self._out.print(self._close_mark, end="")
            self._open = False


def print_meters(usage: Usage) -> None:
    """Write an answer's cost, that of the large model alone, and the work of each model."""
    spent, alone = usage.cost.spent, usage.cost.large_only
    meters = [
        ("paper (relative cost of tokens written)", spent.paper, alone.paper, "{:.3f}".format),
        ("FLOPs (all tokens processed)", spent.flops, alone.flops, quantity),
        ("wall clock (large only is an estimate)", spent.wall_s, alone.wall_s, seconds),
    ]
    print_table(
        ["meter", ">spent", ">large only", ">saved"],
        [[name, show(cost), show(reference), saved(cost, reference)] for name, cost, reference, show in meters],
    )
    counts = [field.name for field in dataclasses.fields(ModelMeter) if field.name != "num_parameters"]
    print_table(
        ["model", ">parameters", *(f">{count.removesuffix('_tokens')}" for count in counts)],
        [
            [name, quantity(meter.num_parameters), *(f"{getattr(meter, count):g}" for count in counts)]
            for name, meter in usage.models.items()
        ],
    )


def summary(usage: Usage) -> str:
    """One line on the whole answer."""
    drafts = usage.speculation
    speculation = (
        f", {drafts.accepted_tokens} of {drafts.draft_tokens} drafts accepted"
        f" ({drafts.tokens_per_round:.1f} tokens a round)"
        if drafts.draft_tokens
        else ""
    )
    switches = f", {usage.switches} switches" if usage.switches else ""
    return (
        f"{usage.method}: {usage.completion_tokens} tokens in {usage.wall_s:.2f} s (first after {usage.ttft_s:.2f} s), "
        f"{usage.cost.large_share:.0%} by the large model{switches}{speculation}, seed {usage.seed}"
        + "".join(f"\n{note}" for note in usage.notes)
    )


def saved(spent: float, alone: float) -> str:
    """The share saved; negative when more was spent."""
    return f"{1 - spent / alone:.0%}" if alone else "-"


def seconds(number: float) -> str:
    """A time; 0 is what a model reports that has taken no step yet."""
    return f"{number:.2f} s" if number else "not measured"


def quantity(number: float) -> str:
    """A number with a unit prefix: 1230000 -> 1.23 M."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g}"
