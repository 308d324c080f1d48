"""Values that scheduling decides by: limits of a step, waiting operations, load of models, order of prompts."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from engine.costs.forward import Forward, StepTime

Order = Literal["fifo", "hit_rate"]
DEFAULT_MAX_OVERTAKEN = 16


class Prompt(Protocol):
    """Operation that has not started, as far as ordering needs it."""

    order: int
    overtaken: int

    @property
    def running(self) -> bool:
        """Whether its answer has begun, so that a delay would be visible."""
        ...

    @property
    def hit_rate(self) -> float:
        """Share of its sequence that is cached, 0 to 1."""
        ...


P = TypeVar("P", bound=Prompt)


class Waiting(Prompt, Protocol):
    """Operation that waits for a step, as far as the policy needs it."""

    background: bool
    remaining: int  # tokens still to feed, at least 1

    @property
    def atomic(self) -> int:
        """Number of last tokens that must be fed together (1, or a draft tree and the token before it)."""
        ...

    @property
    def cached(self) -> int:
        """Cached tokens of its sequence: the positions that the next one attends to."""
        ...

    @property
    def started(self) -> bool:
        """Whether part of its sequence is cached; an operation that has not started must be admitted."""
        ...

    @property
    def tenant(self) -> str:
        """Tenant of its request."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one model's steps.

    Attributes:
        token_budget: most tokens in the forward; exceeded only by a single atomic operation larger than it.
        max_batch: most operations in the forward.
        max_slowdown: duration of a step with decodes, as a multiple of that of the decodes alone, at most; more where
            more prompts wait than requests decode, see `policy.MOST_CROWDED`.
        order: which prompts start first; see `arranged`.
        max_overtaken: how often a prompt may be overtaken.
        low_priority_slowdown: duration of a step of low-priority operations, as a multiple of one token's, at most.
        low_priority_slowdown_interactive: the same if interactive operations ran recently.
        short_s: seconds that a step may take in any case: a delay too short to be noticed.
    """

    token_budget: int
    max_batch: int
    max_slowdown: float = 1.75
    order: Order = "fifo"
    max_overtaken: int = DEFAULT_MAX_OVERTAKEN
    low_priority_slowdown: float = 4.0
    low_priority_slowdown_interactive: float = 1.5
    short_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Waiting operations of one model: predicted seconds of a step with those of one tenant, by tenant.

    Attributes:
        running: with running requests only.
        alone: with all operations.
        has_prompts: whether prompts are among them.
    """

    running: dict[str, float]
    alone: dict[str, float]
    has_prompts: bool


@dataclass(frozen=True, slots=True)
class DeviceState:
    """State of the device when a model plans a step: its priority class, and the load of the other models.

    Attributes:
        low_priority: low-priority operations may be in the step.
        has_interactive_work: interactive operations ran recently, so more may arrive any moment.
        may_forgo: low-priority operations take this step as their minimum share, while interactive ones wait.
        tenants: tenants with operations waiting for other models.
        loads: load of each other model.
        waited_s: predicted time of the other models' steps since this model's last one, in seconds.
        alone: no other model has operations.
    """

    low_priority: bool = False
    has_interactive_work: bool = False
    may_forgo: bool = False
    tenants: frozenset[str] = frozenset()
    loads: tuple[Load, ...] = ()
    waited_s: float = 0.0
    alone: bool = False


def is_decode(work: Waiting) -> bool:
    """Return whether an operation is the next token of an answer, or a draft: one step completes it."""
    return work.remaining <= work.atomic and work.started and not work.background and (work.running or work.atomic > 1)


def load_of(waiting: Iterable[Waiting], limits: Limits, times: StepTime | None) -> Load:
    """Predict the duration of a step with each tenant's operations alone; background ones do not count."""
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


def arranged(prompts: Sequence[Prompt], max_overtaken: int, most: int) -> list[int]:
    """Return the order in which prompts start, as indices into `prompts`: highest share of cached tokens first.

    A prompt that is mostly cached leaves little to compute, so starting it first shortens the mean time to the first
    token and uses its prefix before that is evicted. Each prompt that starts before an older one overtakes it; if they
    start in this order, none is overtaken more than `max_overtaken` times in all. Source: paper #222, KVShare.

    Args:
        prompts: in any order.
        max_overtaken: how often one may be overtaken.
        most: number of prompts to put in order, the others follow by age: more cannot start in one step.
    """
    left = sorted(range(len(prompts)), key=lambda place: prompts[place].order)
    worth = [(prompts[place].hit_rate, -prompts[place].order) for place in left]
    overtaken = [prompts[place].overtaken for place in left]
    result: list[int] = []
    while left and len(result) < most:
        # Only older prompts may go before one that was overtaken `max_overtaken` times.
        end = next((place + 1 for place, times in enumerate(overtaken) if times >= max_overtaken), len(left))
        best = max(range(end), key=worth.__getitem__)
        result.append(left.pop(best))
        del worth[best], overtaken[best]
        for place in range(best):
            overtaken[place] += 1
    return result + left


def first_of(prompts: Sequence[P], order: Order, max_overtaken: int) -> P:
    """Return the prompt that starts first.

    Args:
        prompts: at least one; those whose answers have begun go before others.
        order: `fifo`, or `hit_rate`: see `arranged`.
        max_overtaken: how often one may be overtaken.
    """
    running = [prompt for prompt in prompts if prompt.running]
    if running or order == "fifo":
        return min(running or prompts, key=lambda prompt: prompt.order)
    return prompts[arranged(prompts, max_overtaken, 1)[0]]


def note_started(prompts: Sequence[Prompt], started: Container[Prompt]) -> None:
    """Count, for each prompt that does not start in this step, the younger ones that do."""
    orders = [prompt.order for prompt in prompts if prompt in started]
    for prompt in prompts:
        if prompt not in started:
            prompt.overtaken += sum(order > prompt.order for order in orders)
