"""The flood benchmark against a server that knows what it served, and its verdicts on times made by hand."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.bench_flood import ALONE, FLOODS, OTHERS, Found, Size, Times, measure, page, percentile, ratio, verdict
from benchmarks.noisy_neighbour import Flood, Flooded, flooding
from experiments.load.records import Used
from experiments.stats.intervals import Interval

BESIDE = next(iter(FLOODS))
SIZE = Size(rounds=1, seconds=0.5, rate=12.0, tokens=3, streams=4, flood_tokens=5)
KEYS = {name: f"tk_{name}" for name in (*OTHERS, *FLOODS.values())}


class Tallying(ThreadingHTTPServer):
    """Answers in one piece or as events, and counts what it served by key; whom it refuses, it tells when to come."""

    daemon_threads = True

    def __init__(self) -> None:
        self.served: dict[str, Used] = {}
        self.refused = Counter[str]()
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def usage(self, key: str, tokens: int) -> dict[str, int] | None:
        """What an answer to this key will have used; None: it is refused."""
        with self._lock:
            used = self.served.setdefault(key, Used())
            if key == KEYS["limited"] and used.requests > self.refused[key]:
                self.refused[key] += 1
                return None
            usage = {"prompt_tokens": 7 + used.requests % 3, "completion_tokens": tokens}
            used.add(usage)
            return usage


class Handler(BaseHTTPRequestHandler):
    server: Tallying
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = self.server.usage(self.headers["Authorization"].removeprefix("Bearer "), body["max_tokens"])
        if usage is None:
            self._send(429, "{}", {"Retry-After": "1"})
        elif body.get("stream"):
            events = [{"choices": [{"delta": {"content": "4"}}], "usage": None}, {"choices": [], "usage": usage}]
            self._send(200, "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n", {})
        else:
            self._send(200, json.dumps({"usage": usage}), {})

    def _send(self, status: int, text: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def listening(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.drivers
async def test_what_arrives_is_what_the_server_served_to_each_tenant() -> None:
    server = Tallying()
    with listening(server):
        found = await measure(server.url, KEYS, SIZE)
    assert {KEYS[name]: used for name, used in found.used.items()} == server.served
    [times] = found.rounds
    assert set(times) == {ALONE, *FLOODS}
    # The same arrivals in each part, and nobody unanswered.
    assert len({len(each) for each in times.values()}) == 1
    assert all(each is not None for part in times.values() for each in part)
    refused = {name: sum(each.refused for each in runs) for name, runs in found.floods.items()}
    assert refused == {"limited": server.refused[KEYS["limited"]], "unlimited": 0}
    assert refused["limited"] > 0
    assert not any(each.unnamed or each.failed for runs in found.floods.values() for each in runs)


class Faulty(BaseHTTPRequestHandler):
    """Refuses without a time to come back, breaks an answer off, and hangs up, in turn."""

    turns = iter(range(10**9))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        match next(self.turns) % 3:
            case 0:
                self.send_response(429)
                self.end_headers()
            case 1:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'data: {"error": {"message": "lost"}}\n\n')
            case _:
                self.connection.close()

    def log_message(self, *_: Any) -> None:
        pass


def test_a_flood_counts_refusals_without_a_time_and_answers_that_broke_off() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    url = f"http://127.0.0.1:{server.server_port}/v1/completions"
    with listening(server), flooding(Flood(url, "tk_any", 2, {"stream": True})) as flooded:
        pass
    assert flooded.used == Used()
    assert flooded.refused == flooded.unnamed
    assert flooded.outcomes == flooded.refused + flooded.failed >= 2
    assert flooded.refused >= 1
    assert flooded.failed >= 1


def rounds(times: float, count: int = 10) -> list[dict[str, Times]]:
    """Rounds whose 95th percentile beside a flood is so many times that without, and whose median is the same."""
    made = []
    for number in range(count):
        alone: Times = [0.1 + 0.001 * number] * 40
        made.append({name: [*alone[:36], *[each and each * times for each in alone[36:]]] for name in FLOODS})
        made[-1][ALONE] = alone
    return made


@pytest.mark.parametrize(("times", "said"), [(1.4, "yes"), (2.6, "no")])
def test_the_goal_is_of_the_95th_percentile_and_not_of_the_median(times: float, said: str) -> None:
    found = rounds(times)
    p95 = ratio(found, BESIDE, 95)
    assert p95.value == pytest.approx(times, rel=0.05)
    assert verdict(p95, len(found)) == said
    assert ratio(found, BESIDE, 50).value == pytest.approx(1.0, rel=0.05)


def test_a_verdict_is_open_where_the_interval_or_the_rounds_do_not_tell() -> None:
    assert verdict(Interval(1.9, 1.7, 2.1), 20) == "open"
    assert verdict(Interval(1.4, 1.3, 1.5), 2) == "open"


def test_a_request_without_an_answer_is_no_fast_one() -> None:
    assert percentile([0.1] * 19 + [None], 95) == 0.1
    assert percentile([0.1] * 18 + [None] * 2, 95) == float("inf")
    found = rounds(1.0)
    for each in found:
        each[BESIDE] = [*each[BESIDE][:30], *[None] * 10]
    assert verdict(ratio(found, BESIDE, 95), len(found)) == "no"


def test_the_page_tells_refusals_and_records_that_do_not_add_up() -> None:
    used = {name: Used(2, 20, 16) for name in KEYS}
    floods = {name: [Flooded(Used(3, 30, 24), [1.0] * 3, refused=9, unnamed=1)] * 2 for name in FLOODS.values()}
    found = Found(rounds(2.6), floods, used, {**used, "steady": Used(2, 20, 15)})
    text = page(found, SIZE).markdown()
    assert f"| {BESIDE} | 6 | 18 | 2 | 0 |" in text
    assert "| modest | 2 | 20 | 16 | the same |" in text
    assert "| steady | 2 | 20 | 16 | 2, 20, 15: **not the same** |" in text
    assert f"| {BESIDE} | 400 | 0 |" in text
    assert "| no |" in text
