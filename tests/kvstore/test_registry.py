from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from kvstore.admin import StoreAdmin
from kvstore.base import StoreFault
from kvstore.encodings import Encodings
from kvstore.fakes import FaultyStore, Plan
from kvstore.keys import Keyring
from kvstore.redis.redis_store import RedisStore
from kvstore.tenants.encrypted_document import SealBroken, Sealer
from kvstore.tenants.manifest import MODELS, check_root_key, enrolled
from kvstore.tenants.registry import PLACE, VERSION, Prefix, Registry, namespace_of
from kvstore.tenants.usage import NAMES, Accounts
from kvstore.value import VERSION as VALUES
from tests.kvstore.prefixes import CHUNK, FOUR, LAYOUT, ROOT, Engine, config, fill, shared, soon, tokens, until
from turnout.errors import TurnoutError
from turnout.kvstore_config import TenantSharing
from turnout.types import Namespace, Sharing, SharingPolicy

OTHER = bytes(32)
SET = "return redis.call('set', KEYS[1], ARGV[1])"
GET = "return redis.call('get', KEYS[1])"
TTL = "return redis.call('pttl', KEYS[1])"


def registry(store: RedisStore, root: bytes = ROOT, tokenizer: str = "t") -> Registry:
    return Registry(store, Sealer(Keyring(root)), tokenizer, lambda text: [ord(letter) for letter in text])


def prefix(name: str, *ids: int) -> Prefix:
    return Prefix(name, "public", "", {"t": ids})


def names(of: Registry) -> list[str]:
    return [each.name for each in of.prefixes]


def test_others_read_what_one_registered(store: RedisStore) -> None:
    writer, reader = registry(store), registry(store)
    writer.put(prefix("a", 1, 2), soon())
    writer.put(Prefix("b", "group", "team", {"t": (3,)}, "text"), soon())
    assert reader.refresh(soon())
    assert reader.prefixes == writer.prefixes
    assert not reader.refresh(soon())
    writer.put(prefix("a", 7), soon())
    assert writer.remove("b", soon()).id == "team"
    assert reader.refresh(soon())
    assert [(each.name, reader.tokens_of(each)) for each in reader.prefixes] == [("a", [7])]


def test_another_tokenizer_reads_the_text(store: RedisStore) -> None:
    registry(store).put(Prefix("a", "public", "", {"t": (1, 2)}, "AB"), soon())
    registry(store).put(prefix("b", 1), soon())
    other = registry(store, tokenizer="other")
    other.refresh(soon())
    assert [other.tokens_of(each) for each in other.prefixes] == [[65, 66], []]


def test_what_nobody_registered_cannot_be_removed(store: RedisStore) -> None:
    it = registry(store)
    it.put(prefix("a", 1), soon())
    with pytest.raises(TurnoutError, match="'x' is not known; available: a"):
        it.remove("x", soon())


def test_many_who_register_at_once_all_succeed(store: RedisStore) -> None:
    def register(index: int) -> None:
        registry(store).put(prefix(str(index), index), soon())

    threads = [threading.Thread(target=register, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = registry(store)
    last.refresh(soon())
    assert sorted(names(last)) == ["0", "1", "2", "3"]


def test_who_lacks_the_root_key_cannot_register(store: RedisStore, caplog: pytest.LogCaptureFixture) -> None:
    honest = registry(store)
    honest.put(prefix("a", 1), soon())
    with caplog.at_level(logging.ERROR):
        registry(store, OTHER).put(prefix("evil", 1), soon())
        assert not honest.refresh(soon())
    assert names(honest) == ["a"]
    assert "not written under this root key" in caplog.text


@pytest.mark.parametrize("spoil", [b"", b"short", b"x" * 200])
def test_a_spoiled_document_changes_nothing(store: RedisStore, spoil: bytes) -> None:
    honest = registry(store)
    honest.put(prefix("a", 1), soon())
    store.script(SET, [PLACE], [spoil], soon())
    store.script(SET, [VERSION], [b"77"], soon())
    assert not honest.refresh(soon())
    assert names(honest) == ["a"]


def test_a_fault_between_the_version_and_the_document_is_made_good(store: RedisStore) -> None:
    registry(store).put(prefix("a", 1), soon())
    faulty = FaultyStore(store, Plan(faults=(None, "unreachable")))
    reader = Registry(faulty, Sealer(Keyring(ROOT)), "t")
    with pytest.raises(StoreFault):
        reader.refresh(soon())
    faulty.plan = Plan()
    assert reader.refresh(soon())
    assert names(reader) == ["a"]


def test_an_older_document_is_refused(store: RedisStore) -> None:
    honest = registry(store)
    honest.put(prefix("a", 1), soon())
    old = store.script(GET, [PLACE], [], soon())
    honest.remove("a", soon())
    store.script(SET, [PLACE], [old], soon())
    store.script(SET, [VERSION], [b"99"], soon())
    assert not honest.refresh(soon())
    assert names(honest) == []
    newcomer = registry(store)
    newcomer.refresh(soon())
    assert names(newcomer) == []  # the newer one was put back


def test_documents_are_bound_to_their_place() -> None:
    sealer = Sealer(Keyring(ROOT))
    sealed = sealer.seal(b"here", b"text")
    assert sealer.open(b"here", sealed) == b"text"
    for place, value in ((b"there", sealed), (b"here", sealed[:-1]), (b"here", b"")):
        with pytest.raises(SealBroken):
            sealer.open(place, value)


def test_nothing_of_a_text_or_a_name_can_be_read_in_redis(store: RedisStore) -> None:
    registry(store).put(Prefix("hush", "group", "secretteam", {"t": (5,)}, "confidential"), soon())
    Accounts(store, Keyring(ROOT), Sealer(Keyring(ROOT))).name([Namespace("private", "mallory")], soon())
    raw = store.script(GET, [PLACE], [], soon())
    raw += b"".join(store.script("return redis.call('hgetall', KEYS[1])", [NAMES], [], soon()))
    assert not [word for word in (b"hush", b"secretteam", b"confidential", b"mallory", b"private") if word in raw]


def test_what_is_registered_never_expires(store: RedisStore) -> None:
    registry(store).put(prefix("a", 1), soon())
    with shared(store):
        assert [store.script(TTL, [key], [], soon()) for key in (PLACE, VERSION, MODELS)] == [-1, -1, -1]


def test_another_root_key_is_refused_at_start(store: RedisStore) -> None:
    with shared(store), shared(store):
        pass
    refusal = r"kvstore\.root_key_file: this Redis was filled under another root key"
    with pytest.raises(TurnoutError, match=refusal), shared(store, keyring=Keyring(OTHER)):
        pass
    check_root_key(store, Sealer(Keyring(ROOT)), soon())


def test_asking_claims_nothing(store: RedisStore) -> None:
    check_root_key(store, Sealer(Keyring(OTHER)), soon(), claims=False)
    check_root_key(store, Sealer(Keyring(ROOT)), soon())
    with pytest.raises(TurnoutError):
        check_root_key(store, Sealer(Keyring(OTHER)), soon(), claims=False)


def test_models_are_enrolled_for_who_holds_the_root_key(store: RedisStore) -> None:
    with shared(store) as stores:
        encodings = stores.of("m").encodings
        (model,) = enrolled(store, Sealer(Keyring(ROOT)), soon())
        assert (model.name, model.chunk_tokens, model.codecs, model.tokenizer) == ("m", CHUNK, (f"raw.{VALUES}",), "t")
        assert bytes.fromhex(model.fingerprint) == encodings.fingerprint
        assert enrolled(store, Sealer(Keyring(OTHER)), soon()) == []


async def test_chunks_of_a_public_prefix_are_stored_at_once_and_kept(store: RedisStore) -> None:
    registry(store).put(prefix("system", *tokens(16)), soon())
    with shared(store, admission="second") as stores:
        engine = Engine(stores)
        await engine.serve(tokens(33))
        chain = engine.store.chain(stores.sharing("alice", tokens(33)))
        keys = [
            engine.store.encodings.keys(link, engine.store.encodings.all[0])[0] for link in chain.links(tokens(33), 4)
        ]
        assert store.count_prefix(keys, soon()) == 2
        await until(lambda: [store.script(TTL, [key], [], soon()) for key in keys[:2]] == [-1, -1])


async def test_accounts_are_kept_over_processes(store: RedisStore) -> None:
    for _ in range(2):
        with shared(store) as stores:
            await Engine(stores, "ann").serve(tokens(33))
    accounts = Accounts(store, Keyring(ROOT), Sealer(Keyring(ROOT)))
    counts = accounts.read("ann", soon())
    assert (counts.lookups, counts.hits, counts.tokens_asked, counts.tokens_found) == (2, 1, 64, 32)
    assert counts.bytes_written > 0
    assert Namespace("private", "ann") in accounts.names(soon())
    accounts.forget("ann", soon())
    assert accounts.read("ann", soon()).lookups == 0


def test_what_redis_lost_is_put_back_by_who_knows_it(store: RedisStore, caplog: pytest.LogCaptureFixture) -> None:
    registry(store).put(prefix("a", 1), soon())
    with shared(store) as stores:
        store.script("return redis.call('flushall')", [], [], soon())
        with caplog.at_level(logging.WARNING):
            stores.refresh()
        assert "put back" in caplog.text
        newcomer = registry(store)
        assert newcomer.refresh(soon())
        assert names(newcomer) == ["a"]
        newcomer.remove("a", soon())
        stores.refresh()
        stores.refresh()
        again = registry(store)
        again.refresh(soon())
        assert names(again) == []


def test_what_is_registered_on_an_emptied_redis_is_added_to_what_servers_know(store: RedisStore) -> None:
    knowing, other = registry(store), registry(store)
    for name in "abc":
        knowing.put(prefix(name, 1), soon())
    other.refresh(soon())
    store.script("return redis.call('flushall')", [], [], soon())
    registry(store).put(prefix("d", 1), soon())
    for each in (knowing, other):
        assert each.refresh(soon())
        assert sorted(names(each)) == ["a", "b", "c", "d"]
    newcomer = registry(store)
    newcomer.refresh(soon())
    assert sorted(names(newcomer)) == ["a", "b", "c", "d"]
    newcomer.remove("d", soon())
    knowing.refresh(soon())
    assert sorted(names(knowing)) == ["a", "b", "c"]


async def test_an_emptied_redis_knows_the_models_the_tenants_and_the_root_key_again(store: RedisStore) -> None:
    with shared(store) as stores:
        await Engine(stores, "ann").serve(FOUR)
        assert stores.maintenance is not None
        stores.maintenance.settle_accounts()
        store.script("return redis.call('flushall')", [], [], soon())
        await Engine(stores, "ann").serve(FOUR)
        stores.maintenance.keep()
        desk = StoreAdmin(config(), store, Keyring(ROOT))
        assert Namespace("private", "ann") in desk.namespaces()
        assert desk.flush(desk.of_tenant("ann")) == 4
        assert [model.name for model in enrolled(store, Sealer(Keyring(ROOT)), soon())] == ["m"]
        with pytest.raises(TurnoutError):
            check_root_key(store, Sealer(Keyring(OTHER)), soon())


def head(name: str, policy: str, count: int, *more: int) -> Prefix:
    """A prefix of the first tokens of FOUR and of others."""
    return Prefix(name, policy, "alice" if policy == "private" else "", {"t": (*FOUR[:count], *more)})


def lives(store: RedisStore, of: Prefix, where: Namespace | None = None) -> list[int]:
    """Milliseconds that the chunks of a prefix live, where they usually are or elsewhere; -1: for ever."""
    encodings = Encodings(Keyring(ROOT), LAYOUT, ("raw",), CHUNK)
    ids = list(of.tokens["t"])
    links = encodings.chain(Sharing(where or namespace_of(of))).links(ids, len(ids) // CHUNK)
    return [store.script(TTL, encodings.keys(link, encodings.all[0]), [], soon()) for link in links]


@pytest.mark.parametrize("policy", ["public", "private"])
async def test_what_a_new_prefix_of_the_same_name_replaces_expires_again(store: RedisStore, policy: str) -> None:
    old, new = head("a", policy, 2 * CHUNK), head("a", policy, CHUNK, *tokens(CHUNK, seed=3))
    registry(store).put(old, soon())
    await fill(store, FOUR)
    desk = StoreAdmin(config(), store, Keyring(ROOT))
    enter = desk.pin if policy == "private" else desk.register
    enter(old)
    assert lives(store, old) == [-1, -1]
    enter(new)
    kept, replaced = lives(store, old)  # the first chunk is of both
    assert kept == -1
    assert replaced > 0


async def test_pins_and_registrations_cannot_take_each_others_names(store: RedisStore) -> None:
    await fill(store, FOUR)
    desk = StoreAdmin(config(), store, Keyring(ROOT))
    desk.pin(head("mine", "private", CHUNK))
    desk.register(head("all", "public", 0, *tokens(CHUNK, seed=3)))
    before = desk.report().prefixes
    with pytest.raises(TurnoutError, match="'mine' is pinned already and cannot be registered too"):
        desk.register(head("mine", "public", 2 * CHUNK))
    with pytest.raises(TurnoutError, match="'all' is registered already and cannot be pinned too"):
        desk.pin(head("all", "private", 2 * CHUNK))
    assert desk.report().prefixes == before
    assert lives(store, head("mine", "private", CHUNK)) == [-1]


async def test_maintenance_has_chunks_of_a_prefix_that_vanished_expire_again(store: RedisStore, opened: Any) -> None:
    """It may have taken their limit away after the removal of the prefix had given it back."""
    pinned = head("a", "private", 2 * CHUNK)
    stores = opened(store)
    await Engine(stores).serve(FOUR)
    registry(store).put(pinned, soon())
    maintenance = stores.maintenance
    maintenance.stop()  # its thread: each task is run from here
    maintenance.keep()
    assert lives(store, pinned) == [-1, -1]
    registry(store).remove("a", soon())
    maintenance.keep()
    assert min(lives(store, pinned)) > 0


async def test_a_pin_keeps_chunks_where_the_tenants_file_has_them(store: RedisStore, opened: Any) -> None:
    """Maintenance knows nothing of that file: the pin says it, and pinned again it lets the others expire."""
    grouped = {"alice": TenantSharing(policy="group", group="team")}
    alone, team = SharingPolicy(policy="private"), Namespace("group", "team")
    stores = opened(store, tenants=grouped)
    for told in (None, alone):
        await Engine(stores, told=told).serve(FOUR)
    maintenance = stores.maintenance
    maintenance.stop()  # its thread: each task is run from here
    desk, pinned = StoreAdmin(config(tenants=grouped), store, Keyring(ROOT)), head("a", "private", 2 * CHUNK)
    assert desk.pin(pinned) == 2
    maintenance.keep()
    assert lives(store, pinned, team) == [-1, -1]
    assert min(lives(store, pinned)) > 0
    assert desk.pin(replace(pinned, sharing=alone)) == 2
    for _ in range(2):  # the first one finds that another is to be kept, and the second one that it still is
        maintenance.keep()
        assert lives(store, pinned) == [-1, -1]
        assert min(lives(store, pinned, team)) > 0


def test_pins_of_a_process_that_knew_no_sharing_are_read(store: RedisStore) -> None:
    writer = registry(store)
    older = head("a", "private", CHUNK)
    writer.put(replace(older, sharing=SharingPolicy(policy="group", group="team")), soon())
    document = json.loads(Sealer(Keyring(ROOT)).open(PLACE, store.script(GET, [PLACE], [], soon())))
    assert document["prefixes"][0].pop("sharing") == {"policy": "group", "group": "team"}
    store.script(SET, [PLACE], [Sealer(Keyring(ROOT)).seal(PLACE, json.dumps(document).encode())], soon())
    reader = registry(store)
    assert reader.refresh(soon())
    assert reader.prefixes == (older,)
