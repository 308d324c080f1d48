"""`turnout serve` in a process of its own, for benchmarks."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import yaml

from turnout.client import Client
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError

START_LIMIT_S = 600.0


@contextmanager
def running_server(config: TurnoutConfig, program: str = "cli.main", api_key: str = "") -> Iterator[tuple[int, float]]:
    """`turnout serve` in a process of its own; yields its process id and the seconds it took to answer.

    It is ended with the context, also where SIGTERM ends this process meanwhile.

    Args:
        config: what it serves.
        program: the module that is run as `turnout`.
        api_key: of a tenant who may ask it; "" where it asks for none.
    """
    with _exit_at_sigterm(), tempfile.TemporaryDirectory(prefix="turnout-bench-") as folder:
        path = Path(folder) / "turnout.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", program, "serve", str(path)], stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            _wait_until_it_answers(process, config.server.grpc_port, api_key)
            yield process.pid, time.monotonic() - started
        finally:
            process.terminate()  # nothing happens when it has ended by itself
            process.wait(timeout=60)


@contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Have SIGTERM raise SystemExit in the context, so that contexts end; only a main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, api_key: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            with Client(f"127.0.0.1:{port}", api_key=api_key) as client:
                client.models()
        except TurnoutError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"no answer from the server after {START_LIMIT_S:g} s")
