"""`turnout status`: whether a running server answers, what it serves, what its pools hold and what it has done."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import typer

from cli.ask import ApiKeyFile, connect
from cli.output import print_json, print_table
from turnout.calls import ModelDescription
from turnout.errors import Code, TurnoutError

TIMEOUT_S = 10.0
WELL = ("ok", "degraded")  # degraded: without the prefix store, everything is computed

Pools = dict[str, list[dict[str, Any]]]


def status(
    address: Annotated[str, typer.Option(help="gRPC address of the server.")] = "localhost:9000",
    http: Annotated[str, typer.Option(help="HTTP address of the same server.")] = "http://localhost:8000",
    api_key_file: ApiKeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, all metrics included.")] = False,
) -> None:
    """Ask a running server whether it is well.

    Shows its endpoints, the replicas of its pools and where their models run, queues, cache use, the prefix store's
    servers and their versions, acceptance of drafts and counters. Exit code 0 when both endpoints answer and every
    pool is healthy, 1 when not.
    """
    grpc_ms = read_grpc(address)
    health = read_health(http)
    pools, errors = read_pools(http)
    metrics = read_metrics(_get(http, "/metrics")[1])
    healthy = health in WELL
    # Who asks a pool for its models waits for a replica, and starts one where it sleeps.
    models = read_models(address, api_key_file) if healthy and not errors and all(pools.values()) else []
    if as_json:
        found = {"healthy": healthy, "grpc_ms": grpc_ms, "health": health, "models": models}
        print_json({**found, "pools": pools, "errors": errors, "metrics": metrics})
    else:
        typer.echo(f"gRPC {address}: answers in {grpc_ms:.0f} ms")
        typer.echo(f"HTTP {http}: {health}")
        for name, error in errors.items():
            typer.echo(f"{name}: {error}")
        print_table(
            ["pool", "members", "default method"],
            [[p.name, ", ".join(f"{r}: {m}" for r, m in p.roles.items()), p.default_method] for p in models if p.roles],
        )
        _show_pools(pools)
        _show_counters(metrics)
    if not healthy:
        raise typer.Exit(1)


def read_grpc(address: str) -> float:
    """Milliseconds until the gRPC endpoint says how it is.

    Raises:
        TurnoutError: UNAVAILABLE: nothing answers there, or not in time.
    """
    started = time.perf_counter()
    with connect(address) as client, _timely(address):
        client.healthy(TIMEOUT_S)
    return 1000 * (time.perf_counter() - started)


def read_models(address: str, api_key_file: Path | None = None) -> list[ModelDescription]:
    """The pools and their models.

    Raises:
        TurnoutError: UNAVAILABLE: nothing answers there, or not in time.
    """
    with connect(address, api_key_file) as client, _timely(address):
        return client.models(TIMEOUT_S)


@contextmanager
def _timely(address: str) -> Iterator[None]:
    try:
        yield
    except TurnoutError as error:
        if error.code is not Code.DEADLINE_EXCEEDED:
            raise
        message = f"address: the server at {address} does not answer within {TIMEOUT_S:g} s"
        raise TurnoutError(Code.UNAVAILABLE, message, "address") from None


def read_health(http: str) -> str:
    """What `/healthz` says: "ok", or why not."""
    code, body = _get(http, "/healthz")
    try:
        document: Any = json.loads(body)
        return str(document["status"])
    except (ValueError, KeyError, TypeError):
        return f"answered {code} without a status"


def read_pools(http: str) -> tuple[Pools, dict[str, str]]:
    """What `/status` says: by pool, what each replica holds; and why others, or all of them, are not there."""
    code, body = _get(http, "/status")
    try:
        document: Any = json.loads(body)
        return dict(document["pools"]), dict(document["errors"])
    except (ValueError, KeyError, TypeError):
        return {}, {"/status": f"answered {code} without pools"}


def replica_rows(pools: Pools) -> list[list[str]]:
    """Pool, replica, requests, operations that wait, tokens per second, of each replica."""
    rows = []
    for name, replicas in pools.items():
        rows += [
            [name, str(i), str(each["requests"]), str(each["waiting"]), f"{each['tokens_per_second']:.0f}"]
            for i, each in enumerate(replicas)
        ] or [[name, "no replica", "", "", ""]]
    return rows


def member_rows(pools: Pools) -> list[list[str]]:
    """Pool, replica, model, where it runs, restarts, sequences, cache in use, what waits, step time, of each model."""
    return [
        [
            name,
            str(i),
            member["model"],
            member["place"] or "with the replica",
            str(member["restarts"]),
            str(member["sequences"]),
            _share(member["used_blocks"], member["total_blocks"]),
            f"{member['waiting']} ({member['waiting_tokens']} tokens)",
            "" if member["step_seconds"] is None else f"{1000 * member['step_seconds']:.1f}",
        ]
        for name, replicas in pools.items()
        for i, each in enumerate(replicas)
        for member in each["members"]
    ]


def noted(pools: Pools) -> list[str]:
    """A line for everything that replicas found while they loaded, each of it once."""
    found = (f"note: {name}: {note}" for name, each in pools.items() for replica in each for note in replica["notes"])
    return list(dict.fromkeys(found))


def stores(pools: Pools) -> list[str]:
    """A line for every server of a prefix store, each of them once."""
    caches = [cache for replicas in pools.values() for each in replicas if (cache := each.get("cache"))]
    return list(dict.fromkeys(f"store: {server}" for cache in caches for server in cache.get("servers", ())))


def acceptance_rows(metrics: dict[str, float]) -> list[list[str]]:
    """Method and tenant, drafted tokens, share of them accepted, of everything that drafts."""
    rows = []
    for name, drafted in metrics.items():
        base, brace, labels = name.partition("{")
        if base == "turnout_draft_tokens_total" and drafted:
            accepted = metrics.get(f"turnout_accepted_draft_tokens_total{brace}{labels}", 0.0)
            rows.append([labels.rstrip("}"), f"{drafted:g}", _share(accepted, drafted)])
    return rows


def drifted(metrics: dict[str, float]) -> list[str]:
    """A line for every calibration, and every router, whose range live answers have left."""
    found = []
    for name, index in metrics.items():
        base, brace, labels = name.partition("{")
        limit = metrics.get(f"{base}_limit{brace}{labels}", index)
        if base == "turnout_drift" and index > limit:
            found.append(
                f"drift: {labels.rstrip('}')}: stability index {index:.2f} > {limit:.2f}; calibrate or train again"
            )
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


def _show_pools(pools: Pools) -> None:
    if pools:
        print_table(["pool", "replica", ">requests", ">waiting", ">tokens/s"], replica_rows(pools))
    if members := member_rows(pools):
        columns = ["pool", "replica", "model", "place", ">restarts", ">sequences", ">KV used", ">waiting", ">step ms"]
        print_table(columns, members)
    for line in (*stores(pools), *noted(pools)):
        typer.echo(line)


def _show_counters(metrics: dict[str, float]) -> None:
    if drafts := acceptance_rows(metrics):
        print_table(["drafts of", ">tokens", ">accepted"], drafts)
    if metrics:
        print_table(["counter", ">value"], [[name, f"{value:g}"] for name, value in metrics.items()])
    for line in (*drifted(metrics), *degraded(metrics)):
        typer.echo(line)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def _get(http: str, path: str) -> tuple[int, str]:
    try:
        with urlopen(http.rstrip("/") + path, timeout=TIMEOUT_S) as answer:
            return int(answer.status), answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (URLError, OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise TurnoutError(Code.UNAVAILABLE, f"http: no server answers at {http} ({reason})", "http") from None
