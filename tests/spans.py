"""Reading the spans that processes wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout import tracing
from turnout.telemetry_config import TracesConfig


@dataclass(frozen=True)
class Spans:
    """All spans in a folder of files, as they are now."""

    folder: Path

    def all(self) -> list[dict[str, Any]]:
        """In the order in which they ended, by process."""
        tracing.flush()
        lines = [line for path in sorted(self.folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines]

    def trace(self, trace_id: str) -> dict[str, dict[str, Any]]:
        """The spans of one trace by their ids."""
        found = [span for span in self.all() if span["context"]["trace_id"] == f"0x{trace_id}"]
        return {span["context"]["span_id"]: span for span in found}

    def paths(self, trace_id: str) -> list[tuple[str, ...]]:
        """Names from the first span of a trace down to each of its spans; a parent elsewhere is left out."""
        spans = self.trace(trace_id)

        def path(span: dict[str, Any]) -> tuple[str, ...]:
            above = spans.get(span["parent_id"])
            return (*(path(above) if above is not None else ()), span["name"])

        return [path(span) for span in spans.values()]


@contextmanager
def traced_process(folder: Path, **options: Any) -> Iterator[Spans]:
    """This process traces, into a folder, for as long as the context lasts."""
    tracing.set_up(TracesConfig(path=str(folder), **options), "test")
    try:
        yield Spans(folder)
    finally:
        tracing.set_up(None, "test")
