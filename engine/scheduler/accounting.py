"""Accounts of steps: what is learned from the time that a step took, and who is charged for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.scheduler.step_builder import Step

if TYPE_CHECKING:
    from engine.scheduler.batcher import Batcher


def account(member: Batcher, step: Step, seconds: float) -> None:
    """Update step times, the cost model, and the balances of tenants and priority classes.

    Args:
        member: whose step it was.
        step: with those that followed it at once.
        seconds: that their forwards took.
    """
    device, times, forwards = member.device, member.times, step.num_forwards
    each = seconds / forwards
    device.charge(step.low_priority, seconds)
    device.note_step(member, len(step.parts) * forwards)
    if step.through_all_layers and step.of_single_tokens:
        kept = 0.9**forwards if member.step_seconds else 0.0
        member.step_seconds = kept * member.step_seconds + (1.0 - kept) * each
    predicted = None
    if times is not None and step.through_all_layers:
        whole = step.forward()
        predicted = whole.seconds(times) * forwards
        member.reading_s += step.reading_seconds(seconds, times)
        active = device.tenants()
        got = step.seconds_by_tenant(times) if len(active) > 1 else {}
        got = {tenant: alone * forwards for tenant, alone in got.items()}
        device.owed.charge(got, active, predicted if got else 0.0)
        if not step.takes_over:
            times.observe(whole.fed, whole.attended, whole.sequences, each)
    device.ran(member.name, step.fed, predicted, seconds, forwards)
    device.spent_s += seconds if predicted is None else predicted
    member.ran_until_s = device.spent_s
