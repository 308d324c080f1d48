"""A server whose stream a test holds in its hand: each event goes out when the test says so, and it can be cut."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
RESET = struct.pack("ii", 1, 0)  # closing sends a reset, as when a process dies


def token(text: str, place: int = 0, **more: Any) -> dict[str, Any]:
    """A token as `turnout.tokens` has it."""
    said = {"id": place, "text": text, "source": "demo-small", "kind": "decoded", "entropy_bits": 0.5, "logprob": -0.1}
    return {**said, "top": [], "rejected": [], **more}


class Held:
    """One request that waits for what the test sends.

    Attributes:
        body: what was asked.
    """

    def __init__(self, connection: socket.socket, body: dict[str, Any]) -> None:
        self._connection = connection
        self.body = body
        connection.settimeout(60)
        connection.sendall(HEAD)

    def send(self, *tokens: dict[str, Any], said: str | None = None) -> None:
        """One event with these tokens; absent, `said` is their text."""
        content = "".join(each["text"] for each in tokens) if said is None else said
        delta = {"content": content}
        choice = {"index": 0, "delta": delta, "finish_reason": None, "turnout": {"tokens": list(tokens)}}
        self.say(json.dumps({"choices": [choice], "usage": None}))

    def say(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self._connection.sendall(b"%x\r\n%s\r\n" % (len(event), event))

    def end(self, usage: dict[str, Any]) -> None:
        """The usage and the end."""
        self.say(json.dumps({"choices": [], "usage": usage}))
        self.say("[DONE]")
        self.shut()

    def shut(self) -> None:
        """The body ends as if all had been said."""
        self._connection.sendall(b"0\r\n\r\n")
        self.close()

    def cut(self) -> None:
        """As when the server dies."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.close()

    def close(self) -> None:
        self._connection.close()

    def left(self) -> bool:
        """Waits until whoever asked has gone."""
        with suppress(ConnectionResetError):
            return self._connection.recv(1) == b""
        return True


class HeldStreams:
    """The server; a context manager.

    `meanwhile` is called again and again until the next request has come: one that the test itself sends on its way
    (`page.route`) is only sent while the test is in a call of the browser's.
    """

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._meanwhile = meanwhile
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._requests: queue.Queue[Held] = queue.Queue()
        self._held: list[Held] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> HeldStreams:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone does not wake the thread that waits in it.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for held in self._held:
            held.close()

    def next(self) -> Held:
        """The next request, which the page must have sent or be about to."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(queue.Empty):
                return self._requests.get(timeout=0.01)
            self._meanwhile()
        raise AssertionError("nothing was asked")

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            part = connection.recv(65536)
            if not part:  # a browser opens connections that it then does not use
                return connection.close()
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        while len(body) < length:
            body += connection.recv(65536)
        held = Held(connection, json.loads(body))
        self._held.append(held)
        self._requests.put(held)
        return None
