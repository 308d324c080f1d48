"""Responses that are kept: found again by every process of theirs, by no other tenant, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from openai.types.responses import ResponseItemList

from deployments.access.keys import make_key
from deployments.access.tenants_file import Tenant, Tenants, write_tenants
from deployments.responses.places import LEAST_BYTES, FolderPlace, Place, RedisPlace
from deployments.responses.store import KeptResponse, ResponseStore, item_id
from kvstore.keys import Keyring
from kvstore.redis.embedded import EmbeddedServer
from kvstore.redis.nodes import parse_url
from kvstore.redis.redis_store import RedisStore
from tests.deployments.responses.kit import PATH, answer, events, kept_in, refusal, says, scripted, serving
from turnout.access_config import AccessConfig
from turnout.calls import ChatMessage
from turnout.errors import Code, TurnoutError
from turnout.responses_config import ResponsesConfig

ROOT = bytes(range(32))
MOST = 1 << 16
Opened = Callable[..., Place]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("redis"), 64 << 20, admin=True) as running:
        yield running


@pytest.fixture(params=["folder", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    """Opens the same place again and again, as every process does."""
    places: list[Place] = []

    def open_one(**settings: float) -> Place:
        config = ResponsesConfig.model_validate({"max_bytes": MOST, **settings})
        if request.param == "folder":
            places.append(FolderPlace(str(tmp_path / "kept"), config))
        else:
            address = parse_url(request.getfixturevalue("server").url)
            places.append(RedisPlace(RedisStore(address), Keyring(ROOT), config))
        return places[-1]

    yield open_one
    for place in places:
        place.close()


def _id(number: int) -> str:
    return f"resp_{number:032x}"


def _kept(number: int, *history: int, text: str = "secret words") -> KeptResponse:
    said = {"id": item_id("msg", _id(number), 0), "type": "message", "role": "assistant", "content": text}
    asked = {"id": item_id("msg", _id(number), 0x8000), "type": "message", "role": "user", "content": "hi"}
    return KeptResponse({"id": _id(number), "output": [said]}, (asked,), tuple(map(_id, history)))


@contextmanager
def _absent() -> Iterator[None]:
    with pytest.raises(TurnoutError) as caught:
        yield
    assert caught.value.code is Code.NOT_FOUND


def test_every_process_finds_what_one_has_kept_and_no_other_tenant_does(opened: Opened) -> None:
    one, other = ResponseStore(opened(), Keyring(ROOT)), ResponseStore(opened(), Keyring(ROOT))
    one.save("acme", _kept(1))
    one.save("acme", _kept(2, 1))
    assert other.load("acme", _id(1)) == _kept(1)
    assert other.conversation("acme", _id(2), "f") == [_kept(1), _kept(2, 1)]
    found = other.referenced("acme", [_kept(1).items[1]["id"], "msg_foreign"])
    assert found[_kept(1).items[1]["id"]] == _kept(1).items[1]
    for owner in ("acme#1", "other"):
        with _absent():
            other.load(owner, _id(1))
        with _absent():
            other.delete(owner, _id(1))
        assert other.referenced(owner, [_kept(1).items[1]["id"]]) == {}
    for strange in ("", "resp_1", "../x", _id(1) + "\n"):
        with _absent():
            other.load("acme", strange)
    other.delete("acme", _id(1))
    with _absent():
        one.load("acme", _id(1))
    with _absent():
        one.conversation("acme", _id(2), "f")
    assert one.load("acme", _id(2)) == _kept(2, 1), "it can still be read"


def test_what_lies_there_says_nothing_and_opens_for_its_tenant_and_id_alone(opened: Opened) -> None:
    place = opened()
    store = ResponseStore(place, Keyring(ROOT))
    store.save("bee", _kept(3))
    value = place.get("bee", _id(3))
    assert value is not None
    assert b"secret" not in value
    for owner, number in (("wasp", 3), ("bee", 4)):  # as one who can write there may try
        place.put(owner, _id(number), value)
        with _absent():
            store.load(owner, _id(number))
    with _absent():
        ResponseStore(place, Keyring(b"\1" * 32)).load("bee", _id(3))


def test_the_longest_unused_go_where_a_tenant_keeps_too_much(opened: Opened) -> None:
    place = opened()
    place.put("other", _id(0), b"x")
    room = MOST // LEAST_BYTES
    for number in range(room):
        place.put("many", _id(number), b"x")
    assert place.get("many", _id(0)) == b"x", "and now it is not the longest unused"
    for number in range(room, room + 8):
        place.put("many", _id(number), b"x")
    left = [number for number in range(1, room + 8) if place.get("many", _id(number)) is not None]
    assert place.get("many", _id(0)) == b"x"
    assert left[-1] == room + 7
    assert room - 9 <= len(left) < room
    assert 1 not in left
    assert place.get("other", _id(0)) == b"x"


def test_a_file_that_is_not_used_any_more_is_forgotten(tmp_path: Path) -> None:
    now = [1000.0]
    place = FolderPlace(str(tmp_path), ResponsesConfig(retention_s=10), lambda: now[0])
    place.put("old", _id(1), b"x")
    for _ in range(3):  # each use begins the time anew
        now[0] += 9
        assert place.get("old", _id(1)) == b"x"
    now[0] += 11
    assert place.get("old", _id(1)) is None


def test_redis_is_asked_to_forget_what_is_not_used_any_more(server: EmbeddedServer) -> None:
    place = RedisPlace(RedisStore(parse_url(server.url)), Keyring(ROOT), ResponsesConfig(retention_s=1000))
    place.put("old", _id(1), b"x")
    assert server.admin_url is not None
    with redis.Redis.from_url(server.admin_url) as client:
        key = place._key("old", _id(1))
        assert 0 < client.pttl(key) <= 1_000_000
        client.pexpire(key, 500_000)
        assert place.get("old", _id(1)) == b"x"
        assert 500_000 < client.pttl(key) <= 1_000_000
    place.close()


def test_a_sweep_removes_files_of_tenants_that_do_not_come_back(tmp_path: Path) -> None:
    now = [1000.0]
    place = FolderPlace(str(tmp_path), ResponsesConfig(retention_s=10), lambda: now[0])
    place.put("a", _id(1), b"x")
    now[0] += 9
    place.put("b", _id(2), b"x")
    place.sweep()
    assert len(list(tmp_path.glob("*/resp_*"))) == 2
    now[0] += 2
    place.sweep()
    assert [path.name for path in tmp_path.glob("*/resp_*")] == [_id(2)]


async def test_a_conversation_goes_on_from_a_response_in_another_process(tmp_path: Path) -> None:
    first, second = scripted(says("Hello")), scripted(says("Bern"))
    async with serving(first, kept_in(tmp_path)) as one, serving(second, kept_in(tmp_path)) as two:
        begun = await answer(one, input="hi", instructions="Be brief.", metadata={"k": "v"})
        last = (await events(two, input="Where?", previous_response_id=begun["id"]))[-1]["response"]
        end = await answer(one, input="Sure?", previous_response_id=last["id"], store=False)
        assert (begun["store"], last["store"], end["store"]) == (True, True, False)
        assert (await two.get(f"{PATH}/{begun['id']}")).json() == begun
        assert (await one.get(f"{PATH}/{last['id']}")).json() == last
        assert (await one.get(f"{PATH}/{end['id']}")).status_code == 404
        assert second.calls[0].messages == (
            ChatMessage("user", "hi"), ChatMessage("assistant", "Hello"), ChatMessage("user", "Where?"),
        )  # fmt: skip
        assert first.calls[1].messages is not None
        assert [each.content for each in first.calls[1].messages] == ["hi", "Hello", "Where?", "Bern", "Sure?"]
        gone = await one.delete(f"{PATH}/{begun['id']}")
        assert gone.json() == {"id": begun["id"], "object": "response", "deleted": True}
        assert (await two.delete(f"{PATH}/{begun['id']}")).status_code == 404
        error = await refusal(two, previous_response_id=last["id"])
        assert (error["status"], error["param"]) == (404, "previous_response_id")


async def test_items_of_a_request_are_listed_in_pages_and_can_be_referred_to(tmp_path: Path) -> None:
    backend = scripted(says("Hello"))
    asked = [{"role": "user", "content": str(number)} for number in range(3)]
    async with serving(backend, kept_in(tmp_path)) as client:
        got = await answer(client, input=asked)
        listed = f"{PATH}/{got['id']}/input_items"
        page = (await client.get(listed, params={"order": "asc", "limit": 2})).json()
        ResponseItemList.model_validate(page)
        assert ([each["content"][0]["text"] for each in page["data"]], page["has_more"]) == (["0", "1"], True)
        rest = (await client.get(listed, params={"order": "asc", "after": page["last_id"]})).json()
        assert ([each["content"][0]["text"] for each in rest["data"]], rest["has_more"]) == (["2"], False)
        newest = (await client.get(listed)).json()["data"]
        assert [each["content"][0]["text"] for each in newest] == ["2", "1", "0"]
        said = {"type": "item_reference", "id": got["output"][0]["id"]}
        await answer(client, input=[{"id": newest[0]["id"]}, said, {"role": "user", "content": "and?"}])
        error = await refusal(client, input=[{"type": "item_reference", "id": "msg_x"}])
    assert backend.calls[1].messages is not None
    assert [(each.role, each.content) for each in backend.calls[1].messages] == [
        ("user", "2"), ("assistant", "Hello"), ("user", "and?"),
    ]  # fmt: skip
    assert (error["status"], error["param"]) == (404, "input.0.id")


async def test_a_response_of_another_tenant_is_not_there(tmp_path: Path) -> None:
    keys, tenants = {}, {}
    for name in ("acme", "other"):
        keys[name], record = make_key()
        tenants[name] = Tenant(keys=(record,))
    write_tenants(tmp_path / "tenants.yaml", Tenants(tenants=tenants))
    access = AccessConfig(tenants_file=str(tmp_path / "tenants.yaml"))
    config = kept_in(tmp_path).model_copy(update={"access": access})
    async with serving(scripted(says("Hello")), config) as client:
        client.headers["authorization"] = f"Bearer {keys['acme']}"
        got = await answer(client)
        at = f"{PATH}/{got['id']}"
        client.headers["authorization"] = f"Bearer {keys['other']}"
        for method, path in (("GET", at), ("GET", f"{at}/input_items"), ("DELETE", at)):
            assert (await client.request(method, path)).status_code == 404
        assert (await refusal(client, previous_response_id=got["id"]))["status"] == 404
        reference = [{"type": "item_reference", "id": got["output"][0]["id"]}]
        assert (await refusal(client, input=reference))["status"] == 404
        client.headers["authorization"] = f"Bearer {keys['acme']}"
        assert (await client.get(at)).json() == got


async def test_an_answer_is_not_lost_with_its_place(tmp_path: Path) -> None:
    async with serving(scripted(says("Hello")), kept_in(tmp_path)) as client:
        begun = await answer(client)
        (tmp_path / "responses").rename(tmp_path / "away")
        (tmp_path / "responses").write_text("no folder", encoding="utf-8")
        got = await answer(client)
        assert (got["status"], got["store"]) == ("completed", False)
        assert (await client.get(f"{PATH}/{begun['id']}")).status_code in (404, 503)


async def test_a_server_that_keeps_nothing_says_so() -> None:
    async with serving(scripted(says("Hello"))) as client:
        got = await answer(client, store=True)
        assert got["store"] is False
        missing = await client.get(f"{PATH}/{got['id']}")
    assert missing.status_code == 404
    assert "keeps no responses" in missing.json()["error"]["message"]
