"""A server in processes of its own that tells all it can of itself, and a little load on it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.served import running_server
from turnout.batches_config import BatchesConfig
from turnout.client import Client
from turnout.config import TurnoutConfig
from turnout.free_ports import on_free_ports
from turnout.telemetry_config import AuditConfig, LogsConfig, SloConfig, TelemetryConfig, TracesConfig

QUESTION = "What is 69*9-32*6+44?"
LINES = 2000  # of a batch: more than are answered while tests look


@dataclass(frozen=True)
class Served:
    config: TurnoutConfig
    traces: Path
    logs: Path

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.config.server.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.config.server.grpc_port}"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`demo` has its models in one process, `apart` in actors."""
    folder = tmp_path_factory.mktemp("told")
    demo = TurnoutConfig.demo()
    together = demo.pools["demo"]
    apart = together.model_copy(update={"placement": together.placement.model_copy(update={"models": "actors"})})
    telemetry = TelemetryConfig(
        slo=SloConfig(ttft_s=30.0, tpot_s=5.0),
        traces=TracesConfig(share=0.0, path=str(folder / "traces")),
        logs=LogsConfig(path=str(folder / "requests.jsonl")),
        audit=AuditConfig(share=1.0, beside=1),
    )
    batches = BatchesConfig(folder=str(folder / "batches"), concurrency=2)
    pools = {"demo": together, "apart": apart}
    config = demo.model_copy(update={"pools": pools, "telemetry": telemetry, "batches": batches})
    config = on_free_ports(config)
    with running_server(config):
        yield Served(config, folder / "traces", folder)


class Load:
    """Asks in all ways until it is stopped."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self.errors: list[str] = []

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _begin_batch(self, http: httpx.Client) -> None:
        """Work for when nobody asks, with a line that is no request among it."""
        body = {"model": "demo", "prompt": QUESTION, "max_tokens": 4}
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            for number in range(LINES)
        ]
        data = "".join(f"{json.dumps(line)}\n" for line in [{"custom_id": "bad"}, *lines])
        sent = http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
        wanted = {"input_file_id": sent["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        begun = http.post("/v1/batches", json=wanted)
        if begun.status_code != 200:
            self.errors.append(begun.text)

    def _run(self) -> None:
        options = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24}
        with Client(self._served.grpc) as client, httpx.Client(base_url=self._served.http, timeout=60) as http:
            self._begin_batch(http)
            while not self._stopped.is_set():
                for pool in ("demo", "apart"):
                    for method in ("plain", "speculative", "entropy_adaptive"):
                        client.generate(model=pool, method=method, temperature=0.0, **options)  # type: ignore[arg-type]
                refused = http.post("/v1/completions", json={"model": "demo", "prompt": "x", "temperature": 9})
                if refused.status_code != 400:
                    self.errors.append(refused.text)


@pytest.fixture(scope="session")
def load(served: Served) -> Iterator[Load]:
    with Load(served) as running:
        yield running
    assert running.errors == []
