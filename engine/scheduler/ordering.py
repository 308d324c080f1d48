"""In which order prompts start: as they came, or those first of which most is cached, with nobody starving.

Where most of a prompt is cached, little is left to compute: starting it first shortens the mean time to the first
token, and takes its prefix before that is evicted. Every prompt that starts before an older one overtakes it; who was
overtaken as often as is allowed is next, the oldest first. Source: the scheduler of paper #222, "KVShare: An LLM
Service System with Efficient and Effective Multi-Tenant KV Cache Reuse".
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal, Protocol, TypeVar

Order = Literal["fifo", "hit_rate"]
DEFAULT_MAX_OVERTAKEN = 16


class Prompt(Protocol):
    """What ordering needs to know about an operation that has not started."""

    order: int
    overtaken: int

    @property
    def running(self) -> bool:
        """Whether its answer has begun, so that a gap would be seen."""
        ...

    @property
    def hit_rate(self) -> float:
        """Share of its sequence that need not be computed, 0 to 1."""
        ...


P = TypeVar("P", bound=Prompt)


def arranged(prompts: Sequence[Prompt], max_overtaken: int, most: int) -> list[int]:
    """In which order prompts should start, by place in `prompts`.

    If they start in that order, one after the other as far as there is room, none is overtaken more than
    `max_overtaken` times in all, however many come after it.

    Args:
        prompts: in any order.
        max_overtaken: how often one may be overtaken.
        most: so many are put in order, the others follow by age: more could not start at once.
    """
    left = sorted(range(len(prompts)), key=lambda place: prompts[place].order)
    worth = [(prompts[place].hit_rate, -prompts[place].order) for place in left]
    overtaken = [prompts[place].overtaken for place in left]
    result: list[int] = []
    while left and len(result) < most:
        # Who has been overtaken often enough lets only older ones go first.
        end = next((place + 1 for place, times in enumerate(overtaken) if times >= max_overtaken), len(left))
        best = max(range(end), key=worth.__getitem__)
        result.append(left.pop(best))
        del worth[best], overtaken[best]
        for place in range(best):
            overtaken[place] += 1
    return result + left


def first_of(prompts: Sequence[P], order: Order, max_overtaken: int) -> P:
    """The prompt, of at least one that has not started, that should start first.

    Args:
        prompts: in any order; those whose answers have begun go before others.
        order: how prompts are put in order.
        max_overtaken: how often one may be overtaken.
    """
    running = [prompt for prompt in prompts if prompt.running]
    if running or order == "fifo":
        return min(running or prompts, key=lambda prompt: prompt.order)
    return prompts[arranged(prompts, max_overtaken, 1)[0]]


def note_started(prompts: Sequence[Prompt], started: Container[Prompt]) -> None:
    """Some of the prompts start now: count for everyone of the others the younger ones among them."""
    orders = [prompt.order for prompt in prompts if prompt in started]
    for prompt in prompts:
        if prompt not in started:
            prompt.overtaken += sum(order > prompt.order for order in orders)
