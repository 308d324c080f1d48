"""Which replica of a pool answers a call: the one that is expected to be done with it first.

Serve sends this module by value to each process that has a handle: it stays small, and has no active globals.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from uuid import uuid4

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.prompt_prefix import Held, prefixes, unpacked
from turnout.calls import GenerateCall
from turnout.tenant_lru import Remembered

MAX_SESSIONS = 10_000
SENT_BYTES = 16 << 20
MAX_GONE = 100
EVEN_OUT_S = 2.0  # between two times that waiting calls are sent from one replica to another
# Beyond the grace, until the clients of a retired replica have seen it end.
SLACK_S = 5.0
ASK_S = 60.0  # time a replica has to answer a question of the router


@dataclass(slots=True)
class _Known:
    """What is known of one replica: what it has published, and what was sent to it from here since."""

    sent: Held
    packed: bytes = b""
    published: frozenset[bytes] = frozenset()

    def hear(self, packed: bytes) -> None:
        """What it has published last."""
        if packed != self.packed:
            self.packed, self.published = packed, unpacked(packed)

    def holds(self, beginnings: list[tuple[int, bytes]]) -> int:
        """Length of the longest beginning that is there, in bytes."""
        there = (length for length, digest in reversed(beginnings) if digest in self.published or digest in self.sent)
        return next(there, 0)


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Serve is not typed
    """Weighs the prompt that a replica need not compute against the work it has before it, both in seconds.

    A replica with k calls that cost it c seconds each is done with them after k * c; a prompt of n bytes, h of them
    cached there, takes it (n - h) * b more. c and b are the pool's, the median of what its replicas say: one that has
    long served single calls, or none, does not know what a call costs among many. So a prompt that many share stays
    where it is cached until that replica is busier than computing it once more elsewhere would cost; and where nothing
    is known, the fewest calls decide.
    Calls of one session stay on one replica where `sticky` asks for it, as long as that one has room: their prompts are
    cached there. What a router decided for the session goes along with each of them.
    """

    def initialize_state(self, sticky: bool = False, grace_s: float = 0.0, room: int = 0, places: int = 0) -> None:
        """Called once.

        Args:
            sticky: sessions keep their replica as long as it lives.
            grace_s: time between the moment Serve retires a replica and the moment it ends it, in seconds.
            room: generations that a replica takes; beyond them it has room for questions only. 0: as Serve says.
            places: generations that a replica works on at once; those beyond wait there, and are sent to another one
                that has a place. 0: they stay.
        """
        self._room = room
        self._places = places
        self._evening = False
        self._sticky = sticky
        self._grace_s = grace_s
        self._known: dict[ReplicaID, _Known] = {}
        self._homes: Remembered[str, ReplicaID] = Remembered(MAX_SESSIONS)
        self._died: set[ReplicaID] = set()
        self._retired: OrderedDict[str, float] = OrderedDict()  # when
        self._gone: OrderedDict[str, str] = OrderedDict()  # where they were
        self._template: PendingRequest | None = None
        self._counted: Counter[ReplicaID] = Counter()  # calls that have been given a replica, and not been sent

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`: the best one, the next one, the rest."""
        call = None
        if pending_request is not None:
            # Serve asks again at once, without end, unless it has to wait longer from one time to the next.
            pending_request.routing_context.should_backoff = True
            call = pending_request.args[0] if pending_request.args else None
        if len(candidate_replicas) < 2:
            return [candidate_replicas]
        ordered = self._ordered(candidate_replicas, call if isinstance(call, GenerateCall) else None)
        return [ordered[:1], ordered[1:2], ordered[2:]]

    def _ordered(self, candidates: list[RunningReplica], call: GenerateCall | None) -> list[RunningReplica]:
        # Where a call has moved, what counts is that it gets on, not where its prompt was read.
        beginnings = prefixes(call) if call is not None and call.moved is None else []
        costs = self._costs(candidates, beginnings)
        ordered = sorted(candidates, key=lambda each: costs[each.replica_id])
        if call is not None and self._sticky and call.session:
            kept = self._homes.get(call.tenant, call.session)
            # Another process that routes the same session, or this one after a restart, comes to the same replica.
            home = next((each for each in candidates if each.replica_id == kept), None) or max(
                candidates, key=lambda each: _affinity(call, each.replica_id)
            )
            if not costs[home.replica_id][0]:
                ordered.remove(home)
                ordered.insert(0, home)
        return ordered

    def _costs(
        self, candidates: list[RunningReplica], beginnings: list[tuple[int, bytes]]
    ) -> dict[ReplicaID, tuple[bool, float, int, float]]:
        """What to sort by: full or not, seconds until done, calls in progress; a die where all are equal."""
        stats = {each.replica_id: each.routing_stats or {} for each in candidates}
        call_s, byte_s = (_middle([each.get(name, 0.0) for each in stats.values()]) for name in ("call_s", "byte_s"))
        size = beginnings[-1][0] if beginnings else 0
        costs = {}
        for each in candidates:
            said = stats[each.replica_id]
            calls = self.replica_queue_len_cache.get(each.replica_id)
            calls = said.get("requests", 0) if calls is None else calls
            backlog_s = max(calls * call_s, said.get("waiting_s", 0.0))
            known = self._of(each.replica_id)
            known.hear(said.get("held", b""))
            left = size - known.holds(beginnings)
            seconds = backlog_s + left * byte_s
            room = self._room or each.max_ongoing_requests
            costs[each.replica_id] = (calls >= room, seconds, calls, random.random())
        return costs

    def _of(self, replica_id: ReplicaID) -> _Known:
        return self._known.setdefault(replica_id, _Known(Held(SENT_BYTES)))

    def _get_pending_request_matching_internal_request_id(self, request_metadata: object = None) -> Any:
        """Serve's own finds only one of the calls that are made for one request: they share its internal id."""
        waiting = self._pending_requests_to_fulfill
        return next((each for each in waiting if each.metadata is request_metadata and not each.future.done()), None)

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: object = None) -> None:
        """Serve counts a call when it is sent: of calls that come together, all would go where the first one goes.

        A call that is given up in between stays counted until its replica next says how many it has.
        """
        given = self._get_pending_request_matching_internal_request_id(request_metadata) is not None
        super()._fulfill_next_pending_request(replica, request_metadata)
        if given:
            super().on_send_request(replica.replica_id)
            self._counted[replica.replica_id] += 1

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """See `RequestRouter`: what was given a replica has been counted then; questions to all were not."""
        if self._counted[replica_id]:
            self._counted[replica_id] -= 1
        else:
            super().on_send_request(replica_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """See `RequestRouter`: what was sent there is soon cached there."""
        self._template = pending_request
        call = pending_request.args[0] if pending_request.args else None
        if not isinstance(call, GenerateCall):
            return
        if self._sticky and call.session:
            self._homes.put(call.tenant, call.session, replica_id)
        if len(self.curr_replicas) > 1 and replica_id in self.curr_replicas:
            self._of(replica_id).sent.note(prefixes(call))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See `RequestRouter`: it has not been retired."""
        self._died.add(replica_id)
        if replica_id in self.curr_replicas:
            self._leaves(self.curr_replicas[replica_id])
        super().on_replica_actor_died(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter`: who is no longer listed, and has not died, is stopping, or hangs."""
        listed = {each.replica_id for each in replicas}
        for replica_id, each in self.curr_replicas.items():
            if replica_id not in listed:
                self._leaves(each)
                if replica_id not in self._died:
                    self._retire(each)
        super().update_replicas(replicas)
        self._known = {key: known for key, known in self._known.items() if key in listed}
        self._died &= listed
        self._counted = Counter({key: count for key, count in self._counted.items() if key in listed})
        self._even_out(replicas)

    def _even_out(self, replicas: list[RunningReplica]) -> None:
        """Have waiting calls of the fullest replica go on in the emptiest one: a new one, or one that is done early."""
        template = self._template
        known = [(each.routing_stats["requests"], each) for each in replicas if each.routing_stats]
        if template is None or not self._places or self._evening or not known:
            return
        (fewest, _), (most, fullest) = (pick(known, key=lambda each: each[0]) for pick in (min, max))
        count = min(most - self._places, self._places - fewest)
        if count > 0:
            self._evening = True  # until replicas have said what became of it
            self._event_loop.create_task(_ask(fullest, template, "send_away", count))
            self._event_loop.call_later(EVEN_OUT_S, self._evened)

    def _evened(self) -> None:
        self._evening = False
        self._even_out(list(self.curr_replicas.values()))

    def _retire(self, replica: RunningReplica) -> None:
        template = self._template
        if template is None or not self._grace_s:
            self._excuse(replica)  # nothing was sent from here, or it ends before it could answer
            return

        async def ask() -> None:
            if await _ask(replica, template, "models"):
                self._excuse(replica)
                # No call leaves yet, but what takes time is made ready.
                await _ask(replica, template, "hand_over", "", True)

        self._event_loop.create_task(ask())
        # Well before Serve ends the process, all leave.
        self._event_loop.call_later(self._grace_s / 2, self._hand_over, replica, template)

    def _hand_over(self, replica: RunningReplica, template: PendingRequest) -> None:
        self._event_loop.create_task(_ask(replica, template, "hand_over", None, True))

    def _excuse(self, replica: RunningReplica) -> None:
        _keep(self._retired, replica.actor_id.hex(), time.monotonic())

    def _leaves(self, replica: RunningReplica) -> None:
        _keep(self._gone, replica.actor_id.hex(), (replica.routing_stats or {}).get("place", ""))

    def retired(self, actor_id: str) -> bool:
        """Return whether Serve retired a replica that still answered then.

        Args:
            actor_id: hexadecimal id of its actor; "": it is not known which one, and any that is about to end counts.
        """
        if actor_id:
            return actor_id in self._retired
        return any(time.monotonic() < since + self._grace_s + SLACK_S for since in self._retired.values())

    def place(self, actor_id: str) -> str:
        """Node and process of a replica, which may have ended, by the hexadecimal id of its actor; "": unknown."""
        there = {each.actor_id.hex(): (each.routing_stats or {}).get("place") for each in self.curr_replicas.values()}
        return there.get(actor_id) or self._gone.get(actor_id, "")


async def _ask(replica: RunningReplica, template: PendingRequest, method: str, *args: object) -> bool:
    """Ask one replica, which may have ended or be frozen; whether it answered in time."""
    metadata = replace(template.metadata, call_method=method, is_streaming=False, internal_request_id=uuid4().hex)
    request = PendingRequest(args=list(args), kwargs={}, metadata=metadata, resolved=True)
    try:
        async with asyncio.timeout(ASK_S):
            await replica.try_send_request(request, with_rejection=False).get_async()
    except Exception:
        return False
    return True


def _keep(among: OrderedDict[str, Any], key: str, value: object) -> None:
    among[key] = value
    while len(among) > MAX_GONE:
        among.popitem(last=False)


def _middle(values: list[float]) -> float:
    """Of those that are known."""
    known = [value for value in values if value]
    return median(known) if known else 0.0


def _affinity(call: GenerateCall, replica_id: ReplicaID) -> bytes:
    named = f"{call.tenant}\x1f{call.session}\x1f{replica_id.unique_id}"
    return hashlib.blake2b(named.encode(errors="replace"), digest_size=8).digest()
