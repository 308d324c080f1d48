"""Text that methods work with: words put into the models' context, and tokens read back."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol, runtime_checkable

from decoding.model import ModelPool, TokenText
from turnout.errors import invalid

YES = ("yes", " yes", "Yes", " Yes")
NO = ("no", " no", "No", " No")


@runtime_checkable
class TextCodec(TokenText, Protocol):
    """A tokenizer that also goes from text to tokens."""

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        """Token ids of a text, after what the tokenizer puts before every text.

        Args:
            text: any.
            parse_special: whether special tokens that are spelled out in it are meant.
        """
        ...


def codec_of(models: ModelPool, field: str) -> TextCodec:
    """The pool's tokenizer.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it cannot turn text into tokens.
    """
    if not isinstance(models.tokenizer, TextCodec):
        raise invalid(field, "needs a tokenizer that turns text into tokens; this pool's knows single tokens only")
    return models.tokenizer


def continue_with(codec: TextCodec, text: str, parse_special: bool = True) -> tuple[int, ...]:
    """Token ids of text that stands after other text: without what begins every text; see `TextCodec.encode`."""
    begins = codec.encode("")
    ids = codec.encode(text, parse_special)
    return tuple(ids[len(begins) :] if ids[: len(begins)] == begins else ids)


@lru_cache(maxsize=256)
def continuation_ids(codec: TextCodec, text: str) -> tuple[int, ...]:
    """Token ids of a text that is used again and again; see `continue_with`. Kept per tokenizer and text."""
    return continue_with(codec, text)


def yes_and_no(codec: TextCodec, where: str) -> tuple[list[int], list[int]]:
    """Return the first tokens of yes, then of no, in any spelling; those that begin both are left out.

    Args:
        codec: the tokenizer.
        where: name of the field that needs them.

    Raises:
        TurnoutError: INVALID_ARGUMENT: their first tokens are the same.
    """
    yes, no = ({continuation_ids(codec, word)[0] for word in words} for words in (YES, NO))
    if not (yes - no and no - yes):
        raise invalid(where, "needs a tokenizer in which yes and no begin differently")
    return sorted(yes - no), sorted(no - yes)


@lru_cache(maxsize=8)
def digit_values(tokens: TokenText, vocab_size: int) -> dict[int, int]:
    """The value of every token that is one decimal digit, blanks around it left out. Kept per tokenizer."""
    texts = ((token, tokens.token_bytes(token).strip()) for token in range(vocab_size))
    return {token: int(text) for token, text in texts if len(text) == 1 and text in b"0123456789"}


def text_within(tokens: TokenText, ids: Iterable[int]) -> str:
    """Text of tokens that stand inside an answer: with its leading space, and special tokens by their names."""
    return b"".join(map(tokens.token_bytes, ids)).decode(errors="replace")
