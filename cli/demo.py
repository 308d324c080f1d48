"""`make demo`: everything on one machine, one prompt through gRPC, who wrote what, what it cost; then all stops."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cli.ask import Question, ask_server, read_config
from cli.output import console, print_error
from cli.provenance import Marked, print_meters, summary
from turnout.errors import TurnoutError
from turnout.free_ports import on_free_ports
from turnout.standard_streams import replace_unencodable

if TYPE_CHECKING:
    from rich.console import Console


PROMPT = "Work out 69*9-32*6+44 step by step."
METHOD = "entropy_adaptive"
MAX_TOKENS = 160


def run(out: Console) -> None:
    """Start, ask, show, stop.

    Raises:
        TurnoutError: the demo models are missing, or the server did not start or answer.
    """
    config = on_free_ports(read_config(None))
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


def main(shown: Callable[[Console], None] | None = None) -> int:
    """Show a demo: exit code 0 when all was answered, 1 with one line that says why not."""
    replace_unencodable()
    try:
        (shown or run)(console())
    except TurnoutError as error:
        print_error(error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
