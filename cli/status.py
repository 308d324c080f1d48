"""`turnout status`: whether a running server answers, what it serves and what it has done."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import typer

from cli.asking import connect
from cli.output import print_json, print_table
from turnout.errors import Code, TurnoutError

TIMEOUT_S = 10.0
WELL = ("ok", "degraded")  # degraded: without the prefix store, everything is computed


def status(
    address: Annotated[str, typer.Option(help="gRPC address of the server.")] = "localhost:9000",
    http: Annotated[str, typer.Option(help="HTTP address of the same server.")] = "http://localhost:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, all metrics included.")] = False,
) -> None:
    """Ask a running server whether it is well.

    Shows its endpoints, pools and counters. Exit code 0 when both endpoints answer and every pool is healthy,
    1 when not.
    """
    started = time.perf_counter()
    with connect(address) as client:
        models = client.models()
    grpc_ms = 1000 * (time.perf_counter() - started)
    health = read_health(http)
    metrics = read_metrics(_get(http, "/metrics")[1])
    healthy = health in WELL
    if as_json:
        print_json({"healthy": healthy, "grpc_ms": grpc_ms, "health": health, "models": models, "metrics": metrics})
    else:
        typer.echo(f"gRPC {address}: answers in {grpc_ms:.0f} ms")
        typer.echo(f"HTTP {http}: {health}")
        pools = [model for model in models if model.roles]
        print_table(
            ["pool", "members", "default method"],
            [[p.name, ", ".join(f"{role}: {m}" for role, m in p.roles.items()), p.default_method] for p in pools],
        )
        if metrics:
            print_table(["counter", ">value"], [[name, f"{value:g}"] for name, value in metrics.items()])
        for line in (*drifted(metrics), *degraded(metrics)):
            typer.echo(line)
    if not healthy:
        raise typer.Exit(1)


def read_health(http: str) -> str:
    """What `/healthz` says: "ok", or why not."""
    code, body = _get(http, "/healthz")
    try:
        document: Any = json.loads(body)
        return str(document["status"])
    except (ValueError, KeyError, TypeError):
        return f"answered {code} without a status"


def drifted(metrics: dict[str, float]) -> list[str]:
    """A line for every calibration whose entropies have left the range it was made for."""
    found = []
    for name, index in metrics.items():
        base, brace, labels = name.partition("{")
        limit = metrics.get(f"{base}_limit{brace}{labels}", index)
        if base == "turnout_entropy_drift" and index > limit:
            found.append(f"drift: {labels.rstrip('}')}: stability index {index:.2f} > {limit:.2f}; calibrate again")
    return found


def degraded(metrics: dict[str, float]) -> list[str]:
    """A line for every pool whose replicas cannot reach their prefix store."""
    return [
        f"degraded: {name.partition('{')[2].rstrip('}')}: {replicas:g} replicas cannot reach all of the prefix store;"
        " what it holds is computed"
        for name, replicas in metrics.items()
        if name.startswith("turnout_cache_degraded{") and replicas
    ]


def read_metrics(text: str) -> dict[str, float]:
    """Turnout's counters and gauges from Prometheus text; buckets and creation times are left to Prometheus."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        base = name.partition("{")[0]
        if base.startswith("turnout_") and not base.endswith(("_bucket", "_created")):
            found[name] = float(value)
    return found


def _get(http: str, path: str) -> tuple[int, str]:
    try:
        with urlopen(http.rstrip("/") + path, timeout=TIMEOUT_S) as answer:
            return int(answer.status), answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise TurnoutError(Code.UNAVAILABLE, f"http: no server answers at {http} ({reason})", "http") from None
