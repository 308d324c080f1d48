from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from cli.provenance import Attribution, Marked, Piece, quantity, saved, seconds
from turnout.calls import Chunk, ModelDescription, TokenOut
from turnout.types import TokenKind

PART = ""  # text of a token that does not complete a character


def chunk(text: str, *tokens: tuple[str, str]) -> Chunk:
    return Chunk(0, text, tuple(TokenOut(1, part, source, TokenKind.DECODED) for part, source in tokens))


@pytest.mark.parametrize(
    ("chunks", "pieces"),
    [
        pytest.param([chunk("ab", ("a", "s"), ("b", "s"))], [Piece("ab", "s")], id="one model"),
        pytest.param([chunk("ab", ("a", "s"), ("b", "l"))], [Piece("a", "s"), Piece("b", "l")], id="two models"),
        pytest.param(
            [chunk("", ("a", "s")), chunk("ab", ("b", "l"))], [Piece("a", "s"), Piece("b", "l")], id="text lags"
        ),
        pytest.param(
            [chunk("he", ("hello", "s")), chunk("llo!", ("!", "l"))],
            [Piece("he", "s"), Piece("llo", "s"), Piece("!", "l")],
            id="a token held back in the middle",
        ),
        pytest.param(
            [chunk("he", ("hello", "s")), chunk("llol", ("l", "l"))],
            [Piece("he", "s"), Piece("llo", "s"), Piece("l", "l")],
            id="a token held back before one that looks like its rest",
        ),
        pytest.param(
            [chunk("", (PART, "s")), chunk("é", ("é", "l")), chunk(" au", (" au", "s"))],
            [Piece("é", "l"), Piece(" au", "s")],
            id="a character of two tokens",
        ),
        pytest.param(
            [chunk("é au", (PART, "s"), ("é", "l"), (" au", "s"))],
            [Piece("é", "l"), Piece(" au", "s")],
            id="a character of two tokens before another token",
        ),
        pytest.param([chunk("a", ("a", "s"), ("", "l"))], [Piece("a", "s")], id="a token without text of its own"),
        pytest.param(
            [chunk("ab", ("a", "s"), ("", "l"), ("b", "s"))], [Piece("ab", "s")], id="such a token in the middle"
        ),
        pytest.param(
            [chunk("a", ("a", "s"), (PART, "l")), chunk("\ufffd")],
            [Piece("a", "s"), Piece("\ufffd", "s")],
            id="an answer that ends within a character",
        ),
        pytest.param([chunk("a", ("a", "s")), chunk("")], [Piece("a", "s")], id="an empty last chunk"),
    ],
)
def test_text_is_given_to_the_model_that_wrote_it(chunks: list[Chunk], pieces: list[Piece]) -> None:
    attribution = Attribution()
    found = [piece for each in chunks for piece in attribution.feed(each)]
    assert found == pieces
    assert "".join(piece.text for piece in found) == "".join(each.text for each in chunks)


def shown(chunks: list[Chunk], models: list[ModelDescription], color: bool, **options: bool) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=color, color_system="standard" if color else None, soft_wrap=True)
    marked = Marked(console, **options)
    marked.announce(models)
    for each in chunks:
        marked.show(each)
    marked.finish()
    return out.getvalue()


def test_without_colour_the_large_models_text_stands_in_brackets(
    chunks: list[Chunk], models: list[ModelDescription]
) -> None:
    assert shown(chunks, models, color=False) == "one⟦ two⟧ three\n"


def test_with_colour_it_is_styled_and_nothing_is_added(chunks: list[Chunk], models: list[ModelDescription]) -> None:
    text = shown(chunks, models, color=True)
    assert text == "one\x1b[1;4;35m two\x1b[0m three\n"


def test_without_marks_the_text_is_bare(chunks: list[Chunk], models: list[ModelDescription]) -> None:
    assert shown(chunks, models, color=False, marks=False) == "one two three\n"


def test_an_answer_that_ends_with_the_large_model_is_closed(models: list[ModelDescription]) -> None:
    assert shown([chunk("ab", ("a", "s"), ("b", "l"))], models, color=False) == "a⟦b⟧\n"


def test_square_brackets_in_an_answer_are_text(models: list[ModelDescription]) -> None:
    assert shown([chunk("[red]x[/red]", ("[red]x[/red]", "s"))], models, color=False) == "[red]x[/red]\n"


def test_several_answers_are_written_one_after_the_other(models: list[ModelDescription]) -> None:
    mixed = [
        Chunk(1, "B", (TokenOut(1, "B", "l", TokenKind.DECODED),)),
        Chunk(0, "a", (TokenOut(1, "a", "s", TokenKind.DECODED),)),
        Chunk(1, "b", (TokenOut(1, "b", "s", TokenKind.DECODED),)),
    ]
    assert shown(mixed, models, color=False, streams=False) == (
        "--- answer 1 of 2 ---\na\n--- answer 2 of 2 ---\n⟦B⟧b\n"
    )


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1234, "1.23 k"), (5.6e6, "5.6 M"), (2e12, "2 T"), (3.3e15, "3.3 P")]
)
def test_quantities_have_a_unit_prefix(number: float, text: str) -> None:
    assert quantity(number) == text


@pytest.mark.parametrize(("spent", "alone", "text"), [(25, 100, "75%"), (150, 100, "-50%"), (1, 0, "-")])
def test_what_was_saved_may_be_negative(spent: float, alone: float, text: str) -> None:
    assert saved(spent, alone) == text


def test_a_time_nobody_measured_is_not_shown_as_zero() -> None:
    assert (seconds(0.0), seconds(1.234)) == ("not measured", "1.23 s")
