"""A surface: how the bodies of one HTTP endpoint are read, and how its answers are written."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.access.callers import Caller
from deployments.backend import Batch
from deployments.schemas import Job
from turnout.calls import Chunk, Usage


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer says of itself.

    Attributes:
        id: of the request, of its answer and in every log.
        created: seconds since 1970.
        model: as it is called here.
    """

    id: str
    created: int
    model: str


class Surface(Protocol):
    """One endpoint, for one request.

    Attributes:
        prefix: of its answers' ids.
    """

    prefix: str

    async def job(self, data: bytes, caller: Caller) -> Job:
        """Read a body.

        Raises:
            TurnoutError: a field is wrong; names it as the caller does.
        """
        ...

    async def whole(self, head: Head, job: Job, chunks: Sequence[Chunk], usage: Usage) -> Mapping[str, Any]:
        """Write a whole answer: a chunk for each choice, in order."""
        ...

    def events(
        self, head: Head, job: Job, first: Batch, batches: AsyncGenerator[Batch, None]
    ) -> AsyncGenerator[str, None]:
        """Write a streamed answer as server-sent events, errors included.

        Args:
            head: of the answer.
            job: that is answered.
            first: the first batch, which has been waited for.
            batches: those after it; the last one ends in Usage.
        """
        ...
