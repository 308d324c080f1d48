"""`make demo`: everything on one machine, one prompt through gRPC, who wrote what, what it cost; then all stops."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from cli.ask import Question, ask_server, read_config
from cli.output import console, print_error
from cli.provenance import Marked, print_meters, summary
from turnout.errors import TurnoutError
from turnout.free_ports import free_ports
from turnout.standard_streams import replace_unencodable

if TYPE_CHECKING:
    from rich.console import Console

    from turnout.config import TurnoutConfig

PROMPT = "Work out 69*9-32*6+44 step by step."
METHOD = "entropy_adaptive"
MAX_TOKENS = 160


def demo_config() -> TurnoutConfig:
    """The demo configuration on two ports that are free now."""
    config = read_config(None)
    grpc_port, http_port = free_ports(2)
    server = config.server.model_copy(update={"grpc_port": grpc_port, "http_port": http_port})
    return config.model_copy(update={"server": server})


def run(out: Console) -> None:
    """Start, ask, show, stop.

    Raises:
        TurnoutError: the demo models are missing, or the server did not start or answer.
    """
    config = demo_config()
    started = time.monotonic()
    with out.status("starting Ray, Serve and the two demo models"):
        from deployments.app import start

        server = start(config)
    try:
        out.print(
            f"serving after {time.monotonic() - started:.1f} s: gRPC {server.grpc_address}, HTTP {server.http_url}"
        )
        out.print(f"\nprompt   {PROMPT}\nmethod   {METHOD}\n")
        marked = Marked(out)
        question = Question(PROMPT, method=METHOD, sampling={"temperature": 0.0, "max_tokens": MAX_TOKENS})
        usage = ask_server(question, server.grpc_address, marked.announce, marked.show)
        marked.finish()
        out.print(f"\nmarked: written by {marked.large}; the rest by the small model")
        print_meters(usage)
        out.print(summary(usage))
    finally:
        with out.status("stopping"):
            server.stop()


def main() -> int:
    """Exit code 0 when a prompt was answered, 1 with one line that says why not."""
    replace_unencodable()
    try:
        run(console())
    except TurnoutError as error:
        print_error(error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
