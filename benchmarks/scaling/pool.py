"""One pool: a coordinator, and two models that batch what waits for them, on a device each or on one for both.

The model is the engine's in short: an operation feeds what its model lacks of a sequence and then tokens one by one;
a step holds all operations that are running and as much of new prompts as lengthens it by `max_slowdown` at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random

from benchmarks.scaling.costs import Costs, Pair
from benchmarks.scaling.kernel import Clock, Station
from engine.costs.forward import Forward, attended_positions
from engine.costs.step_time import StepTime

SMALL, LARGE = 0, 1
# As `deployments.coalesce.Pace`: items that a replica sends in a second, and the longest a stream waits, in seconds.
ITEMS_PER_S, LONGEST_GAP_S = 160.0, 0.1


@dataclass(slots=True, eq=False)
class Request:
    """One request and what became of it.

    Attributes:
        prompt: its length, tokens.
        answer: tokens to write.
        prefix: number of a prompt beginning that others share; -1: none.
        shared: its length, tokens.
        came_s: when it was sent.
        first_s: when its first token arrived.
        done_s: when its last one did.
        cached: tokens of the prompt that were not computed.
        length: of the sequence.
        read: tokens of it that each model has in its cache.
        waits: operations that must end before the next begins.
        passed_s: when a piece of its answer was last passed on.
        passed: tokens of its answer that were.
        held: whether something has been written since.
    """

    prompt: int
    answer: int
    prefix: int = -1
    shared: int = 0
    came_s: float = 0.0
    first_s: float = -1.0
    done_s: float = -1.0
    cached: int = 0
    length: int = 0
    read: list[int] = field(default_factory=lambda: [0, 0])
    waits: int = 0
    passed_s: float = -inf
    passed: int = 0
    held: bool = False

    @property
    def left(self) -> int:
        """Tokens to write."""
        return self.prompt + self.answer - self.length


@dataclass(slots=True, eq=False)
class Operation:
    """Feed `feed` tokens, then go on alone for `steps - 1` more; `prompt`: the feed may be cut into pieces.

    `moved` bytes come to the model's actor from the other one's before.
    """

    request: Request
    model: int
    feed: int
    steps: int
    prompt: bool
    writes: bool
    then: Callable[[Request], None]
    moved: float = 0.0


class Device:
    """Device that runs steps of one model, or of two in turn.

    Args:
        clock: of the simulation.
        pair: what steps cost.
        times: predicts forwards, by model.
        wrote: called with a request when a step has written a token of it.
        hop_s: time from a result to the process that receives it.
    """

    def __init__(
        self, clock: Clock, pair: Pair, times: list[StepTime], wrote: Callable[[Request], None], hop_s: float
    ) -> None:
        self.busy_s = 0.0
        self._clock = clock
        self._pair = pair
        self._times = times
        self._wrote = wrote
        self._hop_s = hop_s
        self._waiting: list[list[Operation]] = [[], []]
        self._last = SMALL
        self._running = False

    def submit(self, operation: Operation) -> None:
        """An operation has come."""
        self._waiting[operation.model].append(operation)
        if not self._running:
            self._step()

    def _step(self) -> None:
        other = LARGE if self._last == SMALL else SMALL
        model = other if self._waiting[other] else self._last
        waiting = self._waiting[model]
        self._running = bool(waiting)
        if not waiting:
            return
        self._last = model
        shares, seconds = self._plan(waiting, self._times[model])
        self.busy_s += seconds
        self._clock.after(seconds, self._end, model, shares)

    def _plan(self, waiting: list[Operation], times: StepTime) -> tuple[list[tuple[Operation, int]], float]:
        """What each operation feeds, and how long the step takes."""
        pair = self._pair
        shares: list[tuple[Operation, int]] = []
        fed = attended = 0
        for each in waiting:
            if not each.prompt and len(shares) < pair.max_batch:
                shares.append((each, each.feed))
                fed += each.feed
                attended += attended_positions(each.request.read[each.model], each.feed)
        seconds = times.seconds(fed, attended, len(shares)) if shares else 0.0
        limit = pair.max_slowdown * seconds if shares else inf
        forward = Forward(fed, attended, len(shares))
        for each in waiting:
            room = pair.token_budget - forward.fed
            if not each.prompt or len(shares) >= pair.max_batch or room <= 0:
                continue
            context = each.request.read[each.model]
            tokens = _largest(min(each.feed, room), limit, partial(forward.seconds, times, context))
            if tokens == 0:
                break
            forward.add(context, tokens)
            seconds = forward.seconds(times)
            shares.append((each, tokens))
        return shares, seconds + pair.step_s + pair.row_s * len(shares)

    def _end(self, model: int, shares: list[tuple[Operation, int]]) -> None:
        for each, tokens in shares:
            each.feed -= tokens
            each.request.read[model] += tokens
            if each.feed:
                continue
            each.prompt = False
            each.steps -= 1
            if each.writes:
                each.request.length += 1
                self._wrote(each.request)
            if each.steps > 0:
                each.feed = 1
            else:
                self._waiting[model].remove(each)
                if self._hop_s:
                    self._clock.after(self._hop_s, each.then, each.request)
                else:
                    each.then(each.request)
        self._step()


def _largest(most: int, limit: float, seconds: Callable[[int], float]) -> int:
    """The largest number of tokens with which a step keeps its limit; at least one where that is all there is."""
    if seconds(most) <= limit:
        return most
    fits, too_long = 0, most
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if seconds(middle) <= limit else (fits, middle)
    return fits


class Pool:
    """Pool that answers requests.

    Args:
        clock: of the simulation.
        costs: of everything.
        split: a device for each model, reached through actors; otherwise one for both, in the coordinator's process.
        random: for what is accepted.
        passed: called with (request, number of pieces, tokens in them, done): they have left the replica.
    """

    def __init__(
        self, clock: Clock, costs: Costs, split: bool, random: Random, passed: Callable[[Request, int, int, bool], None]
    ) -> None:
        self.coordinator = Station(clock)
        self.calls = 0
        self._clock = clock
        self._costs = costs
        self._random = random
        self._passed = passed
        self._hop = costs.hop if split else None
        hop_s = costs.hop.transit_s / 2 if split else 0.0
        times = [costs.pair.small.times(), costs.pair.large.times()]
        wrote = self._wrote_far if split else self._wrote
        device = Device(clock, costs.pair, times, wrote, hop_s)
        self.devices = [device, Device(clock, costs.pair, times, wrote, hop_s) if split else device]
        self._held: dict[int, int] = {}
        self._held_tokens = 0

    def holds(self, request: Request) -> int:
        """Tokens of a request's prompt that are cached here."""
        return min(self._held.get(request.prefix, 0), request.prompt - 1)

    def accept(self, request: Request, brought: int = 0) -> None:
        """A request has come; `brought` tokens of its prompt were fetched for it."""
        self.calls += 1
        request.cached = max(self.holds(request), brought)
        request.length = request.prompt
        request.read = [request.cached, request.cached]
        self._remember(request)
        self.coordinator.serve(self._costs.replica.request_s, self._begin, request)

    def _remember(self, request: Request) -> None:
        if request.prefix < 0:
            return
        self._held_tokens += request.shared - self._held.pop(request.prefix, 0)
        self._held[request.prefix] = request.shared
        while self._held_tokens > self._costs.pair.cache_tokens and len(self._held) > 1:
            self._held_tokens -= self._held.pop(next(iter(self._held)))

    def _begin(self, request: Request) -> None:
        if not self._costs.way.draft:
            self._send(Operation(request, LARGE, request.prompt - request.cached, request.left, True, True, self._end))
            return
        # The large model reads the prompt while the small one drafts.
        request.waits = 2
        fed = request.prompt - request.cached
        if fed > 1:
            self._send(Operation(request, LARGE, fed - 1, 1, True, False, self._drafted))
        else:
            request.waits = 1
        self._send(Operation(request, SMALL, fed, self._draft(request), True, False, self._drafted))

    def _draft(self, request: Request) -> int:
        return min(self._costs.way.draft, max(request.left - 1, 1))

    def _drafted(self, request: Request) -> None:
        request.waits -= 1
        if request.waits == 0:
            draft = self._draft(request)
            feed = request.length - request.read[LARGE] + draft
            moved = draft * self._costs.way.draft_bytes
            self._send(Operation(request, LARGE, feed, 1, False, False, self._verified, moved))

    def _verified(self, request: Request) -> None:
        draft, emitted = self._draft(request), 1
        while emitted <= draft and self._random.random() < self._costs.way.acceptance:
            emitted += 1
        request.length += min(emitted, request.left)
        request.read[LARGE] = request.length - 1
        request.read[SMALL] = min(request.read[SMALL], request.length - 1)
        self._wrote(request)
        if request.left <= 0:
            self._end(request)
            return
        request.waits = 1
        feed = request.length - request.read[SMALL]
        self._send(Operation(request, SMALL, feed, self._draft(request), False, False, self._drafted))

    def _send(self, operation: Operation) -> None:
        if self._hop is None:
            self.devices[operation.model].submit(operation)
        else:
            self.coordinator.serve(self._hop.coordinator_s, self._on_its_way, operation)

    def _on_its_way(self, operation: Operation) -> None:
        assert self._hop is not None
        # The tensors go from actor to actor while the operation is on its way; it waits for them.
        moving_s = self._costs.transfer.seconds(operation.moved) if operation.moved else 0.0
        self._clock.after(max(self._hop.transit_s / 2, moving_s), self.devices[operation.model].submit, operation)

    def _wrote_far(self, request: Request) -> None:
        assert self._hop is not None
        self._clock.after(self._hop.transit_s / 2, self._wrote, request)

    def _wrote(self, request: Request) -> None:
        gap_s = min(LONGEST_GAP_S, self.calls / ITEMS_PER_S)
        request.held = self._clock.now - request.passed_s < gap_s
        if not request.held:
            request.passed_s = self._clock.now
            self._pass_on(request, 1, False)

    def _end(self, request: Request) -> None:
        self.calls -= 1
        self._pass_on(request, int(request.held), True)

    def _pass_on(self, request: Request, count: int, done: bool) -> None:
        tokens = request.length - request.prompt - request.passed
        request.passed += tokens
        self.coordinator.serve(count * self._costs.replica.chunk_s, self._passed, request, count, tokens, done)
