"""Vocabulary of a fast tokenizer, for drafting between models with different ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tokenizers import Tokenizer

from pool.token_bytes import BYTE_FALLBACK, TokenBytes

# What may stand before a text that is encoded as the middle of one: the first that leaves its own tokens alone.
ANCHORS = ("a", "\n", ".", "0")


class TextVocabulary:
    """Vocabulary of a tokenizer. Implements `decoding.vocabulary.Vocabulary`.

    Args:
        definition: JSON of the `tokenizers` library.
        begins: ids before every text.
        end: the usual id that ends a text; None: none.
        ends: all of them.
        special: names of the tokens that are no text.
    """

    is_constant: ClassVar[bool] = True

    def __init__(
        self, definition: str, begins: tuple[int, ...], end: int | None, ends: frozenset[int], special: dict[int, str]
    ) -> None:
        self.begins, self.end, self.ends = begins, end, ends
        self.special: Mapping[int, str] = special
        self._definition = definition
        self._core: Any = Tokenizer.from_str(definition)
        self._core.encode_special_tokens = True  # one that a text spells out is text
        self._core.no_truncation()
        self._core.no_padding()
        self._bytes = TokenBytes(self._core)
        self._size: int = self._core.get_vocab_size(with_added_tokens=True)
        # Some tokenizers put a space before whatever they encode.
        self._anchors = {} if self._plain("a") == [self._core.token_to_id("a")] else self._found_anchors()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._definition, self.begins, self.end, self.ends, dict(self.special))

    def __len__(self) -> int:
        return self._size

    def bytes_of(self, token_id: int, first: bool = False) -> bytes:
        """See `decoding.vocabulary.Vocabulary`."""
        if token_id in self.special:
            return b""
        return self._bytes.first(token_id) if first else self._bytes.after(token_id)

    def is_byte(self, token_id: int) -> bool:
        """See `decoding.vocabulary.Vocabulary`."""
        return BYTE_FALLBACK.fullmatch(self._core.id_to_token(token_id) or "") is not None

    def encode(self, text: str, first: bool = False) -> list[int]:
        """See `decoding.vocabulary.Vocabulary`."""
        if not first:
            for anchor, tokens in self._anchors.items():
                found = self._plain(anchor + text)
                if found[: len(tokens)] == tokens:
                    return found[len(tokens) :]
        return self._plain(text)

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return ids

    def _found_anchors(self) -> dict[str, list[int]]:
        return {anchor: tokens for anchor in ANCHORS if (tokens := self._plain(anchor))}
