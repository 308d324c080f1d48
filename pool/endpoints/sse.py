"""Server-sent events: from bytes in any pieces to the data of whole events."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

MOST_CHARS = 16 << 20  # of an event: no answer has a longer part


class TooLongEventError(ValueError):
    """An event beyond `MOST_CHARS`."""


class EventReader:
    """Parser of one stream, as the standard of HTML says: lines end in LF, CR or CRLF, those with a colon first are
    comments, fields other than `data` say nothing here, several `data` lines of an event are joined by LF.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._text = ""
        self._cr = False  # the last character was a CR: an LF now belongs to it
        self._data: list[str] = []
        self._chars = 0

    def feed(self, data: bytes) -> Iterator[str]:
        """Data of the events that end in these bytes.

        Raises:
            TooLongEventError: an event that does not end.
        """
        text = self._decoder.decode(data)
        if self._cr and text:
            text = text.removeprefix("\n")
            self._cr = False
        if not text:
            return
        self._cr = text.endswith("\r")
        lines = (self._text + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._text = lines.pop()
        for line in lines:
            if (event := self._line(line)) is not None:
                yield event
        if len(self._text) + self._chars > MOST_CHARS:
            raise TooLongEventError

    def end(self) -> Iterator[str]:
        """What the stream ended within: servers forget the empty line after the last event."""
        for line in (self._text, ""):
            if (event := self._line(line)) is not None:
                yield event
        self._text = ""

    def _line(self, line: str) -> str | None:
        if not line:
            if not self._data:
                return None
            event, self._data, self._chars = "\n".join(self._data), [], 0
            return event
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
            self._chars += len(value)
        return None
