"""The access list of the store's user: all that the code needs, and nothing else, on every server that is installed."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import kvstore
from kvstore import scripts
from kvstore.admin import StoreAdmin
from kvstore.base import StoreFault
from kvstore.keys import Keyring
from kvstore.redis.embedded import LOADER, EmbeddedServer
from kvstore.redis.executables import installed_servers
from kvstore.redis.nodes import Access, Connector, NodeAddress
from kvstore.redis.redis_store import RedisStore
from kvstore.redis.resp import ErrorReply, command
from kvstore.redis.rights import ALL_NEEDED, IN_CLUSTERS, IN_SCRIPTS, USEFUL, words_needed
from kvstore.tenants.registry import Prefix
from tests.kvstore.prefixes import CHUNK, FOUR, ROOT, Engine, config, shared, soon, tokens
from tests.kvstore.rights import admin_client, denied
from turnout.free_ports import free_port

SERVERS = installed_servers()
# Before a connection may do anything; every user has these.
GREETING = {"AUTH", "SELECT"}
STARTING = {"SCRIPT", "ACL"}  # by the user who loads the scripts into an embedded server
FORBIDDEN = [
    ("CONFIG", "GET", "dir"),
    ("CONFIG", "SET", "dir", "/tmp"),
    ("DEBUG", "SLEEP", 0),
    ("EVAL", "return 1", 0),
    ("EVAL_RO", "return 1", 0),
    ("SCRIPT", "LOAD", "return 1"),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "LOAD", "#!lua name=f\nredis.register_function('f', function() return 1 end)"),
    ("FCALL", "f", 0),
    ("KEYS", "*"),
    ("SCAN", 0),
    ("RANDOMKEY",),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("SHUTDOWN", "NOSAVE"),
    ("SAVE",),
    ("REPLICAOF", "127.0.0.1", 1),
    ("MIGRATE", "127.0.0.1", 1, "to1:a", 0, 1),
    ("MODULE", "LOAD", "/tmp/x.so"),
    ("ACL", "SETUSER", "default", "+@all"),
    ("ACL", "LIST"),
    ("CLIENT", "LIST"),
    ("MONITOR",),
    ("PUBLISH", "c", "m"),
    ("SUBSCRIBE", "c"),
    ("RENAME", "to1:a", "to1:b"),
    ("DUMP", "to1:a"),
    ("OBJECT", "FREQ", "to1:a"),
    ("GETEX", "other:a"),
    ("SET", "other:a", "1"),
    ("UNLINK", "other:a"),
    ("ZRANGE", "other:a", 0, 1),
    ("EVALSHA", "0" * 40, 1, "other:a"),
]


@pytest.fixture(scope="module", params=SERVERS, ids=str)
def every_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("s"), 64 << 20, executable=request.param, admin=True) as server:
        yield server


def sent_by(tree: ast.AST) -> set[str]:
    """Commands in a module: the first word of each that is put together."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        first = node.args[0]
        words = first.elts[:1] if name in {"per_key", "append"} and isinstance(first, ast.Tuple) else [first]
        if name in {"command", "per_key", "append"} and words and isinstance(words[0], ast.Constant):
            word = words[0].value
            text = word.decode() if isinstance(word, bytes) else str(word)
            found |= {text} if text.isupper() else set()
    return found


def modules() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text()) for path in Path(kvstore.__file__).parent.rglob("*.py")}


def test_the_list_is_what_the_code_sends() -> None:
    sent = set().union(*map(sent_by, modules().values())) | {"SET"}  # put together by `set_once`
    allowed = {word.partition("|")[0] for word in (*ALL_NEEDED, *IN_CLUSTERS, *USEFUL)}
    assert sent - GREETING - STARTING == allowed
    assert sent_by(ast.parse("c.send([command('KEYS', '*')], 1, 2)\nper_key((b'TTL',), keys)")) == {"KEYS", "TTL"}


def test_the_list_is_what_the_scripts_call() -> None:
    called = {name.upper() for text in scripts.SCRIPTS for name in re.findall(r"redis\.p?call\('(\w+)'", text)}
    assert called <= set(words_needed())
    assert set(IN_SCRIPTS) <= called
    assert sum("redis.call" in text or "redis.pcall" in text for text in scripts.SCRIPTS) == len(scripts.SCRIPTS)
    assert not [
        text for text in scripts.SCRIPTS if re.search(r"redis\.p?call\([^']", text)
    ]  # nor by a name it is given


def test_every_script_of_the_code_is_loaded() -> None:
    texts = {name: text for name, text in vars(scripts).items() if name.isupper() and isinstance(text, str)}
    assert set(texts.values()) == set(scripts.SCRIPTS)
    used = set()
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "script" and path.name != "fakes.py":
                assert isinstance(node.args[0], ast.Name), f"{path}:{node.lineno}"
                used.add(node.args[0].id)
    assert used == set(texts)


async def test_all_that_the_store_does_is_allowed(every_server: EmbeddedServer) -> None:
    """Requests of two processes, quotas, registered prefixes, pins, accounts and the administration of them."""
    with closing(RedisStore(every_server.address)) as store:
        settings = {"tenants": {"alice": {"quota_bytes": 20_000}}, "codecs": ["raw", "int8"]}
        desk = StoreAdmin(config(**settings), store, Keyring(ROOT))
        desk.register(Prefix("head", "public", "", {"t": tuple(FOUR)}))
        with shared(store, **settings) as one, shared(store, **settings) as other:
            for start in range(6):  # more than the quota holds
                await Engine(one).serve(tokens(4 * CHUNK + 1, start))
            await Engine(one, "bob").serve(FOUR)
            found = await Engine(other, "bob").serve(FOUR)
            assert [*found.tiers] == ["redis"] * 4
            one.maintenance.settle_accounts()  # type: ignore[union-attr]
            one.maintenance.keep()  # type: ignore[union-attr]
            one.maintenance.sweep()  # type: ignore[union-attr]
            assert one.of("m").stats().servers == (f"{every_server.version} (embedded)",)
            assert one.of("m").stats().faults == {}
        assert desk.pin(Prefix("kept", "private", "bob", {"t": tuple(FOUR)})) > 0
        desk.unregister("head")
        assert {row.tenant for row in desk.report().tenants} == {"alice", "bob"}
        assert desk.flush(desk.namespaces()) > 0
        store.script(scripts.DROP, [b"to1:{reg}:names"], [], soon())
        assert store.script(scripts.FREE, [b"to1:lk:none"], ["token"], soon()) == 0
        assert store.health() == "ok"
    assert denied(every_server) == set()


@pytest.mark.parametrize("words", FORBIDDEN, ids=lambda words: " ".join(map(str, words))[:30])
def test_everything_else_is_refused(every_server: EmbeddedServer, words: tuple[str | int, ...]) -> None:
    connection = Connector(every_server.address.access)(every_server.address.endpoints[0], soon())
    with closing(connection):
        connection.send([command(*words)], 1, soon())
        reply = connection.reply(soon())
    assert isinstance(reply, ErrorReply)
    # Functions came with Redis 7, and what is not enabled there is refused to every user.
    assert reply.code == "NOPERM" or re.search(r"unknown command|command not allowed", reply.text)
    with admin_client(every_server) as client:
        client.acl_log_reset()


def test_a_command_outside_the_list_is_seen_by_the_tests(every_server: EmbeddedServer) -> None:
    """As by the one above, and at the end of every module of tests that shares a server."""
    with closing(RedisStore(every_server.address)) as store, pytest.raises(StoreFault, match="NOPERM"):
        store.script("return redis.call('get', 'to1:a')", [], [], soon())
    assert {name.partition("|")[0] for name in denied(every_server)} == {"eval"}
    with admin_client(every_server) as client:
        client.acl_log_reset()


def test_the_user_who_loads_scripts_is_gone(every_server: EmbeddedServer) -> None:
    with admin_client(every_server) as client:
        assert client.acl_users() == ["admin", "default"]
    with pytest.raises(StoreFault, match="WRONGPASS"):
        Connector(Access(LOADER, "anything"))(every_server.address.endpoints[0], time.monotonic() + 5)


def test_without_an_administrator_there_is_only_the_user_of_the_store(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, 16 << 20) as server:
        users = [line for line in (tmp_path / "server.conf").read_text().splitlines() if line.startswith("user ")]
        assert [line.split()[1] for line in users] == ["default", LOADER]
        assert server.admin_url is None
        assert not [line for line in users if ">" in line]  # no password is on the disk


def test_a_node_that_does_not_answer_is_left_out_of_the_servers(
    every_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(RedisStore(every_server.address)) as store:
        topology, named = store.routes.topology, store.servers(soon())
        nodes = [NodeAddress("127.0.0.1", free_port()), *topology.nodes()]
        monkeypatch.setattr(topology, "nodes", lambda: nodes)
        assert store.servers(soon()) == named == [f"{every_server.version} (embedded)"]
