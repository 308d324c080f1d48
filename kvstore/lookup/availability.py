"""What there is of a run of chunks, by encoding: found by a probe, and less where values are refused or do not come."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

from kvstore.encodings import Encoding
from kvstore.keys import Link

if TYPE_CHECKING:
    from kvstore.lookup.reader import ReadContext


class Availability:
    """Leading chunks of a run that are to be had in each encoding. Any thread may call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[Encoding, int] = {}
        self._refused: int | None = None

    def probe(self, context: ReadContext, links: Sequence[Link], lossy: bool, deadline: float) -> None:
        """Find out how many chunks at the start of a run are there; one round trip for each encoding.

        Raises:
            StoreFault: the store does not answer.
        """
        for encoding in context.encodings.readable(lossy):
            keys = [key for link in links for key in context.encodings.keys(link, encoding)]
            began = context.clock()
            self._counts[encoding] = context.store.count_prefix(keys, deadline) // len(context.encodings.groups)
            context.controller.round_trip(context.clock() - began)

    def cut(self, encoding: Encoding, count: int) -> None:
        """No more than so many come in this encoding."""
        with self._lock:
            self._counts[encoding] = min(self._counts[encoding], count)

    def refuse(self, encoding: Encoding, index: int) -> bool:
        """A chunk is of no use in this encoding; whether it is there in another one."""
        self.cut(encoding, index)
        with self._lock:
            if not any(count > index for count in self._counts.values()):
                return False
            self._refused = index if self._refused is None else min(index, self._refused)
            return True

    def take_refused(self) -> int | None:
        """The first chunk that was refused and is there in another encoding, once; None: there is none."""
        with self._lock:
            refused, self._refused = self._refused, None
            return refused

    @property
    def is_refused(self) -> bool:
        """Whether `take_refused` has a chunk."""
        return self._refused is not None

    @property
    def most(self) -> int:
        """Chunks there are in some encoding."""
        return max(self._counts.values(), default=0)

    def encoding(self, codec: str) -> Encoding:
        """The encoding of a codec's name."""
        return next(encoding for encoding in self._counts if encoding.codec.name == codec)

    def after(self, done: int) -> dict[Encoding, int]:
        """How many follow the first `done`, in encodings in which any do."""
        return {encoding: count - done for encoding, count in list(self._counts.items()) if count > done}

    def __len__(self) -> int:
        return len(self._counts)
