"""Which operations the next forward of a model holds: chosen, their memory reserved, and what each feeds laid out."""

from __future__ import annotations

from collections import defaultdict

from engine.device import Device, Member
from engine.runner import Feed
from engine.scheduler.block_allocator import StepMemory
from engine.scheduler.fair_memory import age
from engine.scheduler.ordering import first_of, note_started
from engine.scheduler.policy import Limits, plan_step
from engine.scheduler.priority import longest_step
from engine.scheduler.queue import WaitingWork
from engine.scheduler.queued_operation import Work

Steps = list[tuple[Work, Feed]]


class Planner:
    """Plans a model's steps.

    Args:
        member: the model's queue, as its device sees it.
        waiting: what waits in it.
        device: whose turn it is there, and who shares it.
    """

    def __init__(self, member: Member, waiting: WaitingWork, device: Device) -> None:
        self._member = member
        self._waiting = waiting
        self._device = device

    @property
    def _patient_slowdown(self) -> float:
        """Shorter steps where somebody in a hurry may come any moment; longer ones serve more of the others."""
        limits = self._member.limits
        return limits.patient_slowdown_beside if self._device.hurried else limits.patient_slowdown

    def plan(self) -> Steps:
        """Choose the step's operations, reserve their memory, and lay out what each feeds."""
        patient = self._device.patient
        candidates = self._waiting.candidates(patient)
        memory = StepMemory(self._member.tables, candidates)
        self._waiting.block(())
        if len(self._device.tenants()) > 1:
            self._waiting.block(blocked := _blocked(candidates, memory, self._member.limits))
            candidates = [work for work in candidates if work not in blocked]
        contested = len(self._device.tenants()) > 1
        if not candidates or (contested and self._device.others_first(self._member)):
            return []
        fresh = [work for work in candidates if not (work.started or work.running or work.background)]
        shares = plan_step(
            candidates,
            self._member.limits,
            self._member.times,
            lambda index, alone: memory.admit(candidates[index], alone),
            self._device.owed,
            contested,
            lambda: [member.load() for member in self._device.members if member is not self._member],
            longest_step(candidates if patient else (), self._patient_slowdown, self._member.times),
        )
        steps: Steps = []
        for work, tokens in memory.in_turn([(candidates[share.index], share.tokens) for share in shares]):
            if memory.reserve(work, tokens):
                steps.append((work, work.feed(tokens)))
            elif work.background:
                self._waiting.finish(work, [])  # no room to read ahead: the cache stays short, which is never wrong
        steps = steps or _squeezed(candidates, memory, self._member.limits.token_budget)
        if not steps and patient and any(work.patient for work in candidates) and self._device.forgo():
            return self.plan()  # no memory can be had for them: those in a hurry must not wait for their turn to end
        if self._member.limits.order != "fifo":
            note_started(fresh, {work for work, _ in steps} | {work for work in fresh if work.started})
        for _, feed in steps:
            if feed.partial is not None:
                feed.partial.hold()  # all memory of this step is reserved: what is found now stays until it ends
        return steps


def _blocked(candidates: list[Work], memory: StepMemory, limits: Limits) -> set[Work]:
    """Prompts that memory cannot be had for, in a step that tenants share: no time of it is kept for them."""
    if not any(work.started and not work.background for work in candidates):
        return set()  # whatever memory there is, one of them starts
    prompts = defaultdict[str, list[Work]](list)
    for work in candidates:
        if not (work.started or work.background):
            prompts[work.tenant].append(work)
    tenants = memory.blocked([first_of(works, limits.order, limits.max_overtaken) for works in prompts.values()])
    return {work for tenant in tenants for work in prompts[tenant]}


def _squeezed(candidates: list[Work], memory: StepMemory, token_budget: int) -> Steps:
    """Nothing fitted: a step of the oldest sequence only."""
    stuck = [work for work in candidates if not work.background]
    if stuck:
        oldest = min(stuck, key=lambda work: (work.patient, age(work.table)))
        if tokens := memory.squeeze(oldest, token_budget):
            return [(oldest, oldest.feed(tokens))]
    return []
