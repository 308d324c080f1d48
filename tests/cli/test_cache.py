from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.access.tenants_file import Tenant, Tenants, write_tenants
from kvstore.redis.embedded import EmbeddedServer
from kvstore.types import ModelLayout
from tests.kvstore.prefixes import FOUR, LAYOUT, ROOT, Engine, redis_store, shared, soon, start_server
from turnout.access_config import TenantLimits
from turnout.kvstore_config import TenantSharing
from turnout.types import SharingPolicy

TENANTS = {
    "ann": TenantSharing(quota_bytes=1_000_000),
    "bea": TenantSharing(policy="group", group="team"),
    "cid": TenantSharing(group="crew"),
}
COMMANDS = ["stats", "flush --all", "pin x --text -", "register-public x --text -"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with start_server(Path(tmp_path_factory.mktemp("redis"))) as running:
        yield running


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> ModelLayout:
    """A model whose tokenizer is the one of the demo models."""
    from engine.fingerprint import tokenizer_digest
    from turnout.config import TurnoutConfig, model_path

    demo = TurnoutConfig.demo()
    digest = tokenizer_digest(model_path(demo.models["demo-large"]))
    return ModelLayout({"weights": "w", "tokenizer": digest}, 3, 2, 4, LAYOUT.dtype, LAYOUT.block_size)


@pytest.fixture
def place(server: EmbeddedServer, tmp_path: Path) -> list[str]:
    """Options that name an empty store."""
    with redis_store(server) as store:
        store.script("return redis.call('flushall')", [], [], soon())
    key = tmp_path / "root.key"
    key.write_text(ROOT.hex())
    key.chmod(0o600)
    values = {
        "models": {"s": {"path": "demo:small"}, "l": {"path": "demo:large"}},
        "pools": {"p": {"small": "s", "large": "l", "default": {"name": "plain"}}},
        "kvstore": {
            "url": server.url,
            "root_key_file": str(key),
            "tenants": {name: each.model_dump() for name, each in TENANTS.items()},
        },
    }
    path = tmp_path / "turnout.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return ["--config", str(path)]


@pytest.fixture
def tokens_file(tmp_path: Path) -> str:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(FOUR))
    return str(path)


def serve(server: EmbeddedServer, layout: ModelLayout, *tenants: str, told: SharingPolicy | None = None) -> list[int]:
    """Have a server answer the prompt for each of the tenants; how many chunks each found."""

    async def answer() -> list[int]:
        with redis_store(server) as store, shared(store, layout=layout, tenants=TENANTS) as stores:
            return [len((await Engine(stores, tenant, layout, told).serve(FOUR)).chunks) for tenant in tenants]

    return asyncio.run(answer())


def asked(run: Any, *arguments: str) -> Any:
    result = run("cache", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


def test_stats_say_what_is_held_and_who_found_what(
    run: Any, server: EmbeddedServer, place: list[str], layout: ModelLayout
) -> None:
    assert serve(server, layout, "ann", "ann", "bea") == [0, 4, 0]
    report = asked(run, "stats", *place)
    rows = {(row["policy"], row["id"]): row for row in report["namespaces"]}
    assert set(rows) == {("private", "ann"), ("group", "team")}
    assert rows["private", "ann"]["values"] == rows["group", "team"]["values"] == 4
    assert (rows["private", "ann"]["quota"], rows["group", "team"]["quota"]) == (1_000_000, None)
    assert rows["private", "ann"]["bytes"] > 0
    tenants = {row["tenant"]: row for row in report["tenants"]}
    assert (tenants["ann"]["lookups"], tenants["ann"]["hit_rate"], tenants["ann"]["tokens_found"]) == (2, 0.5, 32)
    assert tenants["bea"]["hit_rate"] == 0.0
    assert [row["name"] for row in report["models"]] == ["m"]
    shown = run("cache", "stats", *place)
    assert shown.code == 0
    assert "ann" in shown.out
    assert "50.0%" in shown.out


def test_stats_of_one_tenant(run: Any, server: EmbeddedServer, place: list[str], layout: ModelLayout) -> None:
    serve(server, layout, "ann", "zoe")
    report = asked(run, "stats", "--tenant", "zoe", *place)
    assert [row["id"] for row in report["namespaces"]] == ["zoe"]
    assert [row["tenant"] for row in report["tenants"]] == ["zoe"]
    result = run("cache", "stats", "--tenant", "nobody", *place)
    assert result.code == 1
    assert result.err == "turnout: tenant: 'nobody' is not known; available: ann, bea, cid, zoe\n"


def test_flush_removes_what_is_named_and_nothing_else(
    run: Any, server: EmbeddedServer, place: list[str], layout: ModelLayout
) -> None:
    serve(server, layout, "ann", "bea", "zoe")
    assert asked(run, "flush", "--tenant", "ann", *place) == {"removed": 4}
    assert serve(server, layout, "ann", "bea", "zoe") == [0, 4, 4]
    assert asked(run, "flush", "--group", "team", *place) == {"removed": 4}
    assert serve(server, layout, "ann", "bea", "zoe") == [4, 0, 4]
    assert asked(run, "flush", "--all", *place) == {"removed": 12}
    assert asked(run, "stats", *place)["namespaces"] == []


@pytest.mark.parametrize("what", [[], ["--all", "--public"], ["--tenant", "ann", "--group", "team"]])
def test_flush_wants_to_know_exactly_what(run: Any, place: list[str], what: list[str]) -> None:
    result = run("cache", "flush", *what, *place)
    assert result.code == 1
    assert "exactly one of --tenant, --group, --public and --all" in result.err


def test_flush_of_unknown_names_is_refused(run: Any, place: list[str]) -> None:
    for what in ("tenant", "group"):
        result = run("cache", "flush", f"--{what}", "nobody", *place)
        assert result.code == 1
        assert f"{what}: 'nobody' is not known" in result.err


def test_a_public_prefix_is_shared_by_all_until_it_is_removed(
    run: Any, server: EmbeddedServer, place: list[str], layout: ModelLayout, tokens_file: str
) -> None:
    serve(server, layout)  # enrols the model
    document = asked(run, "register-public", "system", "--tokens", tokens_file, *place)
    assert document == {"name": "system", "policy": "public", "group": None, "tokens": 33}
    assert serve(server, layout, "ann", "zoe", "bea") == [0, 4, 4]
    (row,) = asked(run, "stats", *place)["prefixes"]
    assert (row["name"], row["policy"], row["tokens"]) == ("system", "public", 33)
    assert asked(run, "register-public", "system", "--remove", *place) == {"name": "system", "removed": True}
    assert serve(server, layout, "zoe", "ann") == [0, 0]
    result = run("cache", "register-public", "system", "--remove", *place)
    assert (result.code, result.err) == (1, "turnout: name: 'system' is not known; available: none\n")


def test_a_prefix_of_a_group_is_shared_by_it_alone(
    run: Any, server: EmbeddedServer, place: list[str], layout: ModelLayout, tokens_file: str
) -> None:
    serve(server, layout)
    asked(run, "register-public", "team's", "--group", "team", "--tokens", tokens_file, *place)
    assert serve(server, layout, "bea", "bea", "ann") == [0, 4, 0]


def test_what_a_group_registered_is_seen_and_flushed_though_its_members_share_nothing_else(
    run: Any, server: EmbeddedServer, place: list[str], layout: ModelLayout, tokens_file: str
) -> None:
    serve(server, layout)
    asked(run, "register-public", "crew's", "--group", "crew", "--tokens", tokens_file, *place)
    assert serve(server, layout, "cid", "cid") == [0, 4]
    (row,) = asked(run, "stats", *place)["namespaces"]
    assert (row["policy"], row["id"], row["values"]) == ("group", "crew", 4)
    assert asked(run, "flush", "--group", "crew", *place) == {"removed": 4}
    assert serve(server, layout, "cid") == [0]


def test_text_is_registered_with_the_tokens_of_the_pools(
    run: Any, server: EmbeddedServer, place: list[str], layout: ModelLayout, tmp_path: Path
) -> None:
    serve(server, layout)
    (tmp_path / "system.txt").write_text("What is 12+30? What is 45+50? What is 7+8?")
    document = asked(run, "register-public", "sums", "--text", str(tmp_path / "system.txt"), *place)
    assert document["tokens"] >= 16


def test_pinned_chunks_do_not_expire_until_they_are_unpinned(
    run: Any, server: EmbeddedServer, place: list[str], layout: ModelLayout, tokens_file: str
) -> None:
    def lives() -> list[int]:
        script = """local t = {}
            for _, k in ipairs(redis.call('keys', 'to1:*:raw.*')) do t[#t + 1] = redis.call('pttl', k) end return t"""
        with redis_store(server) as store:
            return list(store.script(script, [], [], soon()))

    result = run("cache", "pin", "mine", "--tenant", "ann", "--tokens", tokens_file, *place)
    assert result.code == 1
    assert "nothing to pin: no chunk of this prefix is in the store for tenant 'ann'" in result.err
    serve(server, layout, "ann")
    assert all(life > 0 for life in lives())
    document = asked(run, "pin", "mine", "--tenant", "ann", "--tokens", tokens_file, *place)
    assert document == {"name": "mine", "tenant": "ann", "kept": 4}
    assert lives() == [-1] * 4
    assert serve(server, layout, "zoe", "ann")[:1] == [0]  # pinned, not shared
    asked(run, "pin", "mine", "--remove", *place)
    assert all(life > 0 for life in lives())


def test_a_pin_is_of_where_the_tenants_file_puts_the_tenant(
    run: Any, server: EmbeddedServer, place: list[str], layout: ModelLayout, tokens_file: str, tmp_path: Path
) -> None:
    """kvstore.tenants has bea in a group; her entry goes before it."""
    alone = SharingPolicy(policy="private")
    file, config = tmp_path / "tenants.yaml", Path(place[1])
    values = yaml.safe_load(config.read_text()) | {"access": {"tenants_file": str(file)}}
    config.write_text(yaml.safe_dump(values))
    write_tenants(file, Tenants(tenants={"bea": Tenant(limits=TenantLimits(sharing=alone))}))
    pin = ["pin", "hers", "--tenant", "bea", "--tokens", tokens_file, *place]
    serve(server, layout, "bea")  # as one of the group
    assert "nothing to pin" in run("cache", *pin).err
    serve(server, layout, "bea", told=alone)
    assert asked(run, *pin)["kept"] == 4
    assert asked(run, "flush", "--group", "team", *place) == {"removed": 4}
    write_tenants(file, Tenants(tenants={"bea": Tenant()}))  # which says nothing
    assert "nothing to pin" in run("cache", *pin).err


@pytest.mark.parametrize(
    ("content", "message"),
    [("not json", "must hold a JSON list of token ids"), ("[]", "must hold a JSON list"), ("[1, -2]", "must hold"),
     ("[true]", "must hold"), ("[1, 2]", "2 tokens are less than a chunk of 8")],
)  # fmt: skip
def test_files_without_a_usable_prefix_are_refused(
    run: Any, server: EmbeddedServer, place: list[str], layout: ModelLayout, tmp_path: Path, content: str, message: str
) -> None:
    serve(server, layout)
    (tmp_path / "tokens.json").write_text(content)
    result = run("cache", "register-public", "x", "--tokens", str(tmp_path / "tokens.json"), *place)
    assert result.code == 1
    assert message in result.err


def test_token_ids_of_another_tokenizer_are_refused(
    run: Any, server: EmbeddedServer, place: list[str], tokens_file: str, tmp_path: Path
) -> None:
    """They would be told as registered, and shared by nobody. Text is encoded by whoever has another tokenizer."""
    serve(server, LAYOUT)  # of a tokenizer that the configuration does not have
    result = run("cache", "register-public", "system", "--tokens", tokens_file, *place)
    assert result.code == 1
    assert "tokens: are ids of no tokenizer that a server here has; give the servers' models in --config" in result.err
    (tmp_path / "system.txt").write_text("What is 12+30? What is 45+50? What is 7+8?")
    assert asked(run, "register-public", "system", "--text", str(tmp_path / "system.txt"), *place)["tokens"] > 0


def test_exactly_one_file_is_wanted(run: Any, place: list[str], tmp_path: Path, tokens_file: str) -> None:
    for files in ([], ["--text", tokens_file, "--tokens", tokens_file]):
        result = run("cache", "register-public", "x", *files, *place)
        assert (result.code, "exactly one of --text and --tokens" in result.err) == (1, True)
    result = run("cache", "register-public", "x", "--text", str(tmp_path / "absent"), *place)
    assert (result.code, "cannot read" in result.err) == (1, True)


@pytest.mark.parametrize("command", COMMANDS)
def test_another_root_key_is_said_plainly(
    run: Any, server: EmbeddedServer, place: list[str], layout: ModelLayout, tmp_path: Path, command: str
) -> None:
    serve(server, layout)
    (tmp_path / "other.key").write_text("00" * 32)
    result = run("cache", *command.split(), *place, "--root-key-file", str(tmp_path / "other.key"))
    assert result.code == 1
    assert "kvstore.root_key_file: this Redis was filled under another root key" in result.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_store_that_is_not_there_is_said_plainly(run: Any, place: list[str], tmp_path: Path, command: str) -> None:
    result = run("cache", *command.split(), *place, "--url", f"unix://{tmp_path}/nobody")
    assert result.code == 1
    assert "no store answers" in result.err


def test_without_an_address_there_is_nothing_to_ask(run: Any) -> None:
    result = run("cache", "stats")
    assert result.code == 1
    assert "no store is named; give --config with kvstore.url, or --url and --root-key-file" in result.err
