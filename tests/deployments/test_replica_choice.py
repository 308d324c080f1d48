"""Which replica a call goes to: where its prompt is cached, unless that one is busier than computing it costs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest, RequestRouter

from deployments import replica_choice
from deployments.app import pool_app
from deployments.pool_options import pool_options, pool_version
from deployments.prompt_prefix import DIGEST_BYTES, MARKS, Held, prefixes
from deployments.replica_choice import PrefixRouter
from tests.deployments.scripted_pool import load_scripted, scripted_config
from tests.deployments.served_pool import call
from turnout.calls import ChatMessage, GenerateCall
from turnout.moved_calls import Moved
from turnout.types import SharingPolicy

LONG = "All that follows is said of one house and one street. " * 40


def longest(first: GenerateCall, second: GenerateCall) -> int:
    digests = {digest for _, digest in prefixes(first)}
    return max((length for length, digest in prefixes(second) if digest in digests), default=0)


def test_equal_beginnings_have_equal_digests() -> None:
    shared = longest(call(LONG + "one"), call(LONG + "another"))
    assert len(LONG) / 1.5 < shared <= len(LONG)
    assert longest(call("x" + LONG), call(LONG)) == 0
    assert longest(call(LONG), call(LONG, tenant="other")) == 0
    assert longest(call(LONG), call(LONG, model="other")) == 0
    team, private = SharingPolicy(policy="group", group="team"), SharingPolicy(policy="private")
    told = replace(call(LONG), sharing=team)
    assert longest(told, replace(call(LONG, tenant="other"), sharing=team)) > len(LONG) / 1.5
    assert longest(told, replace(call(LONG), sharing=private)) == 0
    assert longest(told, replace(call(LONG, tenant="team"), sharing=private)) == 0
    ids = tuple(range(1000))
    assert longest(call(ids), call((*ids[:500], *ids))) in MARKS  # type: ignore[arg-type]
    chats = [call(None, messages=(ChatMessage("system", LONG), ChatMessage("user", text))) for text in ("a", "b")]  # type: ignore[arg-type]
    assert longest(*chats) > len(LONG) / 1.5


def test_a_context_begins_the_prompt() -> None:
    first, second = (replace(call(question), context=LONG) for question in ("one", "another"))
    assert longest(first, second) > len(LONG) / 1.5
    assert longest(first, call(f"{LONG}\n\none")) > len(LONG) / 1.5
    assert longest(first, replace(call("one"), context=f"x{LONG}")) == 0
    assert prefixes(replace(call((1, 2)), context=LONG)) == prefixes(call((1, 2)))  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["", "short", (), (-1, 10**12), "\ud800" * 100])
def test_no_prompt_is_too_strange(prompt: Any) -> None:
    assert all(len(digest) == DIGEST_BYTES for _, digest in prefixes(call(prompt)))


def test_the_longest_unused_is_forgotten_and_shared_beginnings_count_once() -> None:
    held = Held(max_bytes=3 * len(LONG))
    common = prefixes(call(LONG))
    for place in range(20):
        held.note(prefixes(call(LONG + f"{place:>2} " * 1000)))
        assert all(digest in held for _, digest in common[:-1])
    newest, oldest = (prefixes(call(LONG + f"{place:>2} " * 1000))[-1][1] for place in (19, 0))
    assert newest in held
    assert oldest not in held
    few = Held(max_bytes=1 << 30, max_digests=5)
    few.note(common)
    assert [digest in few for _, digest in common] == [True] * 5 + [False] * (len(common) - 5)


@dataclass(frozen=True)
class Id:
    unique_id: str


@dataclass
class Replica:
    replica_id: Id
    routing_stats: dict[str, Any] = field(default_factory=dict)
    max_ongoing_requests: int = 100
    calls: int | None = 0

    @property
    def actor_id(self) -> bytes:
        return str(self.replica_id.unique_id).encode()


def replicas(*said: dict[str, Any]) -> list[Replica]:
    names = [Id(name) for name in "abcdefgh"]
    return [Replica(name, {"byte_s": 1e-3, "call_s": 1.0, **each}) for name, each in zip(names, said, strict=False)]


def router(known: list[Replica], **options: Any) -> PrefixRouter:
    made = PrefixRouter.__new__(PrefixRouter)
    made._replicas = {each.replica_id: each for each in known}
    calls = {each.replica_id: each for each in known}
    made._replica_queue_len_cache = SimpleNamespace(
        get=lambda replica_id: calls[replica_id].calls,
        update=lambda replica_id, count: setattr(calls[replica_id], "calls", count),
    )
    made.initialize_state(**options)
    return made


async def chosen(made: PrefixRouter, known: list[Replica], asked: GenerateCall | None) -> Replica:
    pending = SimpleNamespace(args=[asked], routing_context=SimpleNamespace(should_backoff=False))
    groups = await made.choose_replicas(known, pending)
    assert pending.routing_context.should_backoff
    assert sorted(str(each.replica_id.unique_id) for group in groups for each in group) == sorted(
        str(each.replica_id.unique_id) for each in known
    )
    return groups[0][0]


def holding(asked: GenerateCall) -> dict[str, Any]:
    held = Held(1 << 20)
    held.note(prefixes(asked))
    return {"held": held.packed()}


async def test_a_prompt_goes_where_it_is_cached() -> None:
    known = replicas({}, holding(call(LONG)), {})
    for _ in range(10):
        assert (await chosen(router(known), known, call(LONG + "more"))) is known[1]


async def test_a_hot_prompt_spreads_when_its_replica_is_busier_than_computing_it_costs() -> None:
    known = replicas({}, holding(call(LONG)))
    saved_s = longest(call(LONG), call(LONG)) * 1e-3
    made = router(known)
    for calls in range(6):
        known[1].calls = calls
        expected = known[1] if calls * 1.0 < saved_s else known[0]
        assert (await chosen(made, known, call(LONG))) is expected
    assert saved_s > 1.0
    known[1].calls, known[1].routing_stats["waiting_s"] = 0, 60.0
    assert (await chosen(made, known, call(LONG))) is known[0]


async def test_where_nothing_is_known_the_fewest_calls_decide() -> None:
    known = replicas({}, {}, {})
    for each, calls in zip(known, (3, 1, 2), strict=True):
        each.routing_stats = {}
        each.calls = calls
    assert (await chosen(router(known), known, call(LONG))) is known[1]
    assert (await chosen(router(known), known, None)) is known[1]
    known[1].calls, known[1].routing_stats = None, {"requests": 9}
    assert (await chosen(router(known), known, call(LONG))) is known[2]


async def test_a_full_replica_comes_last() -> None:
    known = replicas(holding(call(LONG)), {})
    known[0].max_ongoing_requests = known[0].calls = 1
    known[1].calls = 50
    assert (await chosen(router(known), known, call(LONG))) is known[1]


async def test_what_stays_free_for_questions_is_no_room_for_generations() -> None:
    known = replicas(holding(call(LONG)), {})
    known[0].calls, known[1].calls = 4, 5
    known[0].max_ongoing_requests = 4 + 16
    full = {"room": 4}
    assert (await chosen(router(known), known, call(LONG))) is known[0]
    known[1].calls = 3
    assert (await chosen(router(known, **full), known, call(LONG))) is known[1]
    made, asked = router(known, sticky=True, **full), call(LONG, session="s")
    made.on_request_routed(SimpleNamespace(args=[asked]), known[0].replica_id, None)
    assert (await chosen(made, known, asked)) is known[1]
    known[0].calls = 3
    assert (await chosen(made, known, asked)) is known[0]
    options = pool_options("p", scripted_config(Path(), max_ongoing_requests=3, max_queued_requests=2))
    kwargs = options["request_router_config"].request_router_kwargs
    assert kwargs["room"] == 5 < options["max_ongoing_requests"]


@pytest.mark.parametrize("stale", ["call_s", "byte_s"])
async def test_a_replica_that_last_knew_other_times_gets_its_share_of_a_burst(stale: str) -> None:
    known = replicas({stale: 0.03}, {stale: 1.0})
    made = router(known)
    counts: Counter[str] = Counter()
    for place in range(64):
        asked = call(f"{place} {LONG}")
        to = await chosen(made, known, asked)
        made.on_request_routed(SimpleNamespace(args=[asked]), to.replica_id, None)
        to.calls = (to.calls or 0) + 1
        counts[to.replica_id.unique_id] += 1
    assert min(counts.values()) >= 0.4 * 64


class Answering:
    """What is sent to one replica; it answers, has ended, or hangs until it is told otherwise."""

    def __init__(self, replica: Replica, error: Exception | None = None, hangs: bool = False) -> None:
        self.asked: list[str] = []
        self.arguments: list[object] = []
        self._error = error
        self._hangs = hangs
        replica.try_send_request = self  # type: ignore[attr-defined]

    def __call__(self, request: PendingRequest, with_rejection: bool) -> Answering:
        self.asked.append(request.metadata.call_method)
        self.arguments.append((request.metadata.call_method, *request.args))
        return self

    async def get_async(self) -> None:
        if self._hangs:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error


def metadata(internal_id: str) -> RequestMetadata:
    return RequestMetadata(request_id="r", internal_request_id=internal_id)


async def test_only_a_replica_that_still_answers_has_been_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [{"place": f"10.0.0.{place} pid 1"} for place in range(3)]
    known = replicas(*places)
    asked = [Answering(known[0]), Answering(known[1], hangs=True), Answering(known[2], RuntimeError("ended"))]
    made = router(known, grace_s=0.1)
    made._lazily_fetched_loop = asyncio.get_running_loop()
    made._template = PendingRequest(args=[], kwargs={}, metadata=metadata("i"))
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    assert not made.retired("")
    made.update_replicas([])
    async with asyncio.timeout(5):
        while [each.asked[-1:] for each in asked] != [["hand_over"]] * 3:
            await asyncio.sleep(0.01)
    assert asked[0].asked[:2] == ["models", "hand_over"]
    ids = [each.actor_id.hex() for each in known]
    assert [made.retired(each) for each in ids] == [True, False, False]
    assert made.retired("")  # who is not named may be the one that was told to
    made._replicas = {}
    assert [made.place(each) for each in ids] == [each["place"] for each in places]
    made._retired = {ids[0]: time.monotonic() - 60.0}  # type: ignore[assignment]
    assert not made.retired("")


async def test_a_replica_that_is_frozen_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_choice, "ASK_S", 0.05)
    template = PendingRequest(args=[], kwargs={}, metadata=metadata("i"))
    known = replicas({}, {})
    for each, hangs in zip(known, (True, False), strict=True):
        Answering(each, hangs=hangs)
    async with asyncio.timeout(30):
        assert [await replica_choice._ask(each, template, "models") for each in known] == [False, True]  # type: ignore[arg-type]


async def test_calls_that_wait_are_sent_from_the_fullest_replica_to_the_emptiest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = replicas({"requests": 9}, {"requests": 5}, {"requests": 1})
    asked = [Answering(each) for each in known]
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)

    async def sent(**stats: int) -> list[object]:
        """What is asked of the first replica, where it and the last one say this."""
        made = router(known, places=4)
        made._lazily_fetched_loop = asyncio.get_running_loop()
        made._template = PendingRequest(args=[], kwargs={}, metadata=metadata("i"))
        known[0].routing_stats["requests"], known[2].routing_stats["requests"] = stats["most"], stats["fewest"]
        asked[0].arguments.clear()
        for _ in range(2):  # the second time is too early
            made.update_replicas(known)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        assert not asked[1].asked
        assert not asked[2].asked
        return asked[0].arguments

    assert await sent(most=9, fewest=1) == [("send_away", 3)]
    assert await sent(most=6, fewest=0) == [("send_away", 2)]
    assert await sent(most=9, fewest=4) == []  # no place is free there
    assert await sent(most=5, fewest=0) == [("send_away", 1)]
    known[1].routing_stats["requests"] = 4
    assert await sent(most=4, fewest=0) == []  # nobody waits


async def test_a_call_that_moves_goes_where_least_is_to_be_done() -> None:
    known = replicas(holding(call(LONG)), {})
    known[0].calls = 1
    made = router(known)
    assert (await chosen(made, known, call(LONG))) is known[0]
    assert (await chosen(made, known, replace(call(LONG), moved=Moved()))) is known[1]


def waiting(made: PrefixRouter, asked: list[PendingRequest]) -> None:
    """Calls that Serve has taken and given no replica yet."""
    made._pending_requests_to_fulfill = deque(asked)
    made._cancel_routing_task_for_pending_request = lambda *_: None
    made._record_queue_wait_time = lambda *_: None
    made._remove_pending_request_from_indices = lambda *_: None
    made._use_replica_queue_len_cache = True
    made._update_router_queue_len_gauge = lambda *_: None


async def test_two_calls_of_one_request_are_both_given_a_replica() -> None:
    """Serve asks by this name, which is its own."""
    assert callable(RequestRouter._get_pending_request_matching_internal_request_id)
    [known] = replicas({})
    made = router([known])
    both = [PendingRequest([], {}, metadata("one")) for _ in range(2)]
    waiting(made, both)
    for each in both:
        made._fulfill_next_pending_request(known, each.metadata)
    assert [each.future.done() and each.future.result() for each in both] == [known] * 2


async def test_calls_that_come_together_do_not_all_go_where_the_first_one_goes() -> None:
    """Serve sends, and counts, only after it has given all of them a replica. The name is Serve's own, too."""
    assert callable(RequestRouter._fulfill_next_pending_request)
    known = replicas({}, {})
    known[0].calls = 1
    made = router(known)
    burst = [PendingRequest([call("x")], {}, metadata(str(place))) for place in range(11)]
    waiting(made, burst)
    for each in burst:
        made._fulfill_next_pending_request(await chosen(made, known, call("x")), each.metadata)
    assert [each.calls for each in known] == [6, 6]
    for each in burst:
        made.on_send_request(each.future.result().replica_id)
    assert [each.calls for each in known] == [6, 6]
    made.on_send_request(known[0].replica_id)  # a question to all: nobody gave it a replica
    made._fulfill_next_pending_request(known[0], metadata("gone"))
    assert [each.calls for each in known] == [7, 6]


def test_serve_still_takes_a_version() -> None:
    app = pool_app("p", scripted_config(Path()), load_scripted)
    assert app._bound_deployment._version == pool_version("p", scripted_config(Path()), load_scripted)


async def test_equal_replicas_share_the_calls() -> None:
    known = replicas({}, {})
    made = router(known)
    counts = Counter([str((await chosen(made, known, call("x"))).replica_id.unique_id) for _ in range(200)])
    assert min(counts.values()) > 50


async def test_what_was_just_sent_counts_before_the_replica_says_so() -> None:
    known = replicas({}, {}, {})
    made = router(known)
    made.on_request_routed(SimpleNamespace(args=[call(LONG)]), known[2].replica_id, None)
    for _ in range(5):
        assert (await chosen(made, known, call(LONG))) is known[2]


async def test_sessions_keep_their_replica_where_they_stick() -> None:
    known = replicas({}, {}, {}, {})
    asked = call(LONG, session="s")
    home = await chosen(router(known, sticky=True), known, asked)
    for each in known:  # another router, and one that has seen the session, come to the same one
        each.calls = 0 if each is not home else 50
    assert (await chosen(router(known, sticky=True), known, asked)) is home
    made = router(known, sticky=True)
    other = next(each for each in known if each is not home)
    made.on_request_routed(SimpleNamespace(args=[asked]), other.replica_id, None)
    assert (await chosen(made, known, asked)) is other
    assert (await chosen(made, [each for each in known if each is not other], asked)) is home
    assert (await chosen(router(known), known, asked)) is not home
    homes = {(await chosen(made, known, replace(asked, session=f"s{i}"))).replica_id.unique_id for i in range(40)}
    assert len(homes) == 4


async def test_no_tenant_makes_the_sessions_of_another_one_lose_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_choice, "MAX_SESSIONS", 4)
    known = replicas({}, {}, {}, {})
    made = router(known, sticky=True)
    mine = call(LONG, session="s", tenant="b")
    usual = await chosen(made, known, mine)
    home = next(each for each in known if each is not usual)
    made.on_request_routed(SimpleNamespace(args=[mine]), home.replica_id, None)
    for place in range(5):
        made.on_request_routed(SimpleNamespace(args=[call("x", session=f"s{place}")]), usual.replica_id, None)
    assert (await chosen(made, known, mine)) is home


def test_the_router_travels_by_value() -> None:
    assert cloudpickle.loads(cloudpickle.dumps(PrefixRouter)).__name__ == "PrefixRouter"
