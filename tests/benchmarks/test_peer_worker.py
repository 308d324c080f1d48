"""The worker protocol, over real processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers.base import Generation, Setup
from benchmarks.peers.remote import PeerError, RemotePeer


@pytest.fixture
def peer() -> Iterator[RemotePeer]:
    with RemotePeer("tests.benchmarks.fake_peer", Path(sys.executable), threads=1) as remote:
        yield remote


def test_calls_travel_and_come_back(peer: RemotePeer) -> None:
    assert peer.missing() is None
    assert peer.versions() == {"fake": "1"}
    peer.setup(Setup("somewhere", "float32", 1))
    assert peer.generate([[5, 6], [9]], 3) == Generation(0.5, [[6, 7, 8], [10, 11, 12]], 0.25)
    assert peer.generate([[5]], 3, stop_at_end=True).answers == [[6, 7]]


def test_a_failure_is_an_error_and_the_next_call_works(peer: RemotePeer) -> None:
    with pytest.raises(PeerError, match="RuntimeError: out of luck"):
        peer.generate([[666]], 2)
    with pytest.raises(PeerError, match="no bfloat16 here"):
        peer.setup(Setup("somewhere", "bfloat16", 1))
    assert peer.generate([[1]], 1).answers == [[2]]


def test_fewer_tokens_than_asked_for_is_no_measurement(peer: RemotePeer) -> None:
    with pytest.raises(PeerError, match=r"1 answers of \[3\] tokens, asked for 4"):
        peer.generate([[667]], 4)


def test_what_an_engine_prints_does_not_reach_the_protocol(peer: RemotePeer) -> None:
    assert peer.generate([[669]], 1).answers == [[670]]
    assert peer.generate([[1]], 1).answers == [[2]]


def test_a_dead_worker_is_reported_with_its_last_words(peer: RemotePeer) -> None:
    with pytest.raises(PeerError, match="status 3: the last words"):
        peer.generate([[668]], 1)
    with pytest.raises(PeerError, match="status 3"):
        peer.versions()


def test_a_waiting_worker_rests(peer: RemotePeer) -> None:
    assert peer.versions()
    before, deadline = peer.cpu_seconds(), time.monotonic() + 0.5
    while time.monotonic() < deadline:
        time.sleep(0.1)
    assert peer.cpu_seconds() - before <= 0.02


def test_a_module_that_cannot_be_loaded_says_so() -> None:
    with (
        RemotePeer("tests.benchmarks.no_such_peer", Path(sys.executable), threads=1) as remote,
        pytest.raises(PeerError, match="No module named"),
    ):
        remote.missing()
