from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import Keyring
from kvstore.redis.redis_store import RedisStore
from kvstore.tenants.encrypted_document import Sealer
from kvstore.tenants.registry import PUBLIC, Prefix, Registry
from kvstore.tenants.tenancy import Tenancy, common_length
from tests.kvstore.prefixes import ROOT, Engine, shared, soon, tokens
from turnout.kvstore_config import TenantSharing
from turnout.types import Namespace, Sharing, SharingPolicy

TEAM = Namespace("group", "team")
TENANTS = {
    "ann": TenantSharing(policy="group", group="team"),
    "bea": TenantSharing(policy="group", group="team", quota_bytes=500),
    "cid": TenantSharing(quota_bytes=0),
}


@pytest.fixture
def registry(store: RedisStore) -> Registry:
    return Registry(store, Sealer(Keyring(ROOT)), "t")


def register(registry: Registry, name: str, ids: list[int], group: str = "") -> None:
    policy = "group" if group else "public"
    registry.put(Prefix(name, policy, group, {"t": tuple(ids)}), soon())


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_head_is_found(first: list[int], second: list[int]) -> None:
    expected = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
                    min(len(first), len(second)))  # fmt: skip
    assert common_length(first, second) == expected


def test_tenants_are_private_unless_they_are_in_a_group() -> None:
    tenancy = Tenancy(TENANTS, None)
    assert tenancy.sharing("ann", [1, 2]) == tenancy.sharing("bea", [3]) == Sharing(TEAM)
    assert tenancy.sharing("cid", [1]) == Sharing(Namespace("private", "cid"))
    assert tenancy.sharing("never heard of", [1]) == Sharing(Namespace("private", "never heard of"))


def test_a_tenant_called_like_a_group_is_not_the_group() -> None:
    tenancy = Tenancy(TENANTS, None)
    assert tenancy.sharing("team", [1]).rest != TEAM


@pytest.mark.parametrize("tenant", ["ann", "cid", "never heard of"])
def test_what_a_call_tells_goes_before_what_is_configured(registry: Registry, tenant: str) -> None:
    register(registry, "team's", [1, 2], group="team")
    register(registry, "strangers'", [1, 2, 3], group="strangers")
    tenancy = Tenancy(TENANTS, None, registry)
    own, strangers = Namespace("private", tenant), Namespace("group", "strangers")
    told = {
        SharingPolicy(policy="group", group="strangers"): Sharing(strangers, ((3, strangers),)),
        SharingPolicy(policy="group", group="team"): Sharing(TEAM, ((2, TEAM),)),
        SharingPolicy(policy="private", group="strangers"): Sharing(own, ((3, strangers),)),
        SharingPolicy(policy="private"): Sharing(own),
    }
    for policy, sharing in told.items():
        assert tenancy.sharing(tenant, [1, 2, 3, 4], policy) == sharing
    assert tenancy.sharing("ann", [1, 2, 3, 4]) == Sharing(TEAM, ((2, TEAM),))


def test_quotas_stay_as_configured_whatever_calls_tell() -> None:
    tenancy = Tenancy(TENANTS, 1000)
    assert tenancy.limit(Namespace("group", "that a call names")) == 1000
    # Its quota does not end where the tenants file takes it out of its group.
    assert tenancy.limit(Namespace("private", "bea")) == 500
    assert not tenancy.may_write("cid")


def test_the_longest_registered_head_is_shared(registry: Registry) -> None:
    register(registry, "short", [1, 2, 3])
    register(registry, "long", [1, 2, 3, 4, 5])
    register(registry, "other", [9, 9])
    tenancy = Tenancy(TENANTS, None, registry)
    rest = Namespace("private", "x")
    assert tenancy.sharing("x", [1, 2, 3, 4, 5, 6]) == Sharing(rest, ((5, PUBLIC),))
    assert tenancy.sharing("x", [1, 2, 3, 4, 7]) == Sharing(rest, ((4, PUBLIC),))
    assert tenancy.sharing("x", [9, 9]) == Sharing(rest, ((2, PUBLIC),))
    assert tenancy.sharing("x", [2, 1]) == Sharing(rest)


def test_what_a_group_registered_is_shared_within_it_only_and_behind_what_is_public(registry: Registry) -> None:
    register(registry, "all", [1, 2])
    register(registry, "team's", [1, 2, 3, 4], group="team")
    register(registry, "strangers'", [1, 2, 3, 4, 5], group="strangers")
    tenancy = Tenancy(TENANTS, None, registry)
    assert tenancy.sharing("ann", [1, 2, 3, 4, 5]) == Sharing(TEAM, ((2, PUBLIC), (4, TEAM)))
    assert tenancy.sharing("cid", [1, 2, 3, 4, 5]) == Sharing(Namespace("private", "cid"), ((2, PUBLIC),))
    assert tenancy.sharing("ann", [7]) == Sharing(TEAM)


def test_limits_belong_to_namespaces() -> None:
    tenancy = Tenancy(TENANTS, 1000)
    assert tenancy.limit(TEAM) == 1000  # ann's, which is the default
    assert tenancy.limit(Namespace("private", "cid")) == 0
    assert tenancy.limit(Namespace("private", "x")) == 1000
    assert tenancy.limit(PUBLIC) is None
    assert Tenancy(TENANTS, None).limit(TEAM) is None


def test_a_group_has_its_namespace_and_quota_though_its_members_keep_their_prompts_to_themselves(
    registry: Registry,
) -> None:
    """What is registered for the group lies there."""
    tenants = {
        "ann": TenantSharing(group="team", quota_bytes=300),
        "bea": TenantSharing(group="team", quota_bytes=500),
    }
    register(registry, "strangers'", [1, 2], group="strangers")
    tenancy = Tenancy(tenants, 1000, registry)
    found = tenancy.namespaces()
    assert {TEAM, Namespace("private", "ann"), Namespace("group", "strangers")} <= set(found)
    assert tenancy.sharing("ann", [7]).rest == Namespace("private", "ann")
    assert tenancy.limit(TEAM) == 500
    assert tenancy.limit(Namespace("private", "ann")) == 300


def test_a_quota_of_nothing_bars_from_writing() -> None:
    tenancy = Tenancy(TENANTS, None)
    assert [tenancy.may_write(name) for name in ("ann", "bea", "cid", "x")] == [True, True, False, True]
    assert not Tenancy(TENANTS, 0).may_write("x")
    assert Tenancy(TENANTS, 0).may_write("bea")


async def test_strangers_find_nothing_and_the_same_tenant_does(store: RedisStore) -> None:
    with shared(store) as first, shared(store) as second:
        await Engine(first, "ann").serve(tokens(33))
        assert (await Engine(second, "eve").find(tokens(33))).chunks == []
        assert len((await Engine(second, "ann").find(tokens(33))).chunks) == 4


async def test_a_group_shares(store: RedisStore) -> None:
    with shared(store, tenants=TENANTS) as first, shared(store, tenants=TENANTS) as second:
        await Engine(first, "ann").serve(tokens(33))
        assert len((await Engine(second, "bea").find(tokens(33))).chunks) == 4
        assert (await Engine(second, "cid").find(tokens(33))).chunks == []


async def test_everybody_shares_a_public_head_and_nobody_what_follows(store: RedisStore, registry: Registry) -> None:
    register(registry, "system", tokens(20))
    with shared(store) as first, shared(store) as second:
        await Engine(first, "ann").serve(tokens(33))
        assert len((await Engine(second, "eve").find(tokens(33))).chunks) == 2  # 20 tokens hold two full chunks
        assert len((await Engine(second, "ann").find(tokens(33))).chunks) == 4


async def test_what_is_registered_while_servers_run_is_shared_once_they_know(
    store: RedisStore, registry: Registry
) -> None:
    waits = {"fetch_timeout_s": 2.0}  # how long for chunks that the other one has announced
    with shared(store, **waits) as first, shared(store, **waits) as second:
        await Engine(first, "ann").serve(tokens(33))
        register(registry, "system", tokens(33))
        for stores in (first, second):
            stores.refresh()
        assert (await Engine(second, "eve").find(tokens(33))).chunks == []
        await Engine(first, "ann").serve(tokens(33))
        assert len((await Engine(second, "eve").find(tokens(33))).chunks) == 4
