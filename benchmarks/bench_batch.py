"""Interactive requests during a batch that saturates their pool: time to first token, with and without it."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.batch_chaos import write_prompts
from benchmarks.harness import Cell, Report, command_line, run, shown
from benchmarks.served import running_server
from experiments.load.generator import UNFINISHED, drive
from experiments.load.schedule import SCHEDULES
from experiments.pairs import DEMO, open_pair
from experiments.stats.intervals import Interval
from turnout.addresses import http_url, reachable
from turnout.batches_config import BatchesConfig
from turnout.free_ports import on_free_ports

LIMIT = 1.5  # times the p95 without a batch
MAX_TOKENS = 16
WARM_UP = 10
DRAIN_S = 120.0
RESAMPLES = 4000


class Chats:
    """Streamed chats over HTTP, in which the first output is the first text; a `LoadClient`.

    Args:
        client: of the server; stays open.
        model: that is asked.
    """

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def answer(self, prompt: str, output: Callable[[], None]) -> int:
        """See `LoadClient.answer`; tokens are not counted.

        Raises:
            RuntimeError: the answer broke off.
        """
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(f"an answer broke off: {event['error']['message']}")
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    output()
        return 0

    async def close(self) -> None:
        """See `LoadClient.close`."""


async def interactive(
    client: httpx.AsyncClient, rate: float, seconds: float, seed: int, model: str = DEMO
) -> list[float | None]:
    """Times to first token under an open loop of Poisson arrivals; None: an answer without text."""
    drawn = random.Random(seed)
    arrivals = SCHEDULES["poisson"](rate, seconds, seed)
    prompts = [f"What is {drawn.randint(1, 99)}*{drawn.randint(1, 99)}?" for _ in arrivals]
    records = await drive(Chats(client, model), arrivals, prompts, drain_s=DRAIN_S)
    if any(each.error == UNFINISHED for each in records):
        raise RuntimeError(f"answers were unfinished {DRAIN_S:g} s after the last request")
    return [None if each.first_s is None else each.first_s - each.sent_s for each in records]


@asynccontextmanager
async def saturating(client: httpx.AsyncClient, rows: int, model: str) -> AsyncIterator[str]:
    """A batch that has more to do than the pool can, for as long as the context lasts; yields its id."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "in.jsonl"
        write_prompts(prompts, rows)
        lines = []
        for line in prompts.read_text(encoding="utf-8-sig").splitlines():
            given = json.loads(line)
            turn = {"role": "user", "content": given["prompt"]}
            body = {"model": model, "messages": [turn], "max_tokens": 48, "temperature": 0}
            lines.append(json.dumps({**_line(given["custom_id"]), "body": body}))
    data = "\n".join(lines).encode()
    file = await _ask(client, "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = await _ask(client, "/v1/batches", json=wanted)
    while (seen := await _batch(client, batch["id"]))["request_counts"]["completed"] == 0:
        if seen["status"] in ("failed", "expired", "cancelled"):
            raise RuntimeError(f"the batch is {seen['status']}: {seen['errors']}")
        await asyncio.sleep(0.2)
    try:
        yield batch["id"]
    finally:
        await _ask(client, f"/v1/batches/{batch['id']}/cancel")


def _line(custom_id: str) -> dict[str, str]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}


async def _ask(client: httpx.AsyncClient, path: str, **content: Any) -> dict[str, Any]:
    answer = await client.post(path, **content)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


async def _batch(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}")).json()
    return found


async def measure(url: str, rate: float, seconds: float, rows: int, model: str) -> dict[str, Any]:
    """Measure TTFT without a batch, with one, and without again, which shows a drift of the machine."""
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        await interactive(client, rate, WARM_UP, 0, model)
        before = await interactive(client, rate, seconds, 1, model)  # other prompts each time: none is cached yet
        async with saturating(client, rows, model) as batch_id:
            done = (await _batch(client, batch_id))["request_counts"]["completed"]
            started = time.monotonic()
            during = await interactive(client, rate, seconds, 2, model)
            counts = (await _batch(client, batch_id))["request_counts"]
            speed = (counts["completed"] - done) / (time.monotonic() - started)
            saturated = counts["completed"] < counts["total"]
        after = await interactive(client, rate, seconds, 3, model)
    alone = before + after
    return {
        "alone": _known(alone),
        "during": _known(during),
        "silent": (alone + during).count(None),
        "batch_rate": speed,
        "saturated": saturated,
    }


def _known(times: list[float | None]) -> list[float]:
    return [each for each in times if each is not None]


def page(found: dict[str, Any], rate: float, title: str = "demo pair") -> Report:
    """The report.

    Args:
        found: what `measure` gave.
        rate: interactive requests a second.
        title: of the pair.
    """
    report = Report(
        "Interactive requests during a batch",
        f"`make bench-batch`: {rate:g} chat requests a second at random to the served {title}, over HTTP.",
    )

    def ms(share: int) -> Callable[[str], str]:
        return lambda key: shown(float(np.percentile(found[key], share)), 1, 1000)

    columns: dict[str, Callable[[str], Cell]] = {
        "time to first token, ms": lambda key: "without a batch" if key == "alone" else "during a batch",
        "requests": lambda key: len(found[key]),
        **{f"p{share}": ms(share) for share in (50, 95, 99)},
    }
    report.table(None, ["alone", "during"], columns)
    report.values |= found
    times = ratio(found)
    silent = f" {found['silent']} answers had no text, and count nowhere." if found["silent"] else ""
    report.text(
        f"p95 during the batch is {times.value:.2f} x that without ({times.low:.2f} to {times.high:.2f}; at most"
        f" {LIMIT} is wanted); the batch was answered at {found['batch_rate']:.1f} lines a second meanwhile.{silent}"
    )
    if times.value > LIMIT:
        report.failures.append(f"p95 during the batch is {times.value:.2f} x that without, more than {LIMIT}")
    if not found["saturated"]:
        report.failures.append("The batch was over too early: nothing is measured.")
        report.text(report.failures[-1])
    return report


def ratio(found: dict[str, Any]) -> Interval:
    """p95 of the time to first token during a batch over that without; 95% bootstrap of both's requests."""
    rng = np.random.default_rng(0)

    def drawn(key: str) -> np.ndarray:
        times = np.array(found[key])
        tails: np.ndarray = np.percentile(times[rng.integers(0, len(times), (RESAMPLES, len(times)))], 95, axis=1)
        return tails

    low, high = np.quantile(drawn("during") / drawn("alone"), [0.025, 0.975])
    value = np.percentile(found["during"], 95) / np.percentile(found["alone"], 95)
    return Interval(float(value), float(low), float(high))


async def measure_all(options: argparse.Namespace) -> Report:
    """Serve a pair with batches, and measure."""
    pair = open_pair(options.pair)
    with tempfile.TemporaryDirectory() as folder:
        config = on_free_ports(pair.config)
        config = config.model_copy(update={"batches": BatchesConfig(folder=folder)})
        with running_server(config):
            url = http_url(reachable(config.server.http_host), config.server.http_port)
            rows = int(400 * options.seconds)
            found = await measure(url, options.rate, options.seconds, rows, pair.pool)
            return page(found, options.rate, pair.title)


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/batch-priority.md"), takes_pair=True, seconds=20.0)
    parser.add_argument("--rate", type=float, default=3.0, help="interactive requests a second")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each part")
    run(parser, measure_all)
