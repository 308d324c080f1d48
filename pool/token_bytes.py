"""Bytes of tokens: what each one adds to a text, where its tokenizer lets every token speak for itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

REPLACEMENT = "\ufffd"
# How a tokenizer with byte fallback writes a byte that no token of its own holds.
BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LARGEST_ID = 2**32 - 1  # that the `tokenizers` library takes
# Decoders under which a token's text depends on nothing but whether it is the first.
LOCAL = frozenset({"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"})


@dataclass(frozen=True, slots=True)
class Span:
    """A token's part of a text.

    Attributes:
        text: characters that it completes; none for all but the last token of a character.
        data: bytes that it holds.
    """

    text: str
    data: bytes


class TokenBytes:
    """The bytes of each token of a fast tokenizer.

    Args:
        core: a tokenizer of the `tokenizers` library.

    Attributes:
        names: text of each special token, which adds nothing to an answer's text.
        is_local: whether a token's bytes depend on nothing but whether it is the first of its text. Where they depend
            on more (`</w>` suffixes, CTC), the bytes given here are those of the token in the middle of a text.
        spans: found parts of a text, of tokens that are whole characters and neither begin it nor follow half of one.
    """

    def __init__(self, core: Any) -> None:
        steps = list(_steps(core.decoder))
        kinds = {step["type"] for step in steps}
        self._core = core
        self._byte_level = kinds == {"ByteLevel"}
        self._byte_fallback = "ByteFallback" in kinds
        self._anchor = None if self._byte_level else _anchor(core)
        self.names: dict[int, str] = {
            token: added.content for token, added in core.get_added_tokens_decoder().items() if added.special
        }
        self.is_local = self._byte_level or (kinds <= LOCAL and _cuts_locally(steps) and self._anchor is not None)
        self._after: dict[int, bytes] = {}
        self._first: dict[int, bytes] = {}
        self.spans: dict[int, Span] = {}

    def counts(self, token_id: int) -> bool:
        """Tell whether a token is part of a text: known, and not special."""
        if not 0 <= token_id <= LARGEST_ID:
            return False
        return token_id not in self.names and self._core.id_to_token(token_id) is not None

    def after(self, token_id: int) -> bytes:
        """Bytes the token adds to a text that it does not begin; none for a special token."""
        found = self._after.get(token_id)
        if found is None:
            found = self._found(token_id, first=False)
            if self.counts(token_id):
                self._after[token_id] = found
        return found

    def first(self, token_id: int) -> bytes:
        """Bytes the token adds where no token of the text comes before it."""
        found = self._first.get(token_id)
        if found is None:
            found = self._found(token_id, first=True)
            if self.counts(token_id):
                self._first[token_id] = found
        return found

    def _found(self, token_id: int, first: bool) -> bytes:
        if not self.counts(token_id):
            return b""
        written: str = self._core.id_to_token(token_id)
        if self._byte_level:
            alphabet = byte_alphabet()
            known = all(char in alphabet for char in written)
            return bytes(alphabet[char] for char in written) if known else written.encode()
        if self._byte_fallback and (byte := BYTE_FALLBACK.fullmatch(written)):
            data = bytes.fromhex(byte[1])
            # Some decoders take a space from the start of the text, of a byte token too.
            return data if data >= b"\x80" or not first else self._text([token_id]).encode()
        if first or self._anchor is None:
            return self._text([token_id]).encode()
        before = self._text([self._anchor])
        return self._text([self._anchor, token_id]).removeprefix(before).encode()

    def for_structures(self) -> str | None:
        """The tokenizer's definition as a library that reads token bytes from it understands it.

        Returns:
            JSON of the `tokenizers` library with a decoder that gives every token the bytes it has here. None where
            there is none: tokens depend on each other, or add spaces that they do not show.
        """
        made: dict[str, Any] = json.loads(self._core.to_str())
        kinds = {step["type"]: step for step in _steps(self._core.decoder)}
        if not self.is_local or not kinds or "WordPiece" in kinds:
            return None
        if (metaspace := kinds.get("Metaspace")) is not None:
            spaces = {"type": "Replace", "pattern": {"String": metaspace["replacement"]}, "content": " "}
            made["decoder"] = {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}
        return json.dumps(made)

    def _text(self, ids: list[int]) -> str:
        text: str = self._core.decode(ids, skip_special_tokens=True)
        return text


def _steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """The decoder's steps, in order; none without a decoder, where tokens are joined by spaces."""
    open_steps = [json.loads(decoder.__getstate__())] if decoder is not None else []
    while open_steps:
        step = open_steps.pop(0)
        if step["type"] == "Sequence":
            open_steps = [*step["decoders"], *open_steps]
        else:
            yield step


def _cuts_locally(steps: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether no step looks at more than one token, or at more than the first character of a text."""
    fused = False
    for step in steps:
        fused = fused or step["type"] == "Fuse"
        pattern = step.get("pattern", {}).get("String") if step["type"] == "Replace" else None
        if step["type"] == "Replace" and (pattern is None or (fused and len(pattern) != 1)):
            return False
        if step["type"] == "Strip" and fused and (step["stop"] or step["start"] > 1):
            return False
        if fused and step["type"] in ("ByteFallback", "Metaspace", "WordPiece"):
            return False
    return True


def _anchor(core: Any) -> int | None:
    """A token of plain letters, behind which others stand as in the middle of a text."""
    for written, token_id in sorted(core.get_vocab().items(), key=lambda item: item[1]):
        text = core.decode([token_id], skip_special_tokens=True)
        if written.isascii() and written.isalpha() and text == written:
            return int(token_id)
    return None


@cache
def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token means: printable Latin-1 itself, the others from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
