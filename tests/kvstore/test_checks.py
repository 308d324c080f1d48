"""What is said at start about a URL and the Redis behind it."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.redis import embedded
from kvstore.redis.checks import check_address
from kvstore.redis.executables import read_version
from kvstore.redis.nodes import Access, Address, Connector, NodeAddress, TlsFiles, parse_url
from kvstore.redis.rights import rules, rules_without_eval, words_needed
from kvstore.scripts import SCRIPTS
from tests.kvstore.servers import (
    RedisProcess,
    TlsFront,
    free_port,
    make_certificates,
    redis_cluster,
    redis_server,
    until,
)
from turnout.errors import TurnoutError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with redis_server(
        tmp_path_factory.mktemp("r"),
        "maxmemory 64mb",
        "maxmemory-policy volatile-ttl",
        "client-output-buffer-limit normal 64mb 32mb 10",
        f"user store on >hidden {rules()}",
        f"user blind on >hidden {rules()} -info -echo",
        "user plain on >hidden ~to1:* +get +getex +set +exists +pexpire +persist +unlink +eval +evalsha",
        "user reader on >hidden ~to1:* +getex +exists +info",
        "user nothing on >hidden",
    ) as process:
        yield process


GOOD = [
    ("redis://h", Address("single", (NodeAddress("h", 6379),))),
    ("redis://h:1/3", Address("single", (NodeAddress("h", 1),), Access(database=3))),
    ("redis://h:1?db=2", Address("single", (NodeAddress("h", 1),), Access(database=2))),
    ("redis://:p%40s%2F@h", Address("single", (NodeAddress("h", 6379),), Access(password="p@s/"))),
    ("redis://u:p:q@[::1]:7", Address("single", (NodeAddress("::1", 7),), Access("u", "p:q"))),
    ("redis://[::1]", Address("single", (NodeAddress("::1", 6379),))),
    ("rediss://h:1", Address("single", (NodeAddress("h", 1),), Access(tls=TlsFiles()))),
    ("unix:///run/a%20b.sock?db=1", Address("single", (NodeAddress(path="/run/a b.sock"),), Access(database=1))),
    ("unix://u:p@/run/s", Address("single", (NodeAddress(path="/run/s"),), Access("u", "p"))),
    (
        "redis+sentinel://u:p@a,b:5/name",
        Address("sentinel", (NodeAddress("a", 26379), NodeAddress("b", 5)), Access("u", "p"), "name"),
    ),
    (
        "rediss+cluster://a:1,b:2",
        Address("cluster", (NodeAddress("a", 1), NodeAddress("b", 2)), Access(tls=TlsFiles())),
    ),
    ("redis+cluster://[::1]:1,[::2]:2", Address("cluster", (NodeAddress("::1", 1), NodeAddress("::2", 2)))),
]
BAD = [
    ("http://h", "scheme 'http' is not known; allowed: off, embedded, redis://"),
    ("h:6379", "scheme 'h' is not known"),
    ("redis+magic://h", "scheme 'redis\\+magic' is not known"),
    ("unix+cluster:///s", "is not known"),
    ("redis://", "every server is host:port"),
    ("redis://h:0", "every server is host:port"),
    ("redis://h:99999", "every server is host:port"),
    ("redis://a,b", "names several servers"),
    ("redis://h/x", "the database is not a number"),
    ("redis://h?ttl=1", "option 'ttl' is not known; allowed after '\\?': db"),
    ("redis+sentinel://h:1", "needs the name of the service"),
    ("redis+cluster://h:1/3", "a cluster has no databases"),
    ("unix://s", "a unix socket is unix:///"),
    ("unix://host/s", "a unix socket is unix:///"),
    ("redis://:se/cret@h:1", "the database is not a number .*as %2F"),
    ("redis://:secret@h:1:secret", "every server is host:port"),
]


@pytest.mark.parametrize(("url", "address"), GOOD)
def test_urls_say_where_redis_is(url: str, address: Address) -> None:
    assert parse_url(url) == address


@pytest.mark.parametrize(("url", "says"), BAD)
def test_bad_urls_are_refused_by_name_and_keep_their_secrets(url: str, says: str) -> None:
    with pytest.raises(TurnoutError, match=says) as caught:
        parse_url(url)
    assert caught.value.field == "kvstore.url"
    assert "secret" not in str(caught.value)
    assert "cret" not in str(caught.value)


def test_passwords_come_from_the_url_or_a_file_and_are_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("hidden\n")
    address = parse_url("redis://u@h", password_file=str(path))
    assert address.access == Access("u", "hidden")
    assert "hidden" not in repr(address)
    assert parse_url("redis://u:other@h", password_file=str(path)).access.password == "other"
    path.write_text("")
    for bad in (path, tmp_path / "nobody"):
        with pytest.raises(TurnoutError, match=r"is empty|cannot be read") as caught:
            parse_url("redis://h", password_file=str(bad))
        assert caught.value.field == "kvstore.password_file"


def test_a_well_set_up_server_gets_no_warning(server: RedisProcess) -> None:
    found = check_address(parse_url(server.url))
    assert found.reachable
    assert found.warnings == ()
    assert found.versions == (str(read_version(embedded.find_server())),)
    with closing(server.client()) as client:
        assert client.keys("*") == []  # the check leaves nothing behind


@pytest.mark.parametrize(
    ("policy", "memory", "says"),
    [
        ("allkeys-lru", "64mb", "maxmemory-policy allkeys-lru, which also drops .* set maxmemory-policy volatile-ttl"),
        ("allkeys-random", "64mb", "quota counters, pinned and registered prefixes"),
        ("noeviction", "64mb", "noeviction: once its 64 MiB are full, nothing more is stored"),
        ("volatile-lru", "64mb", "volatile-ttl keeps about twice as much"),
        ("volatile-ttl", "0", "has no maxmemory"),
    ],
)
def test_eviction_that_loses_or_stops_is_said(server: RedisProcess, policy: str, memory: str, says: str) -> None:
    with closing(server.client()) as client:
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", memory)
        found = check_address(parse_url(server.url))
        client.config_set("maxmemory-policy", "volatile-ttl")
        client.config_set("maxmemory", "64mb")
    assert found.reachable
    (warning,) = found.warnings
    assert re.search(says, warning)


def test_unlimited_output_buffers_are_said(server: RedisProcess) -> None:
    with closing(server.client()) as client:
        client.config_set("client-output-buffer-limit", "normal 0 0 0")
        found = check_address(parse_url(server.url))
        client.config_set("client-output-buffer-limit", "normal 64mb 32mb 10")
    assert "client-output-buffer-limit normal 64mb 32mb 10" in found.warnings[0]


@pytest.mark.parametrize(
    ("user", "says"),
    [
        ("store:wrong@", "refused user 'store': WRONGPASS"),
        ("nobody:hidden@", "refused user 'nobody': WRONGPASS"),
        (":wrong@", "refused user 'default'"),
        ("reader:hidden@", r"user 'reader' may not run SET on keys to1:\*.*ACL SETUSER reader ~to1:\* .*\+getex"),
        ("plain:hidden@", "user 'plain' may not run HSET on keys"),
        ("nothing:hidden@", "user 'nothing' may not run SET"),
    ],
)
def test_wrong_passwords_and_missing_rights_are_refused_by_name(server: RedisProcess, user: str, says: str) -> None:
    with pytest.raises(TurnoutError, match=says) as caught:
        check_address(parse_url(f"redis://{user}{server.endpoint}"))
    assert caught.value.field == "kvstore.url"
    assert "hidden" not in str(caught.value)


def test_a_user_that_may_not_see_the_settings_is_told_what_was_not_checked(server: RedisProcess) -> None:
    found = check_address(parse_url(f"redis://blind:hidden@{server.endpoint}"))
    assert found.reachable
    assert found.versions == ()
    assert "user 'blind' may not run INFO" in found.warnings[0]


def test_the_rights_that_the_documentation_names_are_enough(server: RedisProcess) -> None:
    found = check_address(parse_url(f"redis://store:hidden@{server.endpoint}"))
    assert (found.reachable, found.warnings) == (True, ())
    page = (Path(__file__).parents[2] / "docs" / "kvstore.md").read_text(encoding="utf-8")
    assert f"ACL SETUSER turnout on >PASSWORD {rules()}\n" in page
    assert all(f"+{word.lower()}" in page for word in words_needed("cluster"))


def test_scripts_that_somebody_loaded_need_no_right_to_load_others(server: RedisProcess) -> None:
    rights = f"{rules_without_eval()} +script|exists"
    address = parse_url(f"redis://loaded:hidden@{server.endpoint}")
    with closing(server.client()) as client:
        client.execute_command("SCRIPT FLUSH")
        client.execute_command("ACL SETUSER", "loaded", "reset", "on", ">hidden", *rights.split())
        with pytest.raises(TurnoutError, match=r"'loaded' may not run EVAL .* \+eval "):
            check_address(address)
        for text in SCRIPTS:
            client.script_load(text)
        assert check_address(address).warnings == ()
        client.execute_command("ACL DELUSER", "loaded")


def test_rights_that_only_a_cluster_needs_are_checked(tmp_path: Path) -> None:
    rights = [f"+{word.lower()}" for word in words_needed("cluster")]
    with redis_cluster(tmp_path, 1) as (node,), closing(node.client()) as client:
        address = parse_url(f"redis+cluster://store:hidden@{node.endpoint}")

        def grant(words: list[str]) -> None:
            client.execute_command("ACL SETUSER", "store", "reset", "on", ">hidden", "~to1:*", *words)

        for missing, says in (("+cluster|slots", "who holds the slots: .*NOPERM"), ("+asking", "may not run ASKING")):
            grant([right for right in rights if right != missing])
            with pytest.raises(TurnoutError, match=rf"{says}.*ACL SETUSER store .*{re.escape(missing)}"):
                check_address(address)
        grant(rights)
        assert check_address(address).reachable
        client.config_set("requirepass", "hidden")
        for url in (f"redis+cluster://{node.endpoint}", f"redis+cluster://:wrong@{node.endpoint}"):
            with pytest.raises(TurnoutError, match=r"NOAUTH|WRONGPASS"):
                check_address(parse_url(url))


def test_a_password_that_is_not_given_is_asked_for(tmp_path: Path) -> None:
    with redis_server(tmp_path, "requirepass hidden") as own:
        with pytest.raises(TurnoutError, match=r"refuses user 'default': .*see kvstore\.password_file"):
            check_address(parse_url(own.url))
        assert check_address(parse_url(f"redis://:hidden@{own.endpoint}")).reachable


@pytest.mark.parametrize("theirs", ["requirepass hidden", ""])
def test_sentinels_that_want_a_password_are_told_the_servers(tmp_path: Path, theirs: str) -> None:
    with redis_server(tmp_path / "m", "requirepass hidden") as master:
        watch = f"sentinel monitor turnout {master.endpoint.host} {master.endpoint.port} 1"
        settings = (watch, "sentinel auth-pass turnout hidden", theirs)
        with redis_server(tmp_path / "s", *settings, sentinel=True) as sentinel:

            def check(user: str) -> bool:
                return check_address(parse_url(f"redis+sentinel://{user}{sentinel.endpoint}/turnout")).reachable

            until(lambda: check(":hidden@"))
            for user, says in (("", "refuse.* user 'default'"), (":wrong@", "refuse.* user 'default'")):
                with pytest.raises(TurnoutError, match=says):
                    check(user)


def test_a_redis_that_is_away_is_a_warning(tmp_path: Path) -> None:
    for url in (f"redis://127.0.0.1:{free_port()}", f"unix://{tmp_path}/nobody", "redis+cluster://127.0.0.1:1"):
        found = check_address(parse_url(url))
        assert not found.reachable
        assert found.warnings[0].startswith("kvstore.url: ")
        assert "host memory only until it answers" in found.warnings[0]


def test_a_redis_that_is_paused_is_a_warning_in_time(tmp_path: Path) -> None:
    with redis_server(tmp_path) as own:
        own.pause()
        assert not check_address(parse_url(own.url), timeout_s=0.5).reachable
        own.resume()


def test_a_cluster_node_under_a_plain_url_and_the_other_way_round_are_refused(
    tmp_path: Path, server: RedisProcess
) -> None:
    with pytest.raises(TurnoutError, match=r"is no node of a cluster; write redis://"):
        check_address(parse_url(f"redis+cluster://{server.endpoint}"))
    with redis_cluster(tmp_path, 1) as (node,):
        with pytest.raises(TurnoutError, match=r"is a node of a cluster; write redis\+cluster://"):
            check_address(parse_url(node.url))
        assert check_address(parse_url(f"redis+cluster://{node.endpoint}")).reachable


class OldServer:
    """Answers as a Redis of an older version would."""

    def __init__(self, version: str, unknown: bytes, hides_info: bool) -> None:
        self._version = version
        self._unknown = unknown
        self._hides_info = hides_info
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            while block := client.recv(1 << 16):
                for each in block.split(b"*")[1:]:
                    client.sendall(self._answer(each))

    def _answer(self, asked: bytes) -> bytes:
        if b"INFO\r\n" in asked and b"SETINFO" not in asked:
            text = f"redis_version:{self._version}\r\nmaxmemory:0\r\n".encode()
            return b"-NOPERM no permissions\r\n" if self._hides_info else b"$%d\r\n%b\r\n" % (len(text), text)
        if self._unknown in asked:
            return b"-ERR unknown command `%b`, with args beginning with:\r\n" % self._unknown
        return b"+OK\r\n"

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("hides_info", [False, True])
def test_a_version_too_old_is_refused_and_names_the_command(hides_info: bool) -> None:
    old = OldServer("6.0.16", b"GETEX", hides_info)
    version = "of unknown version" if hides_info else r"redis 6\.0\.16"
    with closing(old), pytest.raises(TurnoutError, match=f"is {version} and has no GETEX, .* 6.2; use 6.2"):
        check_address(parse_url(old.url))


def test_tls_that_fails_says_what_to_change(tmp_path: Path, server: RedisProcess) -> None:
    files = make_certificates(tmp_path / "ours")
    others = make_certificates(tmp_path / "others")
    with closing(TlsFront(server.endpoint, files)) as front:

        def tried(tls: TlsFiles, url: str = front.url) -> Any:
            return check_address(parse_url(url, tls=tls))

        assert tried(TlsFiles(files.ca, files.client_cert, files.client_key)).reachable
        with pytest.raises(TurnoutError, match=r"is not trusted: .*kvstore\.tls_ca_file"):
            tried(TlsFiles(others.ca, files.client_cert, files.client_key))
        with pytest.raises(TurnoutError, match=r"kvstore\.tls_ca_file: .*nobody"):
            tried(TlsFiles(str(tmp_path / "nobody")))
        with pytest.raises(TurnoutError, match=r"kvstore\.tls_cert_file: .* is not usable"):
            tried(TlsFiles(files.ca, files.ca, files.client_key))
        plain = tried(TlsFiles(files.ca), f"rediss://{server.endpoint}")
        assert not plain.reachable
        assert "a server without TLS (redis://)" in plain.warnings[0]
        plain = check_address(parse_url(f"redis://{front.endpoint}"))
        assert not plain.reachable
        # A certificate that the server does not take is only known once something is read.
        assert not tried(TlsFiles(files.ca, others.client_cert, others.client_key)).reachable


def test_the_client_of_redis_py_reaches_the_same_server(server: RedisProcess) -> None:
    with closing(Connector(Access("store", "hidden")).client(server.endpoint, 1.0)) as client:
        assert client.set("to1:x", "1", px=100) is True
        assert client.get("to1:x") == b"1"
