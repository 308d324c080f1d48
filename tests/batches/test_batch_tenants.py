"""Batches of tenants: their lines are told, and their files take, no more than the tenants are allowed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from deployments.access.callers import Caller
from deployments.batches.lines import answer_line, read_line
from deployments.batches.records import BatchRecord
from deployments.batches.store import BatchStore
from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.service import GenerationService
from tests.batches.house import jsonl, line
from tests.deployments.access.kit import house, house_config, write_house
from turnout.batches_config import BatchesConfig
from turnout.calls import GenerateCall
from turnout.errors import Code, TurnoutError


@pytest.mark.parametrize("model", ["none", ""])
async def test_a_line_of_no_known_model_tells_of_no_pool_that_its_tenant_may_not_ask(
    tmp_path: Path, model: str
) -> None:
    def attributed(call: GenerateCall) -> GenerateCall:
        return replace(call, tenant="narrow", priority="batch")

    with house(tmp_path, {"narrow": {"pools": ["demo"]}}) as tenants:
        asked = read_line(1, jsonl([line("a", model=model)]))
        caller = Caller("narrow", tenants.service.callers.limits("narrow"))
        with pytest.raises(TurnoutError, match="demo") as refused:
            await answer_line(tenants.service, asked, "r", attributed, 0, caller)
    assert refused.value.field == "model"
    assert "other" not in refused.value.message
    assert "-2" not in refused.value.message


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[TestClient, dict[str, str]]]:
    """A server with batches that nobody works on, and the keys of its tenants."""
    keys = write_house(tmp_path, {"three": {"requests_per_minute": 3}, "one": {"concurrency": 1}, "free": {}})
    config = house_config(tmp_path).model_copy(update={"batches": BatchesConfig(folder=str(tmp_path / "batches"))})
    service = GenerationService(config, {}, Metrics())
    try:
        yield TestClient(build_http(service)), keys
    finally:
        service.close()


def upload(client: TestClient, key: str, data: bytes = b"{}") -> Any:
    head = {"Authorization": f"Bearer {key}"}
    return client.post("/v1/files", headers=head, data={"purpose": "batch"}, files={"file": ("a", data)})


def create(client: TestClient, key: str, file_id: str) -> Any:
    wanted = {"input_file_id": file_id, "endpoint": "/v1/completions"}
    return client.post("/v1/batches", headers={"Authorization": f"Bearer {key}"}, json=wanted)


def test_what_is_to_be_kept_counts_as_a_request_and_looking_at_it_does_not(
    web: tuple[TestClient, dict[str, str]],
) -> None:
    client, keys = web
    file_id = upload(client, keys["three"]).json()["id"]
    assert [create(client, keys["three"], file_id).status_code for _ in range(2)] == [200, 200]
    for refused in (create(client, keys["three"], file_id), upload(client, keys["three"])):
        assert (refused.status_code, refused.json()["error"]["param"]) == (429, "tenant.requests_per_minute")
        assert int(refused.headers["retry-after"]) > 1
    head = {"Authorization": f"Bearer {keys['three']}"}
    for path in ("/v1/batches", "/v1/files", f"/v1/files/{file_id}/content"):
        assert [client.get(path, headers=head).status_code for _ in range(4)] == [200] * 4
    [first, _] = client.get("/v1/batches", headers=head).json()["data"]
    assert client.post(f"/v1/batches/{first['id']}/cancel", headers=head).status_code == 200
    assert upload(client, keys["free"]).status_code == 200


def test_an_upload_takes_one_of_its_tenants_places_while_it_comes(
    web: tuple[TestClient, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, keys = web
    statuses, check_room = [], BatchStore.check_room

    def meanwhile(store: BatchStore, tenant: str) -> None:
        monkeypatch.setattr(BatchStore, "check_room", check_room)
        statuses.append(upload(client, keys["one"]).status_code)
        check_room(store, tenant)

    monkeypatch.setattr(BatchStore, "check_room", meanwhile)
    statuses.append(upload(client, keys["one"]).status_code)
    assert statuses == [429, 200]
    assert upload(client, keys["one"]).status_code == 200


def record_of(number: int, **changes: Any) -> BatchRecord:
    now = int(time.time())
    values: dict[str, Any] = {
        "id": f"batch_{number:024x}",
        "tenant": "acme",
        "key_id": "k",
        "seed": 0,
        "endpoint": "/v1/completions",
        "input_file_id": "file-" + "0" * 24,
        "completion_window": "24h",
        "created_at": now + number,
        "expires_at": now + 86400,
    }
    return BatchRecord.model_validate({**values, **changes})


def refused_bytes(caught: pytest.ExceptionInfo[TurnoutError]) -> bool:
    return caught.value.code is Code.RESOURCE_EXHAUSTED and "of 10 bytes" in caught.value.message


def test_a_tenants_files_take_no_more_bytes_than_it_may_keep_answers_included(tmp_path: Path) -> None:
    store = BatchStore(BatchesConfig(folder=str(tmp_path), max_bytes=10))
    store.add_file("acme", "in", "batch", [b"four"])
    store.add_file("acme", "out", "batch_output", [b"fours"])
    with pytest.raises(TurnoutError) as caught:
        store.add_file("acme", "in", "batch", [b"x", b"y"])
    assert refused_bytes(caught)
    store.add_file("acme", "in", "batch", [b"x"])
    with pytest.raises(TurnoutError) as caught:
        store.check_room("acme")
    assert refused_bytes(caught)
    with pytest.raises(TurnoutError) as caught:
        store.add_batch(record_of(1))
    assert refused_bytes(caught)
    store.add_file("acme", "out", "batch_output", [b"an answer that was paid for"])
    store.add_file("other", "in", "batch", [b"x" * 10])
    assert len(store.files("acme")) == 4
    for each in store.files("acme"):
        store.delete_file("acme", each.id)
    store.check_room("acme")


def test_two_uploads_at_once_do_not_pass_together_what_one_may(tmp_path: Path) -> None:
    store = BatchStore(BatchesConfig(folder=str(tmp_path), max_bytes=10))

    def slowly() -> Iterator[bytes]:
        yield b"six  b"
        store.add_file("acme", "second", "batch", [b"four"])
        yield b"!"

    with pytest.raises(TurnoutError) as caught:
        store.add_file("acme", "first", "batch", slowly())
    assert refused_bytes(caught)
    assert [each.filename for each in store.files("acme")] == ["second"]


def test_of_batches_that_have_ended_the_newest_are_kept(tmp_path: Path) -> None:
    store = BatchStore(BatchesConfig(folder=str(tmp_path), max_ended=2, max_batches=2))
    for number in range(6):
        record = record_of(number)
        store.add_batch(record)
        store.save_batch(record.model_copy(update={"status": "cancelled"}))
    store.add_batch(record_of(6))
    store.add_batch(record_of(7))
    kept = [each.id for each in store.batches("acme")]
    assert kept == [record_of(number).id for number in (7, 6, 5, 4)]
    folder = store.work_folder(record_of(0)).parent
    assert {path.stem for path in folder.iterdir()} == set(kept), "the work on what was forgotten is left"
