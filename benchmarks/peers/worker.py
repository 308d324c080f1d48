"""The process a peer runs in: `python -m benchmarks.peers.worker MODULE`, JSON lines over stdin and stdout.

A request is {"call": name, "args": {...}}; the answer {"result": ...} or {"error": text}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, TextIO

from benchmarks.peers.base import Peer, Setup


def serve(peer: Peer, requests: Iterable[str], replies: TextIO) -> None:
    """Answer requests until `close` or the end of input. An exception of the peer is answered, not raised."""
    calls: dict[str, Callable[[dict[str, Any]], Any]] = {
        "missing": lambda _: peer.missing(),
        "versions": lambda _: peer.versions(),
        "setup": lambda args: peer.setup(Setup(**args)),
        "generate": lambda args: asdict(peer.generate(**args)),
        "close": lambda _: peer.close(),
    }
    for line in requests:
        request = json.loads(line)
        try:
            reply = {"result": calls[request["call"]](request.get("args", {}))}
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if request["call"] == "close":
            return


def main() -> None:
    """Serve the peer of the module named on the command line."""
    # Engines write to stdout as they please, native code included: only this copy of it carries answers.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(sys.argv[1])
    serve(module.Engine(), sys.stdin, replies)


if __name__ == "__main__":
    main()
