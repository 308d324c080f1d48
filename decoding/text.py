"""What methods need of text beyond single tokens: words put into the models' context, and answers read back."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol, runtime_checkable

from decoding.model import ModelPool, TokenText
from turnout.errors import invalid


@runtime_checkable
class TextCodec(TokenText, Protocol):
    """A tokenizer that also goes from text to tokens."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, after whatever the tokenizer puts before every text."""
        ...


def codec_of(models: ModelPool, field: str) -> TextCodec:
    """The pool's tokenizer.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it cannot turn text into tokens.
    """
    if not isinstance(models.tokenizer, TextCodec):
        raise invalid(field, "needs a tokenizer that turns text into tokens; this pool's knows single tokens only")
    return models.tokenizer


@lru_cache(maxsize=256)
def continuation_ids(codec: TextCodec, text: str) -> tuple[int, ...]:
    """Token ids of text that stands after other text: without what begins every text. Kept per tokenizer and text."""
    begins = codec.encode("")
    ids = codec.encode(text)
    return tuple(ids[len(begins) :] if ids[: len(begins)] == begins else ids)


@lru_cache(maxsize=8)
def digit_values(tokens: TokenText, vocab_size: int) -> dict[int, int]:
    """The value of every token that is one decimal digit, blanks around it left out. Kept per tokenizer."""
    texts = ((token, tokens.text(token).strip()) for token in range(vocab_size))
    return {token: int(text) for token, text in texts if len(text) == 1 and text in "0123456789"}


def text_of(tokens: TokenText, ids: tuple[int, ...] | list[int]) -> str:
    """The tokens' own texts, one after the other."""
    return "".join(tokens.text(token) for token in ids)
