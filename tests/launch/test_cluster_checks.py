"""What a cluster refuses before anything is deployed on it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.serve.config import HTTPOptions, gRPCOptions

from deployments import cluster, cluster_checks
from deployments import placement_check as fitting
from deployments.app import ADD_TO_SERVER
from deployments.build_info import Program, compare, this_program
from deployments.cluster import check_listening
from deployments.cluster_checks import growth, off_by
from deployments.deadline import BACKSTOP_S
from deployments.placement_check import HEAD_MARK, Growth, NodeType, check_room
from turnout.config import TurnoutConfig, parse_config
from turnout.errors import Code, TurnoutError

HEAD = {"CPU": 0.0, HEAD_MARK: 1.0}
DRAFT = {"CPU": 4.0, "GPU": 1.0, "draft": 1.0}
TARGET = {"CPU": 8.0, "GPU": 1.0, "target": 1.0}
PAIR = [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0, "draft": 1.0}, {"CPU": 1.0, "GPU": 1.0, "target": 1.0}]
TYPES = Growth((NodeType("head", HEAD, 1), NodeType("draft", DRAFT, 4), NodeType("target", TARGET, 2)))


def config(**pool: Any) -> TurnoutConfig:
    return parse_config(
        {
            "models": {"s": {"path": "none"}, "l": {"path": "none"}},
            "pools": {"p": {"small": "s", "large": "l", **pool}},
        }
    )


def refusal(*arguments: Any) -> TurnoutError:
    with pytest.raises(TurnoutError) as refused:
        check_room(*arguments)
    assert refused.value.code is Code.UNAVAILABLE
    return refused.value


def test_a_cluster_with_room_says_nothing() -> None:
    assert check_room(config(), {"p": PAIR}, [HEAD, DRAFT, TARGET], None) == []
    assert check_room(config(), {"p": PAIR}, [HEAD, DRAFT, TARGET], TYPES) == []


def test_what_no_node_can_host_is_refused_by_name() -> None:
    error = refusal(config(), {"p": PAIR}, [HEAD, DRAFT, DRAFT], None)
    assert "pool 'p' needs a node with {CPU: 1, GPU: 1, target: 1}" in error.message
    assert "nodes offer {CPU: 0}, {CPU: 4, GPU: 1, draft: 1}" in error.message


def test_what_an_autoscaler_can_add_is_waited_for() -> None:
    waiting = check_room(config(), {"p": PAIR}, [HEAD, DRAFT], TYPES)
    assert waiting == ["pool 'p' waits for nodes that the autoscaler adds"]
    assert check_room(config(), {"p": PAIR}, [HEAD], TYPES) == waiting


def test_what_no_autoscaler_can_add_is_refused() -> None:
    none_left = Growth((*TYPES.types[:2], NodeType("target", TARGET, 0)))
    for more in (none_left, Growth(TYPES.types, 0)):
        assert "target: 1" in refusal(config(), {"p": PAIR}, [HEAD, DRAFT], more).message


@pytest.mark.parametrize(
    ("pool", "types", "refused"),
    [
        ({"replicas": 2}, None, True),
        ({"replicas": 2}, TYPES, False),
        ({"replicas": 3}, TYPES, True),  # two target nodes at most
        ({"replicas": 3}, Growth((*TYPES.types[:2], NodeType("target", TARGET, -1))), False),
        ({"replicas": 2}, Growth(TYPES.types, 4), False),
        ({"replicas": 2}, Growth(TYPES.types, 3), True),  # four of either kind would be allowed, but not together
        ({"replicas": 2, "autoscaling": {"min_replicas": 1}}, None, False),
        ({"autoscaling": {"min_replicas": 3}}, TYPES, True),
    ],
)
def test_replicas_that_do_not_fit_at_the_same_time(pool: dict[str, Any], types: Growth | None, refused: bool) -> None:
    nodes = [HEAD, DRAFT, TARGET]
    if refused:
        assert refusal(config(**pool), {"p": PAIR}, nodes, types).field == "pools"
    else:
        waiting = ["some replicas wait for nodes that the autoscaler adds"] if types else []
        assert check_room(config(**pool), {"p": PAIR}, nodes, types) == waiting


def test_nodes_that_must_be_one_or_several() -> None:
    together = config(placement={"models": "actors", "strategy": "STRICT_PACK"})
    both = {"CPU": 16.0, "GPU": 2.0, "draft": 1.0, "target": 1.0}
    assert check_room(together, {"p": PAIR}, [HEAD, both], None) == []
    assert "needs a node with {CPU: 3, GPU: 2, draft: 1, target: 1}" in (
        refusal(together, {"p": PAIR}, [HEAD, DRAFT, TARGET], None).message
    )
    apart = config(placement={"models": "actors", "strategy": "STRICT_SPREAD"})
    assert check_room(apart, {"p": PAIR}, [TARGET, DRAFT, TARGET], None) == []
    assert "STRICT_SPREAD" in refusal(apart, {"p": PAIR}, [DRAFT, TARGET], None).message


def test_nodes_that_an_autoscaler_cannot_add_in_time_are_counted_too() -> None:
    apart = config(placement={"models": "actors", "strategy": "STRICT_SPREAD"})
    bundles = {"p": [{"CPU": 1.0}] * 3}
    few, enough = (Growth((NodeType("cpu", {"CPU": 8.0}, 5),), most) for most in (1, 2))
    error = refusal(apart, bundles, [{"CPU": 8.0, HEAD_MARK: 1.0}], few)
    assert "needs 3 nodes for a replica (STRICT_SPREAD); there are 1, and 1 may be added" in error.message
    assert error.field == "pools.p.placement.strategy"
    waiting = ["pool 'p' waits for nodes that the autoscaler adds"]
    assert check_room(apart, bundles, [{"CPU": 8.0, HEAD_MARK: 1.0}], enough) == waiting


def test_bundles_whose_sum_fits_but_who_do_not_are_refused() -> None:
    error = refusal(config(), {"p": [{"CPU": 1.0}] * 3}, [{"CPU": 1.5}, {"CPU": 1.5}], None)
    assert "pool 'p': the nodes have no room for all bundles at the same time" in error.message
    assert "none is left for {CPU: 1} (CPU is short (1 asked, 0.5 there))" in error.message
    assert error.field == "pools.p.placement"


def test_what_a_search_did_not_find_out_is_said_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "MOST_STEPS", 2)
    told = check_room(config(), {"p": [{"CPU": 1.0}] * 3}, [{"CPU": 1.5}, {"CPU": 1.5}], None)
    assert set(told) == {"pool 'p': whether there is room for all bundles at the same time was not found out"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"turnout": "0.0.9"}, "has turnout 0.0.9, not 0.1.0 as this one"),
        ({"code": "other"}, "has sources of Turnout, others than this one"),
        ({"python": "3.12.1"}, "has python 3.12.1, not "),
        ({"ray": "2.61.0"}, "has ray 2.61.0, not "),
        ({"torch": ""}, "has torch none, not "),
    ],
)
def test_a_node_with_another_program_is_named(change: dict[str, str], said: str) -> None:
    mine = this_program()
    compare("10.0.0.1", mine, mine)
    with pytest.raises(TurnoutError) as refused:
        compare("10.0.0.1", replace(mine, **change), mine)
    assert refused.value.message.startswith(f"node 10.0.0.1 {said}")
    assert "`ray up` copies yours" in refused.value.message


def test_this_program_is_known_without_loading_anything() -> None:
    mine = this_program()
    assert all(getattr(mine, name) for name in Program.__slots__)
    assert mine == this_program()


class FakeRay:
    """A cluster of one node, the head, whose tasks end so."""

    def __init__(self, end: Any) -> None:
        self.end = end

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "NodeID": "0" * 56, "NodeManagerAddress": "10.0.0.1", "Resources": {HEAD_MARK: 1.0}}]

    def remote(self, **_: Any) -> Any:
        return lambda function: SimpleNamespace(remote=lambda *_: function)

    def get(self, reference: Any, timeout: float) -> Any:
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


def test_what_may_be_added_is_bounded_for_each_type_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"head": {"resources": HEAD, "max_workers": 0}, "draft": {"resources": DRAFT}}
    monkeypatch.setattr(cluster_checks, "ray", FakeRay({"max_workers": 3, "available_node_types": types}))
    assert growth("10.0.0.1:6379") == Growth((NodeType("head", HEAD, 0), NodeType("draft", DRAFT, 3)), 3)
    monkeypatch.setattr(cluster_checks, "ray", FakeRay(None))
    assert growth("10.0.0.1:6379") is None


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (GetTimeoutError("later"), "node 10.0.0.1 does not answer within 60 s"),
        (
            RayTaskError("autoscaler_file", "Traceback\nPermissionError: no", PermissionError("no")),
            "node 10.0.0.1 cannot read the file of its autoscaler: PermissionError: no",
        ),
    ],
)
def test_a_head_that_cannot_be_asked_is_named(monkeypatch: pytest.MonkeyPatch, end: Exception, said: str) -> None:
    monkeypatch.setattr(cluster_checks, "ray", FakeRay(end))
    with pytest.raises(TurnoutError) as refused:
        growth("10.0.0.1:6379")
    assert (refused.value.code, refused.value.message) == (Code.UNAVAILABLE, said)


def test_nodes_with_another_program_are_refused_before_they_are_asked_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unfit(mine: Program) -> None:
        raise TurnoutError(Code.UNAVAILABLE, "node 10.0.0.1 has other sources")

    monkeypatch.setattr(cluster, "listening", lambda _: None)
    monkeypatch.setattr(cluster, "check_nodes", unfit)
    monkeypatch.setattr(cluster, "growth", lambda _: pytest.fail("asked of a node that cannot know"))
    with pytest.raises(TurnoutError, match="other sources"):
        cluster.deploy(config(), "auto")


@pytest.mark.parametrize(
    ("theirs", "off"),
    [(100.0, 0.0), (101.0, 0.0), (104.0, 0.0), (112.0, 8.0), (90.0, -10.0)],
)
def test_of_a_clock_only_what_the_round_trip_cannot_explain_counts(theirs: float, off: float) -> None:
    assert off_by(theirs, before=100.0, after=104.0) == off


def test_a_cluster_has_no_embedded_store_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "listening", lambda _: None)
    for name in ("check_nodes", "check_clocks", "check_room"):
        monkeypatch.setattr(cluster, name, lambda *_: [])
    monkeypatch.setattr(cluster, "node_offers", list)
    monkeypatch.setattr(cluster, "growth", lambda _: None)
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    here = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    monkeypatch.setattr(cluster, "ray", SimpleNamespace(get_runtime_context=lambda: context, util=here))
    monkeypatch.setattr(cluster, "run_app", lambda *_: None)
    for url, lines in [("embedded", 1), ("off", 0)]:
        told: list[str] = []
        settings = config()
        store = settings.kvstore.model_copy(update={"url": url})
        cluster.deploy(settings.model_copy(update={"kvstore": store}), "auto", tell=told.append)
        assert [line.partition(":")[0] for line in told] == ["kvstore.url"] * lines


@pytest.mark.parametrize(
    ("http", "rpc", "said"),
    [
        ({}, {}, ""),
        ({"port": 8001}, {}, "server.http_port: Serve listens on 8001 on this cluster already"),
        ({"host": "0.0.0.0"}, {}, "server.http_host: Serve listens on 0.0.0.0 on this cluster already"),
        ({"request_timeout_s": 75.0}, {}, "server.request_timeout_s: Serve gives requests 60 on this cluster already"),
        ({}, {"port": 9001}, "server.grpc_port: Serve listens on 9001 on this cluster already"),
        ({}, {"grpc_servicer_functions": []}, "server.grpc_port: Serve listens on no port for gRPC on this cluster"),
        ({}, {"request_timeout_s": None}, "server.request_timeout_s: Serve gives requests none on this cluster"),
    ],
)
def test_what_serve_keeps_from_its_start_is_refused_by_name(
    http: dict[str, Any], rpc: dict[str, Any], said: str
) -> None:
    settings = config()
    limit_s = settings.server.request_timeout_s + BACKSTOP_S
    web = HTTPOptions(
        **{"host": settings.server.http_host, "port": settings.server.http_port, "request_timeout_s": limit_s, **http}
    )
    more = {"grpc_servicer_functions": [ADD_TO_SERVER], "request_timeout_s": limit_s}
    remote = gRPCOptions(**{"port": settings.server.grpc_port, **more, **rpc})
    if not said:
        check_listening(settings, web, remote)
        return
    with pytest.raises(TurnoutError) as refused:
        check_listening(settings, web, remote)
    assert refused.value.message.startswith(said)
    assert refused.value.field == said.partition(":")[0]
