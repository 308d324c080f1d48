"""Prefill estimate: how long a prompt would take now, under the current load of the device."""

from __future__ import annotations

from collections.abc import Callable

from decoding.model import Model
from engine.costs.forward import StepTime, attended_positions
from engine.scheduler.batcher import Batcher
from turnout.calls import MemberStats

PROMPT = 256  # tokens of an ordinary prompt


def prefill_forecast(batcher: Batcher, times: StepTime) -> Callable[[int, int], float]:
    """Return (a, b) -> seconds to compute tokens a to b - 1 after those before them, under the device's current load.

    Args:
        batcher: of the model that would compute them.
        times: how long its steps take.
    """
    loads = [member.load() for member in batcher.device.members if member is not batcher]
    slowdown = batcher.limits.max_slowdown
    decoding = any(load.running for load in (batcher.load(), *loads))
    # While requests decode, prompts get what stretches a step; models of one device take turns.
    factor = (slowdown / (slowdown - 1) if decoding else 1.0) * (1 + sum(bool(load.alone) for load in loads))

    def seconds(start: int, stop: int) -> float:
        fed = stop - start
        return factor * times.seconds(fed, attended_positions(start, fed), 1)

    return seconds


def waiting_seconds(model: Model, held: MemberStats) -> float:
    """How long a model will take for what waits for it, if nothing else came; 0.0 where nothing waits.

    Args:
        model: knows how long its forwards take.
        held: what it holds.
    """
    if not held.waiting_tokens:
        return 0.0
    each = -(-held.waiting_tokens // max(held.waiting, 1))
    return model.forward_seconds(held.waiting_tokens, held.waiting * attended_positions(0, each), held.waiting)


def prompt_token_seconds(model: Model) -> float:
    """How long a token of an ordinary prompt takes a model that does nothing else."""
    return model.forward_seconds(PROMPT, attended_positions(0, PROMPT), 1) / PROMPT
