"""Reading usage records, and adding them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from deployments.access.usage_record import UsageRecord
from turnout.errors import invalid

Group = Literal["tenant", "key", "model", "method", "day", "batch", "outcome"]

GROUPS: dict[Group, Callable[[UsageRecord], str]] = {
    "tenant": lambda record: record.tenant,
    "key": lambda record: f"{record.tenant}/{record.key_id}",
    "model": lambda record: record.model,
    "method": lambda record: record.method or "",
    "day": lambda record: f"{record.time.astimezone(UTC):%Y-%m-%d}",
    "batch": lambda record: record.batch_id,
    "outcome": lambda record: record.outcome,
}


@dataclass(slots=True)
class Totals:
    """Sums over records. `paper` is in tokens of the large model: relative cost times tokens written."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    tokens_by_model: dict[str, int] = field(default_factory=dict)
    paper: float = 0.0
    flops: float = 0.0
    wall_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Read and written."""
        return self.prompt_tokens + self.completion_tokens

    def add(self, record: UsageRecord) -> None:
        """Count one more."""
        self.requests += 1
        self.failed += record.outcome != "OK"
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.completion_tokens += record.completion_tokens
        for name, count in record.tokens_by_model.items():
            self.tokens_by_model[name] = self.tokens_by_model.get(name, 0) + count
        self.paper += (record.cost.paper or 0.0) * record.completion_tokens
        self.flops += record.cost.flops
        self.wall_s += record.cost.wall_s


class RecordFiles:
    """The records in a folder.

    Args:
        folder: where servers write them.

    Attributes:
        num_damaged: lines that were no records in what has been read: the last ones of processes that were killed.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it is no folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise invalid("access.usage.folder", f"{folder} is no folder")
        self._folder = folder
        self.num_damaged = 0

    def between(self, since: datetime | None = None, until: datetime | None = None) -> Iterator[UsageRecord]:
        """Those whose request ended at `since` or later, and before `until`; by file, not by time."""
        for path in sorted(self._folder.glob("usage-*.jsonl")):
            # A file that was last written before has nothing later in it.
            if since is not None and path.stat().st_mtime < since.timestamp() - 1:
                continue
            for record in self._read(path):
                if (since is None or record.time >= since) and (until is None or record.time < until):
                    yield record

    def _read(self, path: Path) -> Iterator[UsageRecord]:
        with path.open("rb") as file:
            for line in file:
                try:
                    yield UsageRecord.model_validate_json(line)
                except ValidationError:
                    self.num_damaged += 1


def total(records: Iterable[UsageRecord], group: Group = "tenant") -> dict[str, Totals]:
    """Sums of what `once` leaves, by what records have in common, in the order of its name."""
    found: dict[str, Totals] = {}
    key = GROUPS[group]
    for record in once(records):
        found.setdefault(key(record), Totals()).add(record)
    return dict(sorted(found.items()))


def once(records: Iterable[UsageRecord]) -> Iterator[UsageRecord]:
    """The records that count: all but those of a batch's line that has a later one.

    A line whose process ended between its record and the batch's own note of it is answered again, and so is one that
    was cut short: its client asked once.
    """
    lines: dict[str, UsageRecord] = {}
    for record in records:
        if not record.batch_id:
            yield record
            continue
        before = lines.setdefault(record.request_id, record)
        if record.time > before.time:
            lines[record.request_id] = record
    yield from lines.values()
