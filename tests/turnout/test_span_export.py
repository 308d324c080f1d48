"""Spans that go to a collector or to the process's output, as they arrive there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from turnout import tracing
from turnout.telemetry_config import TracesConfig


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A server that takes what an OTLP exporter sends."""
    got: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_gets_every_span() -> None:
    with collector() as (endpoint, got):
        tracing.set_up(TracesConfig(share=1.0, exporter="otlp", endpoint=endpoint), "test")
        try:
            root = tracing.root("stream", "", model="demo")
            tracing.end(tracing.begin("pool", tracing.header_of(root)))
            tracing.end(root)
            tracing.flush()
        finally:
            tracing.set_up(None, "test")
    scopes = [scope for each in got for resource in each.resource_spans for scope in resource.scope_spans]
    spans = [span for scope in scopes for span in scope.spans]
    assert [span.name for span in spans] == ["pool", "stream"]
    assert spans[0].parent_span_id == spans[1].span_id


def test_the_console_shows_a_line_for_each_span(capsys: pytest.CaptureFixture[str]) -> None:
    tracing.set_up(TracesConfig(share=1.0, exporter="console"), "test")
    try:
        tracing.end(tracing.root("stream", ""))
        tracing.flush()
    finally:
        tracing.set_up(None, "test")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith('{"name": "stream", ')
