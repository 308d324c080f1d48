"""The embedded store of a local run: started, handed on, stopped; and what a missing one does."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.embedded_store import start_store
from deployments.pool_deployment import load_engine
from kvstore.keys import load_root_key
from kvstore.redis.executables import ServerVersion
from pool.local_pool import LocalPool
from tests.deployments.conftest import served_config
from turnout.calls import GenerateCall
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams


def with_store(**settings: Any) -> TurnoutConfig:
    config = served_config()
    return config.model_copy(update={"kvstore": config.kvstore.model_copy(update=settings)})


def test_replicas_get_its_address_and_a_key_of_its_own() -> None:
    before = with_store(url="embedded")
    config, store = start_store(before)
    assert store is not None
    try:
        assert store.server.running
        assert config.kvstore.has_address
        assert config.kvstore.root_key_file is not None
        key = Path(config.kvstore.root_key_file)
        assert len(load_root_key(key)) == 32
        assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert before.model_copy(update={"kvstore": config.kvstore}) == config
    finally:
        store.stop()
    assert not store.server.running
    assert not store.folder.exists()


async def test_a_pool_that_is_loaded_with_it_uses_it() -> None:
    config, store = start_store(with_store(url="embedded", chunk_tokens=16, admission="always", fetch_timeout_s=20.0))
    assert store is not None
    engine = config.engine.model_copy(update={"threads": torch.get_num_threads()})
    try:
        pool = load_engine("real", config.model_copy(update={"engine": engine}))
        assert isinstance(pool, LocalPool)
        sampling = SamplingParams(temperature=0.0, max_tokens=2)
        async for _ in pool.generate(GenerateCall("r", "real-small", sampling, prompt=tuple(range(100, 140)))):
            pass
        shared = pool.engines["real-small"].shared
        assert shared is not None
        assert await shared.store.settle(30.0)
        cache = pool.stats().cache
        assert cache is not None
        assert (cache.health, cache.writes, cache.faults) == ("ok", 2, {})
        assert cache.servers == (f"{store.server.version} (embedded)",)
        await pool.close()
    finally:
        store.stop()


@pytest.mark.parametrize("url", ["off", "redis://elsewhere:6379"])
def test_only_embedded_starts_one(url: str) -> None:
    config = with_store(url=url)
    assert start_store(config) == (config, None)


@pytest.mark.parametrize(("numbers", "warned"), [((6, 2, 14), True), ((6, 2, 20), False)])
def test_a_server_with_known_holes_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, numbers: tuple[int, int, int], warned: bool
) -> None:
    monkeypatch.setattr("kvstore.redis.embedded.read_version", lambda _: ServerVersion("redis", numbers))
    with caplog.at_level(logging.WARNING):
        _, store = start_store(with_store(url="embedded"))
    assert store is not None
    store.stop()
    assert ("redis 6.2.14, which lacks the fixes for CVE-2024-31449" in caplog.text) == warned


def test_without_a_server_everything_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> Path:
        raise TurnoutError(Code.UNAVAILABLE, "there is no redis-server")

    monkeypatch.setattr("kvstore.redis.embedded.find_server", missing)
    config = with_store(url="embedded")
    with caplog.at_level(logging.WARNING):
        assert start_store(config) == (config, None)
    assert "there is no redis-server" in caplog.text


@pytest.mark.parametrize("faulty", ["deployments.embedded_store.tempfile.mkdtemp", "kvstore.keys.write_root_key"])
def test_without_a_folder_for_it_everything_works_too(
    faulty: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "/some/place")

    monkeypatch.setattr(faulty, refuse)
    config = with_store(url="embedded")
    with caplog.at_level(logging.WARNING):
        assert start_store(config) == (config, None)
    [line] = caplog.messages
    assert line == "without the embedded prefix store: [Errno 28] No space left on device: '/some/place'"
