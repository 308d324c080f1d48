"""`turnout serve`: run the server until it is told to stop."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from cli.asking import read_config
from cli.output import console


def serve(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file; without one, the shipped demo models are served.")
    ] = None,
) -> None:
    """Serve over gRPC and HTTP until Ctrl-C.

    Starts a local Ray cluster, or connects to the one named in the configuration (ray.address).
    """
    out = console()
    settings = read_config(config)
    with out.status("starting Ray and loading models"):
        from deployments.app import start

        server = start(settings)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        out.print(f"serving {', '.join(settings.pools)}; Ctrl-C stops")
        out.print(f"  gRPC  {server.grpc_address}")
        out.print(f"  HTTP  {server.http_url}/v1")
        if server.store is not None:
            out.print(f"  store {server.store.url}, root key in {server.store.root_key_file} (see `turnout cache`)")
        stop.wait()
    finally:
        with out.status("stopping"):
            server.stop()
    out.print("stopped")
