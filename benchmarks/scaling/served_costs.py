"""CPU time of the processes that stand before a pool, and of Serve's controller: of a real server, by /proc (Linux)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.harness import note
from benchmarks.scaling.costs import Work
from benchmarks.served import running_server
from experiments.process_cpu import cpu_seconds
from experiments.process_memory import tree
from turnout.client import AsyncClient
from turnout.config import TurnoutConfig
from turnout.free_ports import on_free_ports

# How their processes are called.
INGRESS, PROXY, CONTROLLER = "ray::ServeReplica:turnout:ingress", "ray::ProxyActor", "ray::ServeController"
MORE = 4  # replicas, the second time
REQUESTS, AT_ONCE = 200, 4
LONG = 48  # tokens
WATCHED_S = 10.0
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Served:
    """Costs of a served pool in CPU seconds; the controller's per second."""

    proxy: Work
    ingress: Work
    control_idle: float
    control_per_replica: float


def measure_served(config: TurnoutConfig) -> Served:
    """Serve the first pool with one replica, and with four."""
    work, one = _measure(config, 1)
    _, more = _measure(config, MORE)
    per_replica = max((more - one) / (MORE - 1), 0.0)
    return Served(work[PROXY], work[INGRESS], max(one - per_replica, 0.0), per_replica)


def _measure(config: TurnoutConfig, replicas: int) -> tuple[dict[str, Work], float]:
    name, pool = next(iter(config.pools.items()))
    config = on_free_ports(config.model_copy(update={"pools": {name: pool.model_copy(update={"replicas": replicas})}}))
    note(f"a server with {replicas} replica(s)")
    with running_server(config) as (pid, _):
        time.sleep(SETTLE_S)
        found = {kind: processes(pid, kind) for kind in (INGRESS, PROXY, CONTROLLER)}
        before = cpu_seconds(found[CONTROLLER])
        time.sleep(WATCHED_S)
        controller = (cpu_seconds(found[CONTROLLER]) - before) / WATCHED_S
        if replicas > 1:
            return {}, controller
        address = f"127.0.0.1:{config.server.grpc_port}"
        uvloop.run(_ask(address, pool.small, 1, REQUESTS // 4))
        short = _spent(address, pool.small, 1, found)
        long = _spent(address, pool.small, LONG, found)
    work = {}
    for kind in (INGRESS, PROXY):
        chunk_s = max((long[kind] - short[kind]) / (long["chunks"] - short["chunks"]), 0.0)
        work[kind] = Work(request_s=max(short[kind] - short["chunks"] * chunk_s, 0.0), chunk_s=chunk_s)
    return work, controller


def _spent(address: str, model: str, tokens: int, found: dict[str, list[int]]) -> dict[str, float]:
    """For one request: chunks, and CPU seconds by kind of process."""
    before = {kind: cpu_seconds(pids) for kind, pids in found.items()}
    chunks = uvloop.run(_ask(address, model, tokens, REQUESTS))
    used = {kind: (cpu_seconds(pids) - before[kind]) / REQUESTS for kind, pids in found.items()}
    return {**used, "chunks": chunks / REQUESTS}


async def _ask(address: str, model: str, tokens: int, requests: int) -> int:
    """Ask so often, a few at a time; chunks that came."""
    chunks = 0
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        nonlocal chunks
        async with places:
            stream = client.stream(
                f"{number} and so on", model=model, temperature=0.0, max_tokens=tokens, ignore_eos=True
            )
            async with stream as events:
                async for chunk in events:
                    chunks += bool(chunk.tokens)

    async with AsyncClient(address) as client:
        await asyncio.gather(*(one(number) for number in range(requests)))
    return chunks


def processes(root: int, title: str) -> list[int]:
    """Process ids below `root` whose title begins so."""
    found = []
    for pid in tree(root):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if command.decode(errors="replace").startswith(title):
            found.append(pid)
    return found
