"""Pools, what chooses among them, and what they share; requests that come at their times, or when others end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from random import Random

import numpy as np

from benchmarks.scaling.costs import Costs
from benchmarks.scaling.kernel import Clock, Station
from benchmarks.scaling.pool import Pool, Request

# Pools that are simulated one by one; of more, so large a slice.
SLICE = 32
# Serve's routers believe what they have seen of a replica themselves for so long, in seconds; then what it has said.
BELIEVED_S = 10.0
WARM_UP = 0.3  # of a run's time


@dataclass(frozen=True, slots=True)
class Layout:
    """Processes before the pools.

    Attributes:
        name: for the page.
        pools_per_ingress: None: one ingress process for all.
        candidates: pools that a choice looks at; None: all.
        cell: pools of one Ray cluster; more pools are further clusters of that size; None: one cluster.
        pools_per_store: of one server of the prefix store; None: there is none.
        aware: whether the choice knows prefixes; otherwise the one of two pools that has fewer calls.
    """

    name: str
    pools_per_ingress: int | None = None
    candidates: int | None = None
    cell: int | None = None
    pools_per_store: int | None = None
    aware: bool = True

    def in_cell(self, pools: int) -> int:
        """Pools of one cluster."""
        return pools if self.cell is None else min(pools, self.cell)

    def ingresses(self, pools: int) -> int:
        """Ingress processes of one cluster."""
        return 1 if self.pools_per_ingress is None else ceil(self.in_cell(pools) / self.pools_per_ingress)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a simulated cluster: lengths in tokens.

    Attributes:
        prompt, answer: mean lengths.
        shared: length of beginnings that prompts have in common, in front of the rest.
        prefixes: number of them for each pool, the nth asked for 1/n as often.
        sharing: share of the requests that have one.
        hot: share of these that have the first one, in addition to its own part.
        spread: lengths are drawn from so much below to so much above the mean, as a share of it.
    """

    prompt: int = 96
    answer: int = 64
    shared: int = 0
    prefixes: int = 0
    sharing: float = 0.0
    hot: float = 0.0
    spread: float = 0.5


@dataclass(slots=True)
class Figures:
    """One run.

    Attributes:
        tokens_per_s, requests_per_s: of all pools.
        ttft_s, end_to_end_s: p50, p95, p99.
        busy: cores (or devices) in use, each as a share of what there is: by part.
        hits: share of the shared prompt tokens that were cached where they were asked for.
        busiest: share of all requests that the pool with most of them had, times the number of pools.
        controller: cores that the controller would need.
    """

    tokens_per_s: float
    requests_per_s: float
    ttft_s: tuple[float, ...]
    end_to_end_s: tuple[float, ...]
    busy: dict[str, float]
    hits: float
    busiest: float
    controller: float


@dataclass(slots=True)
class _Seen:
    done: list[Request] = field(default_factory=list)
    tokens: int = 0


def controller_cores(costs: Costs, layout: Layout, pools: int) -> float:
    """Cores that a cluster's controller would need; it is one process of one thread."""
    control, cell = costs.control, layout.in_cell(pools)
    reported = cell * layout.ingresses(pools) * control.stats_bytes / control.stats_period_s
    return control.idle + control.per_replica * cell + control.byte_s * reported


class Cluster:
    """A simulated cluster, one run.

    Of many equal pools a slice is simulated, with as large a part of what serves them all: shared processes that are
    more than one in number are fewer, and one that the whole cluster shares takes longer for everything, so that it
    is as busy as the real one.

    Args:
        costs: of everything.
        layout: what stands before the pools.
        pools: how many.
        traffic: what is asked.
        split: whether models are actors with a device each.
        seed: of everything random.
        most: pools that are simulated one by one.
    """

    def __init__(
        self,
        costs: Costs,
        layout: Layout,
        pools: int,
        traffic: Traffic,
        split: bool = False,
        seed: int = 0,
        most: int = SLICE,
    ) -> None:
        self.clock = Clock()
        self._costs, self._layout, self._traffic, self._random = costs, layout, traffic, Random(seed)
        self._in_cell = layout.in_cell(pools)
        self._num = min(self._in_cell, most)
        self._whole = pools / self._num
        self.pools = [Pool(self.clock, costs, split, Random(seed + n), self._passed) for n in range(self._num)]
        self._proxies = self._stations(self._in_cell)
        self._ingresses = self._stations(layout.ingresses(pools))
        stores = ceil(self._in_cell / layout.pools_per_store) if layout.pools_per_store else 0
        self._stores = self._stations(stores) if stores else []
        self._views = [[0] * self._num for _ in self._ingresses]
        self._looked = [[-BELIEVED_S] * self._num for _ in self._ingresses]
        self._ways: dict[Request, tuple[int, int, Station]] = {}
        self._counts = [0] * self._num
        self._stored: set[int] = set()
        self._call_s = 0.0
        self._token_s = costs.pair.large.times().seconds(256, 256 * 128, 1) / 256
        weights = [1 / n for n in range(1, traffic.prefixes * self._num + 1)]
        self._prefixes, self._weights = range(len(weights)), weights
        self._seen = _Seen()
        self._from_s = 0.0
        self._ended: Callable[[Request], None] = lambda request: None
        self.controller = controller_cores(costs, layout, pools)
        self._refresh()

    def _stations(self, count: int) -> list[Station]:
        """Number in the whole cluster, as far as the slice goes."""
        here = max(1, round(count * self._num / self._in_cell))
        scale = self._in_cell / self._num * here / count
        return [Station(self.clock, scale) for _ in range(here)]

    def closed(self, per_pool: int, seconds: float) -> Figures:
        """A number of requests at once for each pool, each followed by another one."""
        self._ended = lambda request: self._come()
        for number in range(per_pool * self._num):
            self.clock.after(number * 1e-3, self._come)
        return self._run(seconds)

    def open(self, per_pool: float, seconds: float) -> Figures:
        """Independent requests at a rate for each pool."""
        self._arrive(per_pool * self._num)
        return self._run(seconds)

    def _arrive(self, rate: float) -> None:
        def next_one() -> None:
            self._come()
            self._arrive(rate)

        self.clock.after(self._random.expovariate(rate), next_one)

    def _come(self) -> None:
        traffic, random = self._traffic, self._random
        request = Request(
            _about(random, traffic.prompt, traffic.spread),
            _about(random, traffic.answer, traffic.spread),
            came_s=self.clock.now,
        )
        if self._weights and random.random() < traffic.sharing:
            hot = random.random() < traffic.hot
            request.prefix = 0 if hot else random.choices(self._prefixes, self._weights)[0]
            request.shared = traffic.shared
            request.prompt += traffic.shared
        proxy = random.choice(self._proxies)
        place = random.randrange(len(self._ingresses))
        proxy.serve(self._costs.proxy.request_s, self._at_ingress, request, proxy, place)

    def _at_ingress(self, request: Request, proxy: Station, place: int) -> None:
        looked = self._layout.candidates or self._in_cell
        choice = self._costs.choice.base_s + self._costs.choice.per_replica_s * min(looked, self._in_cell)
        seconds = self._costs.ingress.request_s + choice
        self._ingresses[place].serve(seconds, self._choose, request, place, proxy)

    def _choose(self, request: Request, place: int, proxy: Station) -> None:
        view, random = self._views[place], self._random
        if not self._layout.aware:
            few = random.sample(range(self._num), min(2, self._num))
            number = min(few, key=lambda n: self.pools[n].calls)
        else:
            looked = self._layout.candidates
            if looked is None or looked >= self._num:
                few = list(range(self._num))
            elif request.prefix >= 0:
                # The same few for all who have this prefix, and some of the others.
                few = Random(request.prefix).sample(range(self._num), looked - looked // 4)
                few += random.sample(range(self._num), looked // 4)
            else:
                few = random.sample(range(self._num), looked)
            number = min(few, key=lambda n: (self._cost(request, n, view[n]), view[n], random.random()))
        view[number] = self.pools[number].calls + 1
        self._looked[place][number] = self.clock.now
        self._ways[request] = place, number, proxy
        self._counts[number] += 1
        self._fetch(request, self.pools[number])

    def _cost(self, request: Request, number: int, calls: int) -> float:
        return calls * self._call_s + (request.prompt - self.pools[number].holds(request)) * self._token_s

    def _fetch(self, request: Request, pool: Pool) -> None:
        held = pool.holds(request)
        missing = min(request.shared, request.prompt - 1) - held
        if not self._stores or missing <= 0 or request.prefix not in self._stored:
            if request.prefix >= 0:
                self._stored.add(request.prefix)
            pool.accept(request)
            return
        store = self._stores[request.prefix % len(self._stores)]
        seconds = self._costs.store.seconds(missing * self._costs.pair.kv_bytes)
        if store.backlog_s + seconds > missing * self._token_s:
            pool.accept(request)
        else:
            store.serve(seconds, pool.accept, request, held + missing)

    def _refresh(self) -> None:
        """What choosers hear of the pools; from a controller that has too much to do, less often."""
        old = self.clock.now - BELIEVED_S
        for view, looked in zip(self._views, self._looked, strict=True):
            for number, pool in enumerate(self.pools):
                if looked[number] <= old:
                    view[number] = pool.calls
        for ingress in self._ingresses:
            # Each hears of every pool, however many processes there are.
            ingress.serve(self._costs.choice.hear_s * self._in_cell / ingress.scale, _nothing)
        finished = len(self._seen.done)
        if finished:
            busy = sum(device.busy_s for pool in self.pools for device in set(pool.devices))
            self._call_s = busy / max(finished, 1)
        self.clock.after(self._costs.control.stats_period_s * max(self.controller, 1.0), self._refresh)

    def _passed(self, request: Request, count: int, tokens: int, done: bool) -> None:
        place, _, _ = self._ways[request]
        self._ingresses[place].serve(
            count * self._costs.ingress.chunk_s, self._from_ingress, request, count, tokens, done
        )

    def _from_ingress(self, request: Request, count: int, tokens: int, done: bool) -> None:
        _, _, proxy = self._ways[request]
        proxy.serve(count * self._costs.proxy.chunk_s, self._arrived, request, tokens, done)

    def _arrived(self, request: Request, tokens: int, done: bool) -> None:
        self._seen.tokens += tokens
        if request.first_s < 0:
            request.first_s = self.clock.now
        if done:
            request.done_s = self.clock.now
            place, number, _ = self._ways.pop(request)
            self._views[place][number] = max(self._views[place][number] - 1, 0)
            self._seen.done.append(request)
            self._ended(request)

    def _run(self, seconds: float) -> Figures:
        self.clock.run(seconds * WARM_UP)
        self._from_s = self.clock.now
        before, written = self._busy(), self._seen.tokens
        self.clock.run(seconds)
        length = seconds - self._from_s
        busy = {name: (now - before[name]) / length for name, now in self._busy().items()}
        done = [each for each in self._seen.done if each.done_s >= self._from_s]
        shared = [each for each in done if each.prefix >= 0]
        return Figures(
            tokens_per_s=(self._seen.tokens - written) / length * self._whole,
            requests_per_s=len(done) / length * self._whole,
            ttft_s=_percentiles([each.first_s - each.came_s for each in done]),
            end_to_end_s=_percentiles([each.done_s - each.came_s for each in done]),
            busy={name: min(share, 1.0) for name, share in busy.items()},
            hits=sum(min(each.cached, each.shared) for each in shared) / max(sum(each.shared for each in shared), 1),
            busiest=max(self._counts) / max(sum(self._counts), 1) * self._num,
            controller=self.controller,
        )

    def _busy(self) -> dict[str, float]:
        """Seconds of work so far, of one of each kind on average."""
        parts = {
            "small device": [pool.devices[0].busy_s for pool in self.pools],
            "large device": [pool.devices[1].busy_s for pool in self.pools],
            "coordinator": [pool.coordinator.busy_s for pool in self.pools],
            "proxy": [each.busy_s for each in self._proxies],
            "ingress": [each.busy_s for each in self._ingresses],
            "store": [each.busy_s for each in self._stores] or [0.0],
        }
        return {name: float(np.mean(values)) for name, values in parts.items()}


def _nothing() -> None:
    return


def _about(random: Random, mean: int, spread: float) -> int:
    return max(1, round(mean * random.uniform(1 - spread, 1 + spread)))


def _percentiles(values: list[float]) -> tuple[float, ...]:
    if not values:
        return (float("nan"),) * 3
    return tuple(float(value) for value in np.percentile(values, (50, 95, 99)))
