"""`turnout serve`: run the server until it is stopped, on this machine or on a cluster."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import read_config
from cli.output import console
from turnout.errors import invalid

if TYPE_CHECKING:
    from rich.console import Console

    from deployments.app import RunningServer
    from turnout.config import TurnoutConfig

STOPPING = (signal.SIGINT, signal.SIGTERM)


def serve(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file; without one, the shipped demo models are served.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Deploy on a running Ray cluster: HOST:PORT of its head, or auto, the cluster this machine belongs to."
            " Run it on one of the cluster's nodes. The application stays when the command returns.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="With --cluster: stay, and end the application with Ctrl-C.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="With --cluster: end the application that is there.")] = False,
) -> None:
    """Serve over gRPC and HTTP until Ctrl-C.

    Starts a local Ray cluster; or deploys on a running one: with --cluster, or where the configuration names one
    (ray.address), which is as --cluster with --wait.
    """
    if cluster is None and (wait or stop):
        raise invalid("wait" if wait else "stop", "goes together with --cluster")
    out = console()
    if stop:
        assert cluster is not None
        _end(out, cluster)
        return
    settings = read_config(config)
    address = cluster or settings.ray.address
    stays = cluster is None or wait
    server = _start_here(out, settings) if address is None else _start_there(out, settings, address)
    signals = _signals() if stays else None  # before anything says that it serves
    out.print(f"serving {', '.join(settings.pools)}" + ("; Ctrl-C stops" if stays else ""))
    out.print(f"  gRPC  {server.grpc_address}")
    out.print(f"  HTTP  {server.http_url}/v1")
    if server.store is not None:
        out.print(f"  store {server.store.url}, root key in {server.store.root_key_file} (see `turnout cache`)")
    for note in _notes(server):
        out.print(f"  note  {note}")
    if signals is None:
        out.print(f"it keeps running; `turnout serve --cluster {cluster} --stop` ends it")
        from deployments.cluster import leave

        leave()
        return
    _stay(out, server, signals)


def _start_here(out: Console, settings: TurnoutConfig) -> RunningServer:
    from turnout.checkpoint_files import check_checkpoint
    from turnout.config import model_path

    settings = _pinned(out, settings)
    for name, model in settings.local_models.items():
        field = f"models.{name}.path"
        check_checkpoint(model_path(model, field), field)
    with out.status("starting Ray and loading models"):
        from deployments.app import start

        return start(settings, tell=out.print)


def _start_there(out: Console, settings: TurnoutConfig, address: str) -> RunningServer:
    with out.status(f"connecting to {address}"):
        from deployments.cluster import connect, deploy

        connect(address)
    settings = _pinned(out, settings)
    with out.status("deploying"):
        return deploy(settings, address, tell=out.print)


def _pinned(out: Console, settings: TurnoutConfig) -> TurnoutConfig:
    """The configuration with a hub's revisions resolved, so that all replicas load the same; says what they are."""
    from turnout.config import pinned

    resolved = pinned(settings)
    for name, model in settings.models.items():
        if (path := resolved.models[name].path) != model.path:
            out.print(f"models.{name}.path: {model.path} is {path}")
    return resolved


def _notes(server: RunningServer) -> list[str]:
    """What replicas found while they loaded, each of it once: slower kernels than could be had, shorter sequences."""
    found = (f"{pool}: {note}" for pool, each in server.stats().items() for replica in each for note in replica.notes)
    return list(dict.fromkeys(found))


def _signals() -> socket.socket:
    """A socket that gets a byte, its number, of every signal from now on; SIGINT (Ctrl-C) and SIGTERM do nothing else.

    A lock or an Event is no substitute: the kernel may give a signal to any thread, and the main one would sleep on.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())
    for number in STOPPING:
        signal.signal(number, lambda *_: None)
    return reader


def _stay(out: Console, server: RunningServer, signals: socket.socket) -> None:
    try:
        while signals.recv(1)[0] not in STOPPING:
            pass
    finally:
        with out.status("stopping"):
            server.stop()
    out.print("stopped")


def _end(out: Console, address: str) -> None:
    with out.status("ending the application"):
        from deployments.cluster import stop

        found = stop(address)
    out.print("stopped" if found else "nothing was served")
