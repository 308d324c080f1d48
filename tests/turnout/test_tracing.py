"""Traces: who is traced, what is handed on, and that nothing is made for whoever is not."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.spans import Spans, traced_process
from turnout import tracing
from turnout.errors import TurnoutError
from turnout.telemetry_config import TelemetryConfig, TracesConfig

TRACE, SPAN = "a" * 31 + "1", "b" * 15 + "2"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


def test_without_configuration_nothing_is_traced_and_no_library_is_loaded() -> None:
    assert not tracing.enabled()
    assert tracing.root("r", SAMPLED) is None
    assert tracing.begin("x", SAMPLED) is None
    with tracing.within("x", SAMPLED) as span:
        assert span is None
        assert tracing.header() == ""
    tracing.end(None)


def test_a_callers_trace_is_followed(tmp_path: Path) -> None:
    with traced_process(tmp_path, share=0.0) as spans:
        root = tracing.root("stream", SAMPLED, model="demo")
        below = tracing.begin("pool", tracing.header_of(root), tokens=3)
        tracing.end(below, "ValueError")
        tracing.end(root, outcome="OK")
        found = {span["name"]: span for span in spans.trace(TRACE).values()}
    assert found["stream"]["parent_id"] == f"0x{SPAN}"
    assert found["stream"]["attributes"] == {"model": "demo", "outcome": "OK"}
    assert found["pool"]["parent_id"] == found["stream"]["context"]["span_id"]
    assert found["pool"]["status"] == {"status_code": "ERROR", "description": "ValueError"}
    assert found["pool"]["resource"]["attributes"]["service.name"] == "turnout-test"


@pytest.mark.parametrize("given", [UNSAMPLED, "", "nonsense", f"00-{'0' * 32}-{SPAN}-01", f"01-{TRACE}-{SPAN}-01"])
def test_who_does_not_ask_for_a_trace_gets_one_by_lot(tmp_path: Path, given: str) -> None:
    with traced_process(tmp_path, share=0.0):
        assert tracing.root("r", given) is None
    with traced_process(tmp_path, share=1.0) as spans:
        span = tracing.root("r", given)
        tracing.end(span)
        if given == UNSAMPLED:
            assert span is None
        else:
            assert [each["parent_id"] for each in spans.all()] == [None]


def test_callers_cannot_have_everything_traced(tmp_path: Path) -> None:
    with traced_process(tmp_path, share=0.0, most_followed=2.0) as spans:
        for _ in range(50):
            tracing.end(tracing.root("r", SAMPLED))
        assert 2 <= len(spans.all()) <= 4  # two at once, then two a second


def test_a_process_that_is_set_up_again_keeps_no_thread_of_before(tmp_path: Path) -> None:
    def exporting() -> int:
        return sum("SpanRecordProcessor" in thread.name for thread in threading.enumerate())

    before = exporting()
    for turn in range(3):
        tracing.set_up(TracesConfig(path=str(tmp_path / str(turn))), "test")
        assert exporting() == before + 1
    tracing.set_up(None, "test")
    assert exporting() == before


def test_a_callers_word_can_be_left_unheard(tmp_path: Path) -> None:
    with traced_process(tmp_path, share=0.0, follow=False):
        assert tracing.root("r", SAMPLED) is None


def test_the_lot_falls_on_the_share_that_is_configured(tmp_path: Path) -> None:
    with traced_process(tmp_path, share=0.2) as spans:
        for _ in range(2000):
            tracing.end(tracing.root("r", ""))
        count = len(spans.all())
    assert 300 < count < 500


async def test_tasks_have_the_span_they_were_made_in_and_no_other(tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    async def look(name: str) -> None:
        await asyncio.sleep(0)
        seen[name] = tracing.header()

    async def work(name: str) -> None:
        with tracing.within(name, SAMPLED) as span:
            await asyncio.gather(look(f"{name}.child"), look(f"{name}.other"))
            assert tracing.header() == tracing.header_of(span)

    with traced_process(tmp_path):
        await asyncio.gather(work("a"), work("b"), look("outside"))
    assert seen["outside"] == ""
    assert seen["a.child"] == seen["a.other"] != seen["b.child"] == seen["b.other"]


def test_a_batch_stands_in_one_trace_and_is_linked_with_the_others(tmp_path: Path) -> None:
    with traced_process(tmp_path, share=1.0) as spans:
        requests = [tracing.root(f"r{number}", "") for number in range(3)]
        works = [span for span in requests if span is not None]
        tracing.end(tracing.batch("large forward", works, {"tokens": 5}))
        for span in works:
            tracing.end(span)
        found = {span["name"]: span for span in spans.all()}
    forward, first, *others = found["large forward"], found["r0"], found["r1"], found["r2"]
    assert forward["parent_id"] == first["context"]["span_id"]
    assert forward["attributes"] == {"tokens": 5}
    assert [link["context"]["span_id"] for link in forward["links"]] == [each["context"]["span_id"] for each in others]
    for other in others:
        assert [link["context"]["span_id"] for link in other["links"]] == [forward["context"]["span_id"]]
    assert first["links"] == []


def test_files_are_begun_anew_when_they_are_full(tmp_path: Path) -> None:
    with traced_process(tmp_path, share=1.0, max_bytes=4096, backups=1) as spans:
        for number in range(40):
            tracing.end(tracing.root(f"r{number}", ""))
        assert 0 < len(spans.all()) < 40
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 4096
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TurnoutError, match=r"^telemetry\.traces\.path: cannot write "):
        tracing.set_up(TracesConfig(path=str(tmp_path / "file" / "below")), "test")
    assert not tracing.enabled()


def test_an_exporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TurnoutError, match=r"^telemetry\.traces\.exporter: otlp is not installed: pip install"):
        tracing.set_up(TracesConfig(exporter="otlp"), "test")


@pytest.mark.parametrize(
    ("traces", "field"),
    [
        ({"exporter": "file"}, "telemetry.traces.path"),
        ({"exporter": "console", "path": "x"}, "telemetry.traces.path"),
        ({"exporter": "console", "endpoint": "http://x"}, "telemetry.traces.endpoint"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(traces: dict[str, Any], field: str) -> None:
    with pytest.raises(TurnoutError) as caught:
        TelemetryConfig.model_validate({"traces": traces})
    assert caught.value.field == field


def test_spans_of_a_folder_know_their_way(tmp_path: Path) -> None:
    with traced_process(tmp_path) as spans:
        root = tracing.root("a", SAMPLED)
        tracing.end(tracing.begin("b", tracing.header_of(root)))
        tracing.end(root)
        assert sorted(Spans(tmp_path).paths(TRACE)) == [("a",), ("a", "b")]
        assert len(spans.all()) == 2
