"""Which waiting operations join the next forward pass, and with how many tokens each.

Stall-free batches (paper #239, Sarathi-Serve): running requests that need one token, and drafts, first, then what they
have to catch up on, then prompts begun, then new ones, then background work. The budget of a step is a time, not only a
number of tokens: while requests are decoding, whatever is fed beside them may stretch their step to at most
`max_slowdown` times its own length, so chunks of a prompt shrink as it attends to more; a step shorter than anybody
notices may be stretched further. Several prompts share one forward (paper #186, Prepacking: on ragged batches, one long
row). Where tenants compete, `fair_time` bounds the step as well. Pure decisions: no tensors, no event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import inf
from typing import Protocol

from engine.costs.forward import Forward, StepTime
from engine.scheduler.fair_time import MARGIN, FairShare, usual_step
from engine.scheduler.ordering import DEFAULT_MAX_OVERTAKEN, Order, Prompt, arranged

# Of a step of one token, which is run in any case: what fits in beside it costs others next to nothing.
FREE_STRETCH = 1.25
NO_PARTS: Mapping[str, float] = {}


class Waiting(Prompt, Protocol):
    """What the scheduler needs to know about an operation."""

    background: bool
    remaining: int  # tokens still to feed, at least 1

    @property
    def atomic(self) -> int:
        """The last so many tokens must be fed together (1, or a draft tree and the token before it)."""
        ...

    @property
    def cached(self) -> int:
        """Tokens of its sequence that are cached already: what the next one attends to."""
        ...

    @property
    def started(self) -> bool:
        """Whether part of its sequence is cached already; what is not must be admitted."""
        ...

    @property
    def tenant(self) -> str:
        """Whose request it belongs to."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold.

    Attributes:
        token_budget: most tokens in the forward; exceeded only by a single atomic operation larger than it.
        max_batch: most operations in the forward.
        max_slowdown: how many times longer than the decodes alone a step with decodes may take.
        order: which prompts start first; see `engine.scheduler.ordering`.
        max_overtaken: how often a prompt may be overtaken.
        patient_slowdown: how many times longer than one of a single token a step of work in no hurry may take.
        patient_slowdown_beside: the same where work in a hurry was here lately.
        short_s: seconds that a step may take whatever `max_slowdown` says: so short a wait is noticed by nobody.
    """

    token_budget: int
    max_batch: int
    max_slowdown: float = 1.75
    order: Order = "fifo"
    max_overtaken: int = DEFAULT_MAX_OVERTAKEN
    patient_slowdown: float = 4.0
    patient_slowdown_beside: float = 1.5
    short_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """One operation's part of a step: index into the given list, and tokens fed."""

    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """What waits for one model, in predicted seconds of a step of each tenant's own.

    Attributes:
        running: with its running requests only.
        alone: with everything it has waiting.
        has_prompts: whether some of that are prompts.
    """

    running: dict[str, float]
    alone: dict[str, float]
    has_prompts: bool


def is_decode(work: Waiting) -> bool:
    """Whether a step brings it to its result, and no prompt ends with it: the next token of an answer, or a draft."""
    return work.remaining <= work.atomic and work.started and not work.background and (work.running or work.atomic > 1)


def load_of(waiting: Iterable[Waiting], limits: Limits, times: StepTime | None) -> Load:
    """What each tenant's operations would take in a step of their own (background ones cost nobody anything)."""
    if times is None:
        return Load({}, {}, False)
    urgent: dict[str, Forward] = {}
    prompts: dict[str, Forward] = {}
    for work in waiting:
        if not work.background:
            kind = urgent if work.running or is_decode(work) else prompts
            forward = kind.setdefault(work.tenant, Forward())
            tokens = min(work.remaining, limits.token_budget - forward.fed)
            if tokens > 0:
                forward.add(work.cached, tokens)
    running = {tenant: forward.seconds(times) for tenant, forward in urgent.items()}
    alone = {tenant: limits.max_slowdown * running[tenant] for tenant in prompts if tenant in running}
    alone |= {tenant: forward.seconds(times) for tenant, forward in prompts.items() if tenant not in running}
    return Load(running, running | alone, bool(prompts))


def plan_step(
    waiting: Sequence[Waiting],
    limits: Limits,
    times: StepTime | None = None,
    admit: Callable[[int, bool], bool] = lambda index, alone: True,
    owed: FairShare | None = None,
    contested: bool = False,
    neighbours: Callable[[], Sequence[Load]] = tuple,
    longest: float = inf,
) -> list[Share]:
    """Choose what the next step feeds.

    Args:
        waiting: operations that could run now.
        limits: what a step may hold.
        times: predicts durations; None bounds steps by tokens only.
        admit: asked, in order of precedence, before an operation that has not started gets its first tokens:
            (its index, whether nothing that has started could run instead). It may update the operation.
        owed: what tenants are owed.
        contested: whether more than one tenant has work for the device.
        neighbours: what waits for the other models of the device; asked only where it matters.
        longest: what the step may take at most, in seconds; one operation gets something in any case.

    Returns:
        Shares in order of precedence: if memory runs out, the first ones keep theirs.
    """
    return _Plan(waiting, limits, times, owed or FairShare(), longest).make(admit, contested, neighbours)


class _Plan:
    """One step being put together; see `plan_step`."""

    def __init__(
        self, waiting: Sequence[Waiting], limits: Limits, times: StepTime | None, owed: FairShare, longest: float
    ) -> None:
        self._waiting = waiting
        self._limits = limits
        self._times = times
        self._owed = owed
        self._longest = longest
        self._neighbours: Sequence[Load] = ()
        self._alone: dict[str, float] = {}  # seconds of each tenant's own step; empty when there is one tenant
        self._forward = Forward()
        self._shares: list[Share] = []

    def make(
        self, admit: Callable[[int, bool], bool], contested: bool, neighbours: Callable[[], Sequence[Load]]
    ) -> list[Share]:
        """See `plan_step`."""
        decodes: list[int] = []
        others: list[int] = []
        for index, work in enumerate(self._waiting):
            (decodes if is_decode(work) else others).append(index)
        decodes.sort(key=lambda i: self._waiting[i].order)
        if self._times is not None and (contested or others):
            self._neighbours = neighbours()
        if self._times is not None and contested:
            self._make_fair(decodes, others, admit, self._times)
        else:
            self._take_decodes(decodes, self._longest)
            if not self._shares:
                self._take_decodes(decodes[:1], inf)
            self._take_others(self._ordered(others), inf, admit)
        return self._shares

    def _make_fair(
        self, decodes: list[int], others: list[int], admit: Callable[[int, bool], bool], times: StepTime
    ) -> None:
        """A step in which every tenant gets its part of the time, and no prompt of any stalls those who run.

        Decodes of tenants whose requests fit into a step together are in every step, whoever is owed time. Then others'
        come until each tenant has its part. Where something else waits as well, its tenants' parts are kept, further
        decodes get half of what is left of the step (with a slowdown of 2), and prompts the rest.
        """
        here = load_of(self._waiting, self._limits, times).alone
        elsewhere: dict[str, float] = {}
        for load in self._neighbours:
            for tenant in load.alone.keys() - here.keys():
                elsewhere[tenant] = elsewhere.get(tenant, 0.0) + load.alone[tenant]
        self._alone = here
        small = self._small(decodes, min(usual_step(here, elsewhere), self._longest), times)
        self._take_decodes([i for i in decodes if self._waiting[i].tenant in small], inf)
        limit = self._owed.longest_step(here, elsewhere)
        least = times.seconds(1, 1, 1)  # what any step takes, shared by all
        limit = min(max(limit, self._forward.seconds(times), least * FREE_STRETCH), self._longest)
        n = len(here) + len(elsewhere)
        # Whose own step is all that a part is measured by, or who is owed time, is served in full.
        full = [t for t in here if self._owed.owed(t) > 0 or here[t] * MARGIN * n <= limit * 1.001]
        part = {t: limit if t in full else min(least + (limit - least) / n, limit) for t in here}
        tenants = {self._waiting[i].tenant for i in others if not self._waiting[i].background}
        only_prompts = tenants - {self._waiting[i].tenant for i in decodes}
        large = [i for i in decodes if self._waiting[i].tenant not in small]
        parts, further = self._divide(large, part, times)
        self._take_decodes(parts, limit - sum(here[t] for t in only_prompts if part[t] == limit))
        kept = sum(min(here[t], part[t]) for t in only_prompts)
        spare = max(limit - kept - self._forward.seconds(times), 0.0)
        kept += spare * (1.0 - 1.0 / self._limits.max_slowdown) if tenants else 0.0
        self._take_decodes(further, limit - kept)
        neediest = max(here, key=self._owed.balance, default="")
        if not self._shares:
            self._take_decodes([i for i in decodes if self._waiting[i].tenant == neediest][:1], inf)
        self._take_others(self._ordered(others), limit, admit, part if len(tenants) > 1 else {})
        if not self._shares:  # room was kept for somebody who could not be admitted
            self._take_decodes(decodes[:1], inf)
            self._take_decodes(decodes[1:], limit)

    def _small(self, decodes: list[int], limit: float, times: StepTime) -> set[str]:
        """The tenants with the shortest decodes, as many as fit into such a step with all of theirs."""
        own: dict[str, list[int]] = {}
        for index in decodes:
            own.setdefault(self._waiting[index].tenant, []).append(index)
        seconds = {tenant: self._forward_of(indices).seconds(times) for tenant, indices in own.items()}
        small: set[str] = set()
        together: list[int] = []
        for tenant in sorted(own, key=seconds.__getitem__):
            together += own[tenant]
            if self._forward_of(together).seconds(times) > limit:
                break
            small.add(tenant)
        return small

    def _forward_of(self, decodes: list[int]) -> Forward:
        forward = Forward()
        for index in decodes:
            forward.add(self._waiting[index].cached, self._waiting[index].remaining)
        return forward

    def _divide(self, decodes: list[int], part: Mapping[str, float], times: StepTime) -> tuple[list[int], list[int]]:
        """Decodes that are within their tenants' parts of the step, in turn by time, and the others, oldest first."""
        queues: dict[str, deque[int]] = {}
        for index in decodes:
            queues.setdefault(self._waiting[index].tenant, deque()).append(index)
        used = {tenant: Forward() for tenant in queues}
        # Seconds behind those that may have more of the step.
        head = {tenant: self._owed.owed(tenant) + part[tenant] for tenant in queues}
        heap = [(-head[tenant], self._waiting[queue[0]].order, tenant) for tenant, queue in queues.items()]
        heapify(heap)
        parts: list[int] = []
        while heap:
            _, _, tenant = heappop(heap)
            queue, forward = queues[tenant], used[tenant]
            work = self._waiting[queue[0]]
            if forward.seconds(times, work.cached, work.remaining) > part[tenant]:
                continue
            parts.append(queue.popleft())
            forward.add(work.cached, work.remaining)
            if queue:
                heappush(heap, (forward.seconds(times) - head[tenant], self._waiting[queue[0]].order, tenant))
        further = [index for queue in queues.values() for index in queue]
        return parts, sorted(further, key=lambda i: self._waiting[i].order)

    def _take_decodes(self, decodes: Iterable[int], limit: float) -> None:
        """Operations one step away from a result, until the step would be longer than the limit."""
        for index in decodes:
            work = self._waiting[index]
            if len(self._shares) >= self._limits.max_batch:
                break
            if self._shares and work.remaining > self._limits.token_budget - self._forward.fed:
                continue
            if limit < inf and self._seconds(work, work.remaining) > limit:
                break
            self._take(index, work.remaining)

    def _rank(self, index: int) -> tuple[bool, float, bool, float, bool, int]:
        """Precedence: tenants owed most, running requests, tenants with least to do, prompts begun, new ones."""
        work = self._waiting[index]
        balance, alone = self._owed.balance(work.tenant), self._alone.get(work.tenant, 0.0)
        return work.background, -balance if self._alone else 0.0, not work.running, alone, not work.started, work.order

    def _ordered(self, others: list[int]) -> list[int]:
        """By precedence; prompts of equal precedence that have not started as `ordering` arranges them."""
        others.sort(key=self._rank)
        if self._limits.order == "fifo":
            return others
        result: list[int] = []
        for _, group in groupby(others, lambda index: self._rank(index)[:-1]):
            indices = list(group)
            prompts = [self._waiting[index] for index in indices]
            if not (prompts[0].started or prompts[0].running or prompts[0].background):
                order = arranged(prompts, self._limits.max_overtaken, self._limits.max_batch)
                indices = [indices[place] for place in order]
            result += indices
        return result

    def _take_others(
        self,
        others: list[int],
        limit: float,
        admit: Callable[[int, bool], bool],
        part: Mapping[str, float] = NO_PARTS,
    ) -> None:
        """Catch-ups, prompts and background work, in chunks that keep the step within its limit.

        Args:
            others: in order of precedence.
            limit: longest the step may be, in seconds, as far as running requests allow.
            admit: see `plan_step`.
            part: tenant -> longest a step with only one of its chunks may be, in seconds; absent: any time.
        """
        alone = not any(work.started and not work.background for work in self._waiting)
        stall_free = min(self._stall_free_limit(), self._longest)
        fed_some = False
        for index in others:
            work = self._waiting[index]
            if self._limits.token_budget <= self._forward.fed or len(self._shares) >= self._limits.max_batch:
                break
            # However long a step of one tenant's is already, something beside the decodes goes on: his first who is
            # owed time, as long as nobody who runs is stalled.
            owed = bool(self._alone) and self._owed.owed(work.tenant) > 0
            most = stall_free if owed and stall_free < inf else min(limit, stall_free)
            least = 0 if fed_some or (self._shares and self._alone and not owed) else 1
            if not least and most < inf and self._seconds(work, 1) > most:
                break
            if not (work.started or work.background or admit(index, alone and not self._shares)):
                continue
            tokens = self._chunk(work, most, part.get(work.tenant, inf), least)
            if tokens:
                self._take(index, tokens)
                fed_some = True

    def _stall_free_limit(self) -> float:
        """Longest the step may be beside the decodes it already holds, and those of the other models."""
        if self._times is None:
            return inf
        own = self._forward.seconds(self._times)
        elsewhere = sum(sum(load.running.values()) for load in self._neighbours)
        if own + elsewhere == 0.0:
            return inf
        sharers = 1 + sum(load.has_prompts for load in self._neighbours)
        limit = max(own + (self._limits.max_slowdown - 1.0) * (own + elsewhere) / sharers, self._limits.short_s)
        # Beside decodes of other models only, a step takes what a token takes: a little more is fed for little more.
        return limit if own else max(limit, FREE_STRETCH * self._times.seconds(1, 1, 1))

    def _chunk(self, work: Waiting, limit: float, part: float, least: int) -> int:
        """Tokens to feed now: all that is left, or a chunk that keeps the limits and does not cut the atomic tail."""
        before_tail = work.remaining - work.atomic
        tokens = min(work.remaining, self._limits.token_budget - self._forward.fed)
        if self._times is not None:
            tokens = max(_longest(self._forward, self._times, work, tokens, limit), least)
            tokens = max(_longest(Forward(), self._times, work, tokens, part), least)
        if tokens == work.remaining or before_tail > 0:
            return tokens if tokens == work.remaining else min(tokens, before_tail)
        return 0 if self._shares else work.remaining

    def _seconds(self, work: Waiting, tokens: int) -> float:
        """Predicted time of the step with so many tokens of one more operation; 0.0 when nothing is known."""
        return self._forward.seconds(self._times, work.cached, tokens) if self._times is not None else 0.0

    def _take(self, index: int, tokens: int) -> None:
        self._shares.append(Share(index, tokens))
        self._forward.add(self._waiting[index].cached, tokens)


def _longest(forward: Forward, times: StepTime, work: Waiting, most: int, limit: float) -> int:
    """The largest number of its tokens, at most `most`, with which a forward keeps the limit."""
    if limit == inf or forward.seconds(times, work.cached, most) <= limit:
        return most
    fits, too_long = 0, most
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if forward.seconds(times, work.cached, middle) <= limit:
            fits = middle
        else:
            too_long = middle
    return fits
