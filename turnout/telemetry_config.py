"""Observability settings: traces, request log, latency goals, audits of answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnout.errors import invalid


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TracesConfig(_Section):
    """OpenTelemetry traces, from the ingress to each forward pass."""

    share: Annotated[float, Field(ge=0, le=1, description="share of the requests that bring no traceparent")] = 0.01
    follow: Annotated[bool, Field(description="a request's own traceparent says whether it is traced")] = True
    most_followed: Annotated[float, Field(gt=0, description="traces followed at most, per second and process")] = 10.0
    exporter: Annotated[
        Literal["file", "console", "otlp"],
        Field(description="file: JSON lines; console: the process's output; otlp: OTLP over HTTP (extra `otlp`)"),
    ] = "file"
    path: Annotated[
        str | None, Field(min_length=1, description="folder for exporter file; each process writes a file of its own")
    ] = None
    endpoint: Annotated[
        str | None, Field(pattern=r"^https?://", description="of the collector, for exporter otlp; absent: here")
    ] = None
    max_bytes: Annotated[int, Field(ge=4096, description="size at which a new file is begun, bytes")] = 64 << 20
    backups: Annotated[int, Field(ge=1, le=1000, description="full files kept: PATH.1 is the newest")] = 5

    @model_validator(mode="after")
    def _check(self) -> TracesConfig:
        if (self.path is not None) != (self.exporter == "file"):
            raise invalid("telemetry.traces.path", "goes with exporter file, and with no other")
        if self.endpoint is not None and self.exporter != "otlp":
            raise invalid("telemetry.traces.endpoint", "needs exporter: otlp")
        return self


class LogsConfig(_Section):
    """One JSON line for each request that ended."""

    path: Annotated[
        str | None, Field(min_length=1, description="the file, the process id in its name; absent: Ray Serve's log")
    ] = None
    max_bytes: Annotated[int, Field(ge=4096, description="size at which a new file is begun, bytes")] = 64 << 20
    backups: Annotated[int, Field(ge=1, le=1000, description="full files kept: PATH.1 is the newest")] = 5
    texts: Annotated[bool, Field(description="write prompts too")] = False


class SloConfig(_Section):
    """What a request must keep to count as good."""

    ttft_s: Annotated[float, Field(gt=0, description="longest time to the first token, seconds")] = 2.0
    tpot_s: Annotated[float, Field(gt=0, description="longest mean time of the tokens after it, seconds")] = 0.2


class AuditConfig(_Section):
    """Audits: a share of the lossless answers is computed again by the large model alone, in the background."""

    share: Annotated[float, Field(ge=0, le=1, description="share of the answers that must equal plain decoding")]
    beside: Annotated[int, Field(ge=0, description="audits run while at most this many requests are in progress")] = 0
    max_running: Annotated[int, Field(ge=1, description="audits begun and not finished")] = 1
    max_waiting: Annotated[int, Field(ge=0, description="audits that wait; more are dropped")] = 16
    floor_s: Annotated[
        float,
        Field(
            gt=0,
            description="one that is offered when others have waited for so long in vain runs at once, in line with"
            " the requests, seconds",
        ),
    ] = 60.0
    timeout_s: Annotated[float, Field(gt=0, description="time from its begin at which one is dropped, seconds")] = 300.0
    tie_nats: Annotated[
        float | None,
        Field(
            gt=0,
            description="tokens whose scores are closer may change places, nats; absent: 1e-4 in float32,"
            " 0.1 in bfloat16",
        ),
    ] = None


class TelemetryConfig(_Section):
    """Observability of the server; metrics are always on."""

    traces: Annotated[TracesConfig | None, Field(description="OpenTelemetry traces; absent: none")] = None
    logs: Annotated[LogsConfig | None, Field(description="a line for each request; absent: none")] = None
    slo: Annotated[SloConfig, Field(description="goals of the metric of good requests")] = SloConfig()
    audit: Annotated[AuditConfig | None, Field(description="answers computed again; absent: none")] = None
