"""Thousands of messages to every RPC: each is answered or refused by name, and none leaves anything behind."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from hypothesis import HealthCheck, given, settings

from tests.clients.fuzz import wires
from tests.clients.site import Site
from turnout.proto import generation_pb2 as pb

pytestmark = pytest.mark.clients

# How many of each; all of them together are more than 5,000.
RPCS: dict[str, tuple[Any, int, bool]] = {
    "/turnout.v1.Generation/Generate": (pb.GenerateRequest, 2200, False),
    "/turnout.v1.Generation/StreamGenerate": (pb.GenerateRequest, 1600, True),
    "/turnout.v1.Generation/Score": (pb.ScoreRequest, 1000, False),
    "/turnout.v1.Generation/Embed": (pb.EmbedRequest, 300, False),
    "/turnout.v1.Generation/RunTask": (pb.RunTaskRequest, 300, False),
    "/turnout.v1.Generation/ListModels": (pb.ListModelsRequest, 100, False),
    "/turnout.v1.Generation/ListMethods": (pb.ListMethodsRequest, 100, False),
    "/grpc.health.v1.Health/Check": (health_pb2.HealthCheckRequest, 100, False),
}
CODE = grpc.StatusCode
CLOCK_S = 0.05
ALLOWED = {CODE.INVALID_ARGUMENT, CODE.OUT_OF_RANGE, CODE.NOT_FOUND, CODE.RESOURCE_EXHAUSTED, CODE.DEADLINE_EXCEEDED}


@pytest.mark.parametrize("path", RPCS)
def test_every_message_is_answered_or_refused_by_name(site: Site, path: str) -> None:
    kind, number, streams = RPCS[path]
    codes: Counter[str] = Counter()
    with grpc.insecure_channel(site.grpc_address) as channel:
        call = (channel.unary_stream if streams else channel.unary_unary)(path)

        @settings(max_examples=number, derandomize=False, suppress_health_check=list(HealthCheck))
        @given(wires(kind))
        def ask(data: bytes) -> None:
            started = time.monotonic()
            code, details = _asked(call, data, streams)
            codes[code.name] += 1
            assert code is CODE.OK or code in ALLOWED, (code, details)
            if code is CODE.DEADLINE_EXCEEDED:
                # Only one that the message itself sets may pass, and not before its time.
                given_s = getattr(kind.FromString(data), "deadline_s", 0.0)
                assert 0 < given_s <= time.monotonic() - started + CLOCK_S, details
            assert code is CODE.OK or details, code
            assert "Traceback" not in details

        ask()
    site.assert_idle()
    figures = site.report.setdefault("figures", {})
    figures[f"gRPC, random messages to {path.rpartition('/')[2]}"] = ", ".join(
        f"{count} {name}" for name, count in codes.most_common()
    )


def _asked(call: Any, data: bytes, streams: bool) -> tuple[grpc.StatusCode, str]:
    try:
        if streams:
            for _ in call(data, timeout=60):
                pass
        else:
            call(data, timeout=60)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return CODE.OK, ""


def test_they_are_at_least_five_thousand() -> None:
    assert sum(number for _, number, _ in RPCS.values()) >= 5000
