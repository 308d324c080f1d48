"""Tokens to text, as they come: the only place where an answer's tokens become characters.

Two operations: `feed` gives the text that each next token completes, and `span` gives it together with the bytes that
the token itself holds. Texts of all tokens joined are the text of the whole; bytes joined are what the tokens hold,
which is that text's UTF-8 wherever it is valid. In bytes that are no UTF-8, complete characters are kept and given at
once, and only the rest becomes U+FFFD.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

from pool.token_bytes import REPLACEMENT, Span, TokenBytes
from turnout.utf8 import split_complete

# Of tokenizers whose tokens depend on others: tokens decoded before a new one, so that they see enough of what is
# before them; most of them; and tokens after which text that still ends in a broken character is taken for broken.
LOOK_BACK = 6
LONGEST_WINDOW = 64
LONGEST_CHARACTER = 8
# A character has at most four bytes.
CHARACTER_BYTES = 4


class Detokenizer(Protocol):
    """Turns the tokens of one answer into text; never gives half a character."""

    def feed(self, token_id: int) -> str:
        """Take the next token; the text that it completes, maybe none."""
        ...

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; the text that they complete, as `feed` gives it one by one."""
        ...

    def span(self, token_id: int) -> Span:
        """Take the next token; its part of the text. A special token has none."""
        ...

    def peek(self, token_id: int) -> Span:
        """The part that a token would have if it came next; a special token is given by its name."""
        ...

    def flush(self) -> str:
        """What is left at the end of the answer: U+FFFD where a character is not complete."""
        ...

    def clone(self) -> Detokenizer:
        """An independent copy in the same state."""
        ...


class ByteDetokenizer:
    """A detokenizer for tokenizers whose tokens each stand for bytes of their own.

    Args:
        table: bytes of tokens.
        before: tokens in front of the answer, which space its first word and may begin its first character.
        shown: special tokens that show by their names.
    """

    __slots__ = ("_begun", "_fed", "_pending", "_shown", "_table")

    def __init__(self, table: TokenBytes, before: Sequence[int] = (), shown: Container[int] = ()) -> None:
        self._table = table
        self._shown = shown
        self._fed = False
        last: list[int] = []
        for token_id in reversed(before):
            if table.counts(token_id):
                last.append(token_id)
            if len(last) == CHARACTER_BYTES:
                break
        self._begun = bool(last)
        self._pending = split_complete(b"".join(map(table.after, reversed(last))))[1]

    def feed(self, token_id: int) -> str:
        """See `Detokenizer.feed`."""
        return self._take(token_id, self._next(token_id))

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.feed_all`."""
        if self._shown or not self._begun:
            return "".join(map(self.feed, token_ids))
        data = b"".join(map(self._table.after, token_ids))
        self._fed = self._fed or bool(data)
        text, self._pending = split_complete(self._pending + data)
        return text

    def span(self, token_id: int) -> Span:
        """See `Detokenizer.span`."""
        usual = self._begun and not self._pending and not self._shown
        if usual and (found := self._table.spans.get(token_id)) is not None:
            self._fed = True
            return found
        data = self._next(token_id)
        span = Span(self._take(token_id, data), data)
        if usual and data and not self._pending:
            self._table.spans[token_id] = span
        return span

    def _take(self, token_id: int, data: bytes) -> str:
        if not self._begun:
            self._begun = self._table.counts(token_id)
        if data:
            self._fed = True
        text, self._pending = split_complete(self._pending + data)
        return text

    def peek(self, token_id: int) -> Span:
        """See `Detokenizer.peek`."""
        if (name := self._table.names.get(token_id)) is not None:
            return Span(name, name.encode())
        data = self._next(token_id)
        return Span(split_complete(self._pending + data)[0], data)

    def _next(self, token_id: int) -> bytes:
        if token_id in self._shown and (name := self._table.names.get(token_id)) is not None:
            return name.encode()
        return self._table.after(token_id) if self._begun else self._table.first(token_id)

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        left, self._pending = self._pending if self._fed else b"", b""
        return left.decode(errors="replace")

    def clone(self) -> ByteDetokenizer:
        """See `Detokenizer.clone`."""
        twin = ByteDetokenizer(self._table, shown=self._shown)
        twin._begun, twin._fed, twin._pending = self._begun, self._fed, self._pending
        return twin


class WindowDetokenizer:
    """A detokenizer for every other tokenizer: decodes the last tokens again with each new one.

    Args:
        decode: text of token ids, special tokens left out.
        data_of: bytes of a token of which no text tells; None: those of its text.
        names: text of each special token.
        before: tokens in front of the answer.
        named: special tokens that show by their names.
    """

    __slots__ = ("_data_of", "_decode", "_ids", "_named", "_names", "_pending", "_shown")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        data_of: Callable[[int], bytes | None],
        names: dict[int, str],
        before: Sequence[int] = (),
        named: Container[int] = (),
    ) -> None:
        self._named = named
        self._decode = decode
        self._data_of = data_of
        self._names = names
        self._ids = list(before[-LOOK_BACK:])
        self._shown = len(decode(self._ids))  # characters of the window that were given before
        self._pending = 0

    def feed(self, token_id: int) -> str:
        """See `Detokenizer.feed`."""
        if token_id in self._names:
            return self._names[token_id] if token_id in self._named else ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT):
            self._pending += 1
            if self._pending < LONGEST_CHARACTER:
                return ""
            # Bytes that are no text, or text that holds U+FFFD itself: only the last may still become something else.
            text = text[:-1]
        else:
            self._pending = 0
        added = text[self._shown :]
        self._shown = max(self._shown, len(text))
        self._shorten()
        return added

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.feed_all`."""
        return "".join(map(self.feed, token_ids))

    def _shorten(self) -> None:
        """Drop tokens from the front of the window, but for those that are part of a character."""
        if len(self._ids) <= LOOK_BACK:
            return
        kept = self._ids[-LOOK_BACK:]
        text = self._decode(kept)
        if REPLACEMENT in text and len(self._ids) < LONGEST_WINDOW:
            return
        self._ids = kept
        self._shown = len(text) - (self._pending > 0 and text.endswith(REPLACEMENT))

    def span(self, token_id: int) -> Span:
        """See `Detokenizer.span`."""
        text = self.feed(token_id)
        data = None if token_id in self._names else self._data_of(token_id)
        return Span(text, text.encode() if data is None else data)

    def peek(self, token_id: int) -> Span:
        """See `Detokenizer.peek`."""
        if (name := self._names.get(token_id)) is not None:
            return Span(name, name.encode())
        return self.clone().span(token_id)

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        text = self._decode(self._ids)
        added = text[self._shown :]
        self._shown = len(text)
        return added

    def clone(self) -> WindowDetokenizer:
        """See `Detokenizer.clone`."""
        twin = WindowDetokenizer(self._decode, self._data_of, self._names, named=self._named)
        twin._ids, twin._shown, twin._pending = list(self._ids), self._shown, self._pending
        return twin


def spans_of(detokenizer: Detokenizer, ids: Sequence[int]) -> list[Span]:
    """Parts of a whole text, one for each token; what is left over at its end belongs to the last one."""
    spans = [detokenizer.span(token_id) for token_id in ids]
    if spans and (rest := detokenizer.flush()):
        spans[-1] = Span(spans[-1].text + rest, spans[-1].data)
    return spans
