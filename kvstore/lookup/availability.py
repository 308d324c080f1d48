"""What there is of a run of chunks, by form: found by a probe, and less where values are refused or do not come."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

from kvstore.encodings import Form
from kvstore.keys import Link

if TYPE_CHECKING:
    from kvstore.lookup.reader import Means


class Supply:
    """Leading chunks of a run that are to be had in each form. Any thread may call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[Form, int] = {}
        self._refused: int | None = None

    def probe(self, means: Means, links: Sequence[Link], lossy: bool, deadline: float) -> None:
        """Find out how many chunks at the start of a run are there; one round trip for each form.

        Raises:
            StoreFault: the store does not answer.
        """
        for form in means.forms.readable(lossy):
            keys = [key for link in links for key in means.forms.keys(link, form)]
            began = means.clock()
            self._counts[form] = means.store.count_prefix(keys, deadline) // len(means.forms.groups)
            means.controller.round_trip(means.clock() - began)

    def cut(self, form: Form, count: int) -> None:
        """No more than so many come in this form."""
        with self._lock:
            self._counts[form] = min(self._counts[form], count)

    def refuse(self, form: Form, index: int) -> bool:
        """A chunk is of no use in this form; whether it is there in another one."""
        self.cut(form, index)
        with self._lock:
            if not any(count > index for count in self._counts.values()):
                return False
            self._refused = index if self._refused is None else min(index, self._refused)
            return True

    def take_refused(self) -> int | None:
        """The first chunk that was refused and is there in another form, once; None: there is none."""
        with self._lock:
            refused, self._refused = self._refused, None
            return refused

    @property
    def is_refused(self) -> bool:
        """Whether `take_refused` has a chunk."""
        return self._refused is not None

    @property
    def most(self) -> int:
        """Chunks there are in some form."""
        return max(self._counts.values(), default=0)

    def form(self, codec: str) -> Form:
        """The form of a codec's name."""
        return next(form for form in self._counts if form.codec.name == codec)

    def after(self, done: int) -> dict[Form, int]:
        """How many follow the first `done`, in forms in which any do."""
        return {form: count - done for form, count in list(self._counts.items()) if count > done}

    def __len__(self) -> int:
        return len(self._counts)
