"""Step builder: chooses the operations of a model's next forward, reserves memory, and lays out what each feeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from decoding.partial_forward import WHOLE
from decoding.sequence import Sequence
from engine.cache.blocks import OutOfBlocksError
from engine.cache.table import BlockTable
from engine.costs.forward import Forward, StepTime
from engine.runner import Feed
from engine.scheduler.block_allocator import BlockAllocator
from engine.scheduler.fairness import age
from engine.scheduler.limits import DeviceState, Limits, is_decode, load_of, note_started
from engine.scheduler.policy import Policy
from engine.scheduler.queue import OperationQueue
from engine.scheduler.queued_operation import QueuedOperation
from engine.scheduler.token_run import LONGEST_S, MOST_STEPS, TokenRun
from engine.threads import Fed

Parts = list[tuple[QueuedOperation, Feed]]


@dataclass(slots=True)
class Step:
    """One forward: its operations and what each feeds. As a context, it protects their caches while it runs.

    Attributes:
        parts: operations, each with its part of the forward; empty: nothing can run.
        forgone: the step was for low-priority operations while interactive ones wait, and none of them fits.
        finished: number of operations that ended while it was planned.
        repeated: every part is the next token of a decode loop.
        run: steps like it may follow it at once.
    """

    parts: Parts = field(default_factory=list)
    forgone: bool = False
    finished: int = 0
    repeated: bool = False
    run: TokenRun | None = None
    feeds: list[Feed] = field(init=False)  # of the parts

    def __post_init__(self) -> None:
        self.feeds = [feed for _, feed in self.parts]

    def __enter__(self) -> Step:
        for feed in self.feeds:
            feed.table.in_flight = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for feed in self.feeds:
            feed.table.in_flight = False
            if feed.partial is not None:
                feed.partial.let_go()
            if feed.table.released:
                feed.table.drop()

    @property
    def progresses(self) -> bool:
        """Whether something changed, so that another step may be planned at once."""
        return bool(self.parts) or self.forgone or self.finished > 0

    @property
    def num_forwards(self) -> int:
        """Forwards that it is: more than one where others like it followed it."""
        return 1 if self.run is None else max(len(self.run.seconds), 1)

    @property
    def fed(self) -> Fed:
        """Number of sequences and tokens."""
        if self.repeated:
            return Fed(len(self.parts), len(self.parts))
        return Fed(len(self.parts), sum(len(feed.tokens) for feed in self.feeds))

    @property
    def through_all_layers(self) -> bool:
        """Whether every part runs through the whole model."""
        return self.repeated or all(feed.depth is WHOLE or feed.depth == WHOLE for feed in self.feeds)

    @property
    def of_single_tokens(self) -> bool:
        """Whether every part is one token."""
        return self.repeated or all(len(feed.tokens) == 1 for feed in self.feeds)

    @property
    def takes_over(self) -> bool:
        """Whether part of it is not computed, because it is taken over from elsewhere."""
        if self.repeated:
            return False
        partial = [feed.partial for feed in self.feeds if feed.partial is not None]
        return any(len(each.given) or each.again for each in partial)

    @property
    def low_priority(self) -> bool:
        """Whether all operations are of low priority."""
        return all(work.low_priority for work, _ in self.parts)

    def forward(self, decodes_only: bool = False) -> Forward:
        """Return the cost of the forward, or of one with its decodes alone; of a run, of its forward in the middle."""
        cost = Forward()
        if self.repeated:
            cost.fed = cost.sequences = len(self.feeds)
            cost.attended = sum([len(feed.table.tokens) for feed in self.feeds], len(self.feeds))
            cost.attended += len(self.feeds) * (self.num_forwards - 1) // 2
            return cost
        for work, feed in self.parts:
            if not decodes_only or is_decode(work):
                cost.add(len(feed.table), len(feed.tokens))
        return cost

    def reading_seconds(self, seconds: float, times: StepTime) -> float:
        """Return by how much the step, which took `seconds`, was longer than its decodes alone would have been."""
        if self.repeated or all(is_decode(work) for work, _ in self.parts):
            return 0.0
        return max(seconds - self.forward(decodes_only=True).seconds(times), 0.0)

    def seconds_by_tenant(self, times: StepTime) -> dict[str, float]:
        """Predict the duration of a step with each tenant's parts alone.

        For a tenant of which only chunks of prompts were fed, the fixed cost of a step is left out: alone, its prompts
        would be read in fewer steps.
        """
        forwards = defaultdict[str, Forward](Forward)
        complete = set()
        for work, feed in self.parts:
            forwards[work.tenant].add(len(feed.table), len(feed.tokens))
            if len(feed.tokens) == work.remaining:
                complete.add(work.tenant)
        least = times.seconds(1, 1, 1)
        return {t: forward.seconds(times) - (0.0 if t in complete else least) for t, forward in forwards.items()}


class StepBuilder:
    """Builder of one model's steps.

    Args:
        queue: the model's operations.
        tables: caches of its sequences.
    """

    def __init__(self, queue: OperationQueue, tables: Mapping[Sequence, BlockTable]) -> None:
        self._queue = queue
        self._tables = tables
        self._steady: list[QueuedOperation] = []  # operations of the last step, where the next can be like it
        self._seen = -1  # changes of the queue when it was planned
        self._single = False  # no step like the next one may follow it at once

    def plan(self, policy: Policy, device: DeviceState) -> Step:
        """Choose the operations of the next step, reserve their memory, and lay out what each feeds."""
        if (repeated := self._repeated(device)) is not None:
            return Step(repeated, repeated=True, run=self._run_of(repeated, policy, device))
        num_waiting, single, self._single = len(self._queue), self._single, False
        step = self._plan(policy, device)
        step.finished = num_waiting - len(self._queue)
        if self._steady and not single and all(feed is work.repeated for work, feed in step.parts):
            step.repeated, step.run = True, self._run_of(step.parts, policy, device)
            return step
        for feed in step.feeds:
            if feed.partial is not None:
                feed.partial.hold()  # all memory of the step is reserved: blocks to reuse stay until it ends
        return step

    def _repeated(self, device: DeviceState) -> Parts | None:
        """Return the parts of a step like the last one, which a plan would come to as well; None: plan.

        Where one tenant's decode loops are all that the queue holds, or fill the step while prompts wait, every step
        feeds the next token of each.
        """
        works = self._steady
        if not works or self._seen != self._queue.changes or device.low_priority:
            return None
        if device.tenants and device.tenants != {works[0].tenant}:
            return None
        if not all(work.repeats for work in works):
            return None
        try:
            for work in works:
                work.table.reserve(len(work.table.tokens) + 1)
        except OutOfBlocksError:
            return None  # a plan says who waits; what is reserved already is used then
        for work in works:
            work.remaining, work.cached_rows = 1, 0
        return [(work, work.next_token()) for work in works]

    def _run_of(self, parts: Parts, policy: Policy, device: DeviceState) -> TokenRun | None:
        """Return a run that begins with a step of repeated feeds, reserving its memory; None: the step is alone."""
        works = [work for work, _ in parts]
        if not device.alone or not all(work.runs for work in works):
            return None
        most = min([work.loop.room for work in works if work.loop is not None])
        steps = max(min(MOST_STEPS, most), 1)
        if policy.times is not None:
            cost = Step(parts, repeated=True).forward()
            steps = max(min(steps, int(LONGEST_S / max(cost.seconds(policy.times), 1e-6))), 1)
        try:
            for work in works:
                work.table.reserve(len(work.table.tokens) + steps)
        except OutOfBlocksError:
            steps = 1
            for work in works:
                work.table.trim(len(work.table.tokens) + 1)
        return TokenRun(works, [feed for _, feed in parts], steps)

    def plan_next(self) -> None:
        """Plan the next step, and let it be alone: where a forward of a run has failed, it says whose fault that is."""
        self._steady, self._single = [], True

    def _note_steady(self, parts: Parts, limits: Limits) -> None:
        """Keep the operations of a step whose like may follow: one tenant's loops, all that there is or has room."""
        works = [work for work, _ in parts]
        steady = all(work.loop is not None for work in works) and len({work.tenant for work in works}) == 1
        if steady and len(works) < len(self._queue):
            steady = self._leaves_no_room(works, limits)
        self._steady = works if steady else []
        self._seen = self._queue.changes

    def _leaves_no_room(self, works: list[QueuedOperation], limits: Limits) -> bool:
        """Return whether a step of decode loops is full, and what waits can take no loop's place."""
        if len(works) < min(limits.max_batch, limits.token_budget):
            return False
        fed, tenant = set(works), works[0].tenant
        waiting = (work for work in self._queue if work not in fed)
        # Another tenant's prompt waits for memory, which may be freed while no operation comes or goes.
        return not any(work.started or work.low_priority or work.tenant != tenant for work in waiting)

    def _plan(self, policy: Policy, device: DeviceState) -> Step:
        queue, low_priority = self._queue, device.low_priority
        self._steady = []
        candidates = queue.candidates(low_priority)
        memory = BlockAllocator(self._tables, candidates)
        queue.block(())
        if len(queue.tenants(low_priority) | device.tenants) > 1:
            queue.block(blocked := _blocked(candidates, memory, policy))
            candidates = [work for work in candidates if work not in blocked]
        tenants = queue.tenants(low_priority)
        contested = len(tenants | device.tenants) > 1
        if not candidates:
            return Step()
        if contested:
            load = load_of(queue.unblocked(low_priority), policy.limits, policy.times)
            if policy.yields(load, tenants, device):
                return Step()
        fresh = [work for work in candidates if not (work.started or work.running or work.background)]
        longest = policy.limit(low_priority and any(work.low_priority for work in candidates), device)
        shares = policy.share(
            candidates, lambda index, alone: memory.admit(candidates[index], alone), contested, device, longest
        )
        parts = self._reserve([(candidates[share.place], share.tokens) for share in shares], memory)
        parts = parts or _squeezed(candidates, memory, policy.limits.token_budget)
        if not parts and device.may_forgo and any(work.low_priority for work in candidates):
            return Step(forgone=True)
        if policy.limits.order != "fifo":
            note_started(fresh, {work for work, _ in parts} | {work for work in fresh if work.started})
        if not low_priority and not contested:
            self._note_steady(parts, policy.limits)
        return Step(parts)

    def _reserve(self, shares: list[tuple[QueuedOperation, int]], memory: BlockAllocator) -> Parts:
        parts: Parts = []
        for work, tokens in memory.by_entitlement(shares):
            if memory.reserve(work, tokens):
                parts.append((work, work.next_token() if work.repeats else work.feed(tokens)))
            elif work.background:
                self._queue.finish(work, [])  # no memory to prefill ahead: the cache stays short, which is always valid
        return parts


def _blocked(candidates: list[QueuedOperation], memory: BlockAllocator, policy: Policy) -> set[QueuedOperation]:
    """Return prompts that cannot get memory, in a step shared by tenants: no time is reserved for them."""
    if not any(work.started and not work.background for work in candidates):
        return set()  # one of them starts in any case
    prompts = defaultdict[str, list[QueuedOperation]](list)
    for work in candidates:
        if not (work.started or work.background):
            prompts[work.tenant].append(work)
    tenants = memory.blocked([policy.order(works) for works in prompts.values()])
    return {work for tenant in tenants for work in prompts[tenant]}


def _squeezed(candidates: list[QueuedOperation], memory: BlockAllocator, token_budget: int) -> Parts:
    """Return a step of the oldest sequence only, where nothing fitted."""
    waiting = [work for work in candidates if not work.background]
    if waiting:
        oldest = min(waiting, key=lambda work: (work.low_priority, age(work.table)))
        if tokens := memory.squeeze(oldest, token_budget):
            return [(oldest, oldest.feed(tokens))]
    return []
