"""Where the spans of a process go: a file of its own, its output, or a collector."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from logging.handlers import RotatingFileHandler
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from turnout.errors import invalid
from turnout.file_names import one_part
from turnout.telemetry_config import TracesConfig

FLUSH_MS = 1000
OTLP = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

log = logging.getLogger(__name__)


class FileExporter(SpanExporter):
    """Spans as JSON lines, in OpenTelemetry's own form; the file is renamed and begun anew when it is full.

    Args:
        config: the folder, and the size of a file.
        service: the file's name, escaped by `one_part`, with the process id.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the file cannot be opened.
    """

    def __init__(self, config: TracesConfig, service: str) -> None:
        assert config.path is not None
        folder = Path(config.path).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{one_part(service)}-{os.getpid()}.jsonl"
            self._file = RotatingFileHandler(path, "a", config.max_bytes, config.backups, "utf-8", delay=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise invalid("telemetry.traces.path", f"cannot write {config.path}: {error.strerror}") from None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append; a full disk costs spans, not requests."""
        for span in spans:
            self._file.handle(logging.LogRecord("span", logging.INFO, "", 0, span.to_json(indent=None), None, None))
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Everything is written already."""
        return True


def provider_of(config: TracesConfig, service: str) -> TracerProvider:
    """Makes tracers whose spans are all recorded: whether a request is traced was decided before.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the folder cannot be written, or the exporter is not installed.
    """
    resource = Resource.create({"service.name": f"turnout-{service}", "process.pid": os.getpid()})
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=True)
    provider.add_span_processor(BatchSpanProcessor(_exporter(config, service), schedule_delay_millis=FLUSH_MS))
    return provider


def _exporter(config: TracesConfig, service: str) -> SpanExporter:
    if config.exporter == "file":
        return FileExporter(config, service)
    if config.exporter == "console":
        return ConsoleSpanExporter(out=sys.stdout, formatter=lambda span: span.to_json(indent=None) + "\n")
    try:
        exporter = import_module(OTLP).OTLPSpanExporter
    except ImportError:
        message = "otlp is not installed: pip install turnout[otlp]"
        raise invalid("telemetry.traces.exporter", message) from None
    made: SpanExporter = exporter(endpoint=config.endpoint) if config.endpoint else exporter()
    return made
