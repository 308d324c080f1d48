"""Scheduling policy: which waiting operations join the next forward of a model, and with how many tokens each.

Stall-free batches (paper #239, Sarathi-Serve): first decodes and drafts, then tokens that running requests must catch
up on, then prompts in progress, then new prompts, then background operations. A step is bounded by time, not only by
tokens: while requests decode, other tokens may stretch their step to at most `max_slowdown` times its length, or more
where more prompts wait than requests decode, so chunks of a prompt shrink as it attends to more. Several prompts share
one forward (paper #186, Prepacking: in ragged batches, one long row). If tenants compete, `fairness` bounds the step as
well. Pure decisions: no tensors, no event loop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import inf
from typing import NamedTuple

from engine.costs.forward import Forward, StepTime
from engine.scheduler.fairness import MARGIN, FairShare, usual_step
from engine.scheduler.limits import DeviceState, Limits, Load, P, Waiting, arranged, first_of, is_decode, load_of

# Of a step of one token, whose cost is fixed: tokens that fit into this much more cost others next to nothing.
FREE_STRETCH = 1.25
# Prompts for each running request that may stretch a step, each by as much as one alone.
MOST_CROWDED = 8.0
NO_PARTS: Mapping[str, float] = {}


class Share(NamedTuple):
    """One operation's part of a step: its place in the given list, and tokens fed."""

    place: int
    tokens: int


@dataclass(slots=True)
class Policy:
    """Policy of one model: the order in which prompts start, the longest step, and each operation's share of a step.

    Attributes:
        limits: limits of a step.
        times: predicts the duration of steps; None bounds steps by tokens only.
        owed: balances of the device's tenants.
    """

    limits: Limits
    times: StepTime | None
    owed: FairShare

    def order(self, prompts: Sequence[P]) -> P:
        """Return the prompt, of one tenant's, that starts first."""
        return first_of(prompts, self.limits.order, self.limits.max_overtaken)

    def limit(self, low_priority: bool, device: DeviceState) -> float:
        """Return the seconds that a step may take: with low-priority operations, so that interactive ones wait shortly.

        Less if interactive operations ran recently; infinity without low-priority operations.
        """
        if self.times is None or not low_priority:
            return inf
        limits = self.limits
        interactive = device.has_interactive_work
        slowdown = limits.low_priority_slowdown_interactive if interactive else limits.low_priority_slowdown
        return slowdown * self.times.seconds(1, 1, 1)

    def share(
        self,
        candidates: Sequence[Waiting],
        admit: Callable[[int, bool], bool],
        contested: bool,
        device: DeviceState,
        longest: float,
    ) -> list[Share]:
        """Divide a step between operations; see `plan_step`."""
        limits, times, owed = self.limits, self.times, self.owed
        return plan_step(candidates, limits, times, admit, owed, contested, lambda: device.loads, longest)

    def yields(self, load: Load, tenants: Collection[str], device: DeviceState) -> bool:
        """Return whether another model's step should come first, because its tenants are owed more time.

        Running requests are not delayed for longer than prompts may delay them.

        Args:
            load: of this model.
            tenants: with operations waiting for this model.
            device: the other models.
        """
        mine = max(map(self.owed.balance, tenants), default=0.0)
        if not any(self.owed.balance(tenant) > max(mine, 0.0) for tenant in device.tenants):
            return False
        running_s = sum(sum(each.running.values()) for each in (load, *device.loads))
        return not load.running or device.waited_s < (self.limits.max_slowdown - 1.0) * running_s


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
        limits: limits of the step.
        times: predicts durations; None bounds steps by tokens only.
        admit: asked, in order of precedence, before an operation that has not started gets its first tokens:
            (its index, whether nothing that has started could run instead). It may update the operation.
        owed: balances of the tenants.
        contested: whether more than one tenant has operations waiting on the device.
        neighbours: returns the load of the device's other models; called only if needed.
        longest: duration of the step, in seconds, at most; one operation gets something in any case.

    Returns:
        Shares in order of precedence: if memory runs out, the first ones get theirs.
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
        """Plan a step in which every tenant gets its part of the time, and prompts stall no running request.

        Decodes of tenants whose requests fit into a step together are in every step. Then other tenants' decodes
        follow, up to each one's part. If prompts wait as well, their tenants' parts are reserved, further decodes get
        half of the rest of the step (with a slowdown of 2), and prompts what is left.
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
        least = times.seconds(1, 1, 1)  # fixed cost of a step, shared by all
        limit = min(max(limit, self._forward.seconds(times), least * FREE_STRETCH), self._longest)
        n = len(here) + len(elsewhere)
        # Tenants that are owed time, or whose own step bounds this one, are served in full.
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
        if not self._shares:  # the time reserved was for a prompt that was not admitted
            self._take_decodes(decodes[:1], inf)
            self._take_decodes(decodes[1:], limit)

    def _small(self, decodes: list[int], limit: float, times: StepTime) -> set[str]:
        """Return the tenants with the shortest decodes, as many as fit into a step with all of theirs."""
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
        """Return the decodes within their tenants' parts of the step, in turn by time, and the others, oldest first."""
        queues: dict[str, deque[int]] = {}
        for index in decodes:
            queues.setdefault(self._waiting[index].tenant, deque()).append(index)
        used = {tenant: Forward() for tenant in queues}
        # Seconds by which a tenant goes before others.
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
        """Add decodes until the step would be longer than the limit."""
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
        """Return the precedence: tenants owed most, running requests, tenants with least to do, prompts in progress."""
        work = self._waiting[index]
        balance, alone = self._owed.balance(work.tenant), self._alone.get(work.tenant, 0.0)
        return work.background, -balance if self._alone else 0.0, not work.running, alone, not work.started, work.order

    def _ordered(self, others: list[int]) -> list[int]:
        """Sort by precedence; new prompts of equal precedence in the order of `arranged`."""
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
        """Add catch-ups, prompts and background operations, in chunks that keep the step within its limit.

        Args:
            others: in order of precedence.
            limit: duration of the step, in seconds, at most; less if running requests require it.
            admit: see `plan_step`.
            part: tenant -> duration of a step with only one of its chunks, in seconds, at most; absent: any.
        """
        alone = not any(work.started and not work.background for work in self._waiting)
        stall_free = min(self._stall_free_limit(), self._longest)
        fed_some = False
        for index in others:
            work = self._waiting[index]
            if self._limits.token_budget <= self._forward.fed or len(self._shares) >= self._limits.max_batch:
                break
            # A step of one tenant always feeds something in addition to the decodes. With several, tenants that are
            # owed time go first, as long as no running request is stalled.
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
        """Return the duration that does not stall the decodes in the step, and those of the other models."""
        if self._times is None:
            return inf
        own = self._forward.seconds(self._times)
        elsewhere = sum(sum(load.running.values()) for load in self._neighbours)
        if own + elsewhere == 0.0:
            return inf
        sharers = 1 + sum(load.has_prompts for load in self._neighbours)
        crowding = self._crowding() if elsewhere == 0.0 else 1.0
        stretch = (self._limits.max_slowdown - 1.0) * crowding
        limit = max(own + stretch * (own + elsewhere) / sharers, self._limits.short_s)
        # If only other models decode, the step costs at least one token's: a little more costs little more.
        return limit if own else max(limit, FREE_STRETCH * self._times.seconds(1, 1, 1))

    def _crowding(self) -> float:
        """Return how many prompts wait for each running request, of the tenant with the fewest: 1 to `MOST_CROWDED`.

        A few running requests would otherwise end as fast as prompts are read with them: they would keep all others
        waiting, and every step would be nearly empty.
        """
        running: Counter[str] = Counter()
        prompts: Counter[str] = Counter()
        for work in self._waiting:
            if not work.background:
                (running if work.running or is_decode(work) else prompts)[work.tenant] += 1
        fewest = min((prompts[tenant] / number for tenant, number in running.items()), default=1.0)
        return min(max(fewest, 1.0), MOST_CROWDED)

    def _chunk(self, work: Waiting, limit: float, part: float, least: int) -> int:
        """Return the tokens to feed: all, or a chunk that keeps the limits and does not cut the atomic tail."""
        before_tail = work.remaining - work.atomic
        tokens = min(work.remaining, self._limits.token_budget - self._forward.fed)
        if self._times is not None:
            tokens = max(_longest(self._forward, self._times, work, tokens, limit), least)
            tokens = max(_longest(Forward(), self._times, work, tokens, part), least)
        if tokens == work.remaining or before_tail > 0:
            return tokens if tokens == work.remaining else min(tokens, before_tail)
        return 0 if self._shares else work.remaining

    def _seconds(self, work: Waiting, tokens: int) -> float:
        """Predict the step with `tokens` of one more operation, in seconds; 0.0 without predictions."""
        return self._forward.seconds(self._times, work.cached, tokens) if self._times is not None else 0.0

    def _take(self, index: int, tokens: int) -> None:
        self._shares.append(Share(index, tokens))
        self._forward.add(self._waiting[index].cached, tokens)


def _longest(forward: Forward, times: StepTime, work: Waiting, most: int, limit: float) -> int:
    """Return the largest number of tokens, at most `most`, with which a forward keeps the limit."""
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
