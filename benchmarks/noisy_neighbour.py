"""One tenant that floods a server: streams that ask again as soon as they are answered, whatever the answer.

`python -m benchmarks.noisy_neighbour`: a Flood as a line of JSON in, `there` out when every stream has been heard; a
Flooded as JSON out when its input ends and the last answers have come. `bench_flood` runs it as a process of its own
at the lowest priority: it stands for clients on machines of their own, and must take neither the interpreter from the
code that measures, nor the processor from the server.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from experiments.load.records import Used

THERE = "there\n"
ANSWER_LIMIT_S = 120.0
LOST_PAUSE_S = 0.1  # a server that is gone is not asked in a tight loop


@dataclass(frozen=True, slots=True)
class Flood:
    """What is asked.

    Attributes:
        url: of the endpoint.
        key: the tenant's.
        streams: requests under way at once.
        body: of each request.
    """

    url: str
    key: str
    streams: int
    body: dict[str, Any]


@dataclass(slots=True)
class Flooded:
    """What came of it.

    Attributes:
        used: of those that were answered.
        answered_s: seconds that each of these took.
        refused: answers with status 429.
        unnamed: refusals that named no time to try again.
        failed: requests with any other status or none, and answers that broke off.
    """

    used: Used = field(default_factory=Used)
    answered_s: list[float] = field(default_factory=list)
    refused: int = 0
    unnamed: int = 0
    failed: int = 0

    @property
    def outcomes(self) -> int:
        """Requests that came to an end, one way or another."""
        return self.used.requests + self.refused + self.failed

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Flooded:
        """Back from JSON."""
        return cls(**{**values, "used": Used(**values["used"])})


@contextmanager
def flooding(flood: Flood) -> Iterator[Flooded]:
    """A flood for as long as the context lasts, beginning when it is there; what came of it is known after the end.

    Raises:
        RuntimeError: its process ended before every stream was heard.
    """
    command = ["nice", "-n", "19", sys.executable, "-m", "benchmarks.noisy_neighbour"]
    result = Flooded()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdin is not None
        assert clients.stdout is not None
        clients.stdin.write(json.dumps(asdict(flood)) + "\n")
        clients.stdin.flush()
        if clients.stdout.readline() != THERE:
            raise RuntimeError(f"the flood ended before it began, with status {clients.wait()}")
        try:
            yield result
        finally:
            output, _ = clients.communicate()
            found = Flooded.from_dict(json.loads(output))
            for name in Flooded.__slots__:
                setattr(result, name, getattr(found, name))


class Clients:
    """The streams of a flood, each a thread."""

    def __init__(self, flood: Flood) -> None:
        self._flood = flood
        self._address = urlsplit(flood.url)
        self._body = json.dumps(flood.body)
        self._headers = {"Authorization": f"Bearer {flood.key}", "Content-Type": "application/json"}
        self._result = Flooded()
        self._heard, self._over = threading.Condition(), threading.Event()
        self._threads = [threading.Thread(target=self._stream) for _ in range(flood.streams)]

    def start(self) -> None:
        """Begin, and wait until as many answers have come as there are streams."""
        for thread in self._threads:
            thread.start()
        with self._heard:
            self._heard.wait_for(lambda: self._result.outcomes >= self._flood.streams)

    def end(self) -> Flooded:
        """Ask nothing more; what came of everything, when the last answers are there."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        return self._result

    def _stream(self) -> None:
        address = self._address
        connection = HTTPConnection(address.hostname or "", address.port, timeout=ANSWER_LIMIT_S)
        while not self._over.is_set():
            began = time.monotonic()
            try:
                connection.request("POST", address.path, self._body, self._headers)
                answer = connection.getresponse()
                text = answer.read().decode()
            except (OSError, HTTPException):
                connection.close()
                self._hear(0, None, "", 0.0)
                self._over.wait(LOST_PAUSE_S)
                continue
            self._hear(answer.status, answer.headers.get("Retry-After"), text, time.monotonic() - began)
        connection.close()

    def _hear(self, status: int, retry_after: str | None, text: str, seconds: float) -> None:
        usage = _usage(text, bool(self._flood.body.get("stream"))) if status == 200 else None
        with self._heard:
            result = self._result
            if status == 429:
                result.refused += 1
                result.unnamed += not _names_a_time(retry_after)
            elif usage is None:
                result.failed += 1
            else:
                result.used.add(usage)
                result.answered_s.append(seconds)
            self._heard.notify_all()


def _names_a_time(retry_after: str | None) -> bool:
    return retry_after is not None and retry_after.isdecimal() and int(retry_after) > 0


def _usage(text: str, streamed: bool) -> dict[str, int] | None:
    """What an answer says of its tokens, a streamed one in its last event; None: it broke off."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    last = (events or ["{}"])[-1] if streamed else text
    usage: dict[str, int] | None = json.loads(last).get("usage")
    return usage


def main() -> None:
    """Flood until the input ends."""
    clients = Clients(Flood(**json.loads(sys.stdin.readline())))
    clients.start()
    sys.stdout.write(THERE)
    sys.stdout.flush()
    sys.stdin.read()
    json.dump(asdict(clients.end()), sys.stdout)


if __name__ == "__main__":
    main()
