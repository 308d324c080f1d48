"""A proxy in front of a real Redis that spoils its answers as networks and servers do; for tests."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from kvstore.redis.nodes import NodeAddress

Trouble = Literal["none", "truncate", "dribble", "delay", "flip", "cut", "desync", "swap", "stall"]
BLOCK_BYTES = 256 << 10
# How long a spoiling thread may be blind to a change of its orders.
TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class Spoil:
    """Fault that the proxy adds to replies.

    Attributes:
        trouble: none; truncate: a connection is closed `after_bytes` into its answers; dribble: a byte every
            `seconds`; delay: every answer comes `seconds` later; flip: a bit is turned in every `after_bytes`-th byte;
            cut: connections are closed, and new ones too; desync: the next answer comes twice, so each later command
            gets that of the one before it; swap: neighbouring values change
            places; stall: nothing comes, as from a stopped process.
        seconds: see there.
        after_bytes: see there.
    """

    trouble: Trouble = "none"
    seconds: float = 0.02
    after_bytes: int = 8 << 10


class FaultyServer:
    """Listens on 127.0.0.1 and passes on to a server; `spoil` may be set at any time, and holds for open connections.

    Args:
        target: the real server.
    """

    def __init__(self, target: NodeAddress) -> None:
        self._target = target
        self._spoil = Spoil()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = NodeAddress("127.0.0.1", self._listener.getsockname()[1])
        self.accepted = 0
        self._pairs: list[_Pair] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="faulty-server", daemon=True)
        self._acceptor.start()

    @property
    def url(self) -> str:
        """For `parse_url`."""
        return f"redis://{self.endpoint}"

    @property
    def spoil(self) -> Spoil:
        """What it does to answers now."""
        return self._spoil

    @spoil.setter
    def spoil(self, spoil: Spoil) -> None:
        self._spoil = spoil
        if spoil.trouble == "cut":
            self._cut()

    def close(self) -> None:
        """Close everything; later calls do nothing."""
        self._closed.set()
        self._listener.close()
        self._cut()
        self._acceptor.join()

    def __enter__(self) -> FaultyServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _cut(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            # Polled, for closing a listener does not wake who accepts on it.
            try:
                if not select.select([self._listener], [], [], TICK_S)[0]:
                    continue
                client, _ = self._listener.accept()
            except (OSError, ValueError):
                return
            self.accepted += 1
            if self._spoil.trouble == "cut":
                client.close()
                continue
            try:
                server = _connect(self._target)
            except OSError:
                client.close()
                continue
            pair = _Pair(self, client, server)
            with self._lock:
                self._pairs = [each for each in self._pairs if not each.ended] + [pair]
            pair.start()


def _connect(target: NodeAddress) -> socket.socket:
    if not target.path:
        return socket.create_connection((target.host, target.port))
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(target.path)
    return server


class _Pair:
    """A client's connection and ours to the server, each way pumped by a thread."""

    def __init__(self, owner: FaultyServer, client: socket.socket, server: socket.socket) -> None:
        self._owner = owner
        self._client = client
        self._server = server
        self._answers = Answers()
        self._sent = 0
        self.ended = False

    def start(self) -> None:
        self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pump in (self._pump_up, self._pump_down):
            threading.Thread(target=pump, name="faulty-server", daemon=True).start()

    def close(self) -> None:
        self.ended = True
        for each in (self._client, self._server):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _pump_up(self) -> None:
        with suppress(OSError):
            while block := self._client.recv(BLOCK_BYTES):
                self._server.sendall(block)
        self.close()

    def _pump_down(self) -> None:
        with suppress(OSError, ValueError):
            while not self.ended:
                ready = select.select([self._server], [], [], TICK_S)[0]
                block = self._server.recv(BLOCK_BYTES) if ready else b""
                while self._owner.spoil.trouble == "stall" and not self.ended:
                    time.sleep(TICK_S)
                if ready and not block:
                    break
                self._pass_on(block, self._owner.spoil)
        self.close()

    def _pass_on(self, block: bytes, spoil: Spoil) -> None:
        """Send what came, spoiled; an empty block means that time passed."""
        if spoil.trouble in {"desync", "swap"}:
            self._client.sendall(self._answers.reorder(block, spoil.trouble == "swap"))
            return
        block = self._answers.held() + block
        if not block:
            return
        if spoil.trouble == "dribble":
            self._dribble(block)
            return
        if spoil.trouble == "delay":
            time.sleep(spoil.seconds)
        if spoil.trouble == "flip":
            block = flipped(block, self._sent, spoil.after_bytes)
        if spoil.trouble == "truncate":
            block = block[: max(spoil.after_bytes - self._sent, 0)]
        self._client.sendall(block)
        self._sent += len(block)
        if spoil.trouble == "truncate" and self._sent >= spoil.after_bytes:
            self.close()

    def _dribble(self, block: bytes) -> None:
        for start in range(len(block)):
            if self.ended:
                return
            spoil = self._owner.spoil
            if spoil.trouble != "dribble":
                self._client.sendall(block[start:])
                return
            self._client.sendall(block[start : start + 1])
            time.sleep(spoil.seconds)


def flipped(block: bytes, offset: int, every: int) -> bytes:
    """Flip a bit in every `every`-th byte of a stream of which `block` begins at `offset`."""
    spoiled = bytearray(block)
    for i in range(every - 1 - offset % every, len(spoiled), every):
        spoiled[i] ^= 0x10
    return bytes(spoiled)


class Answers:
    """Reordering of a RESP2 stream, taken apart into whole replies."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._waiting: deque[bytes] = deque()
        self._shifted = False

    def reorder(self, block: bytes, swap: bool) -> bytes:
        """Return what to send now: replies in swapped pairs, or each one command late; an empty block ends a wait."""
        self._bytes += block
        while (size := answer_length(self._bytes)) is not None:
            self._waiting.append(bytes(self._bytes[:size]))
            del self._bytes[:size]
        out = bytearray()
        if swap:
            while len(self._waiting) > 1:
                first, second = self._waiting.popleft(), self._waiting.popleft()
                out += second + first
            if not block and self._waiting:
                out += self._waiting.popleft()
            return bytes(out)
        if self._waiting and not self._shifted:
            self._shifted = True
            out += self._waiting[0]
        while len(self._waiting) > 1:
            out += self._waiting.popleft()
        return bytes(out)

    def held(self) -> bytes:
        """Return what was kept back, when order is restored."""
        held = b"".join(self._waiting) + bytes(self._bytes)
        self._waiting.clear()
        self._bytes.clear()
        self._shifted = False
        return held


def answer_length(data: bytes | bytearray, start: int = 0) -> int | None:
    """Return bytes of the first answer in `data` from `start` on; None: it is not all there."""
    end = data.find(b"\r\n", start)
    if end < 0:
        return None
    after = end + 2
    if data[start : start + 1] not in (b"$", b"*"):
        return after - start
    count = int(data[start + 1 : end])
    if data[start : start + 1] == b"$":
        whole = after + (count + 2 if count >= 0 else 0)
        return whole - start if len(data) >= whole else None
    for _ in range(count):
        inner = answer_length(data, after)
        if inner is None:
            return None
        after += inner
    return after - start
