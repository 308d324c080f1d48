"""A pool whose models run in actors, wherever these are: the methods run here, and nothing else does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from actors.connection import ConnectionGroup
from actors.disaggregated_prefill import DisaggregatedModel
from actors.group import Group, join
from actors.incarnation import Incarnation, Launcher, Program, check_model
from actors.placement import bundles, check_hosts, not_free, slots, strategy
from actors.protocol import ModelCard
from actors.quarantine import REQUEST
from actors.remote import RemoteModel
from actors.supervisor import Supervisor
from decoding.model import ModelPool
from engine.member import PoolMember
from pool.components import Parts, larger_draft, open_parts, pool_of, prepare
from pool.pool import Pool
from pool.prefix_stores import open_tenancy, share_of
from pool.routing import Routing
from pool.validation import PreparedRequest
from turnout.calls import Event, PoolStats, ScoreCall, ScoredTokens
from turnout.checkpoint_files import check_description
from turnout.config import TurnoutConfig, model_path, pinned
from turnout.embed_calls import EmbedCall, Embeddings, TaskAnswer, TaskCall
from turnout.errors import Code, Interrupted, TurnoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.build import SharedStore

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST = 1  # generation of the group
NOBODYS = {"CPU": 0.01}  # bundle of the replica, where this process is none


class ActorPool(Pool):
    """Models in actor processes, which are started again when they end, and the methods that run over them. Use `load`.

    Attributes:
        supervisors: of all actors, by their number in the replica.
        notes: what the person who runs the pool should know of its files.
        stores: who shares with whom, as registered in the prefix store; None: there is none.
    """

    def __init__(self, name: str, parts: Parts, supervisors: Sequence[Supervisor], own: PlacementGroup | None) -> None:
        self.supervisors = tuple(supervisors)
        super().__init__(
            name,
            _members(parts, supervisors),
            parts.roles,
            parts.tokenizer,
            parts.places,
            parts.default,
            parts.artifacts,
            parts.foreign,
        )
        self.notes = parts.notes
        self.stores: SharedStore | None = None
        self._join_timeout_s = parts.config.placement.join_timeout_s
        self._own = own
        self._group: Group | None = None
        self._attached = False

    @classmethod
    def load(cls, name: str, config: TurnoutConfig, host: str | None = None) -> ActorPool:
        """Start a configured pool's actors and have them load their models. Blocks.

        In a Serve replica the actors lie in its placement group; elsewhere one is made for them.

        Args:
            name: of the pool.
            config: the whole configuration.
            host: what answers in the actors, "module:class" of a subclass of `ModelWorker`; None: as usual.

        Raises:
            TurnoutError: as `LocalPool.load`; UNAVAILABLE, naming node, process and remedy: no node can host an actor,
                one does not start or load in time, runs other code, or has another model under the same name; they do
                not form a group.
        """
        pool = pool_of(name, config)
        config = pinned(config)  # an actor that is started again loads the same
        _check_split(name, config)
        parts = open_parts(name, config)
        group, own = _placed(name, config)
        each_member = [list(ranks) for _, ranks in groupby(slots(pool, config), lambda slot: (slot.model, slot.copy))]
        launchers = [Launcher(name, config, ranks, owner, group, host) for owner, ranks in enumerate(each_member)]
        lives: list[Incarnation] = []
        try:
            starting = _start(launchers, lives, parts.foreign, pool.placement.join_timeout_s)
            sizes = _blocking(starting)
            return cls._opened(name, config, parts, list(zip(launchers, lives, strict=True)), sizes, own)
        except BaseException:
            for life in lives:
                life.kill()
            if own is not None:
                remove_placement_group(own)
            raise

    @classmethod
    def _opened(
        cls,
        name: str,
        config: TurnoutConfig,
        parts: Parts,
        members: list[tuple[Launcher, Incarnation]],
        vocab_sizes: list[int],
        own: PlacementGroup | None,
    ) -> ActorPool:
        """The pool over actors that have begun."""
        place: list[ActorPool] = []
        exchange = ConnectionGroup(lambda: place[0].generation)
        placement = parts.config.placement
        supervisors = [
            Supervisor(launcher, life, vocab_size, placement, exchange, lambda: place[0].attach())
            for (launcher, life), vocab_size in zip(members, vocab_sizes, strict=True)
        ]
        loaded = cls(name, parts, supervisors, own)
        place.append(loaded)
        sizes = {name: member.num_parameters for name, member in loaded.members.items()}
        loaded.notes += larger_draft(parts.config, sizes)
        prepare(loaded, config)
        loaded.stores = open_tenancy(config, parts.tokenizer, parts.folder)
        loaded.share = share_of(config, loaded.stores)
        with suppress(RuntimeError):  # no loop runs here: the first call attaches
            asyncio.get_running_loop()
            loaded.attach()
        return loaded

    @property
    def generation(self) -> int | None:
        """Of the group that all actors are in; None while they are not."""
        return self._group.generation if self._group is not None else None

    def attach(self) -> None:
        """Begin to speak with the actors, on the running event loop; later calls do nothing."""
        if self._attached:
            return
        self._attached = True
        if len(self.supervisors) > 1:
            self._group = Group(self.name, self.supervisors, self._join_timeout_s, FIRST)
        for supervisor in self.supervisors:
            supervisor.attach(self._group)

    def _run(
        self, prepared: PreparedRequest, models: ModelPool, routing: Routing | None = None
    ) -> AsyncIterator[Event]:
        REQUEST.set(prepared.call.request_id)  # the tasks of the answer are made in this context
        return super()._run(prepared, models, routing)

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """See `Pool.score`."""
        REQUEST.set(call.request_id)
        return await super().score(call)

    async def embed(self, call: EmbedCall) -> Embeddings:
        """See `Pool.embed`."""
        REQUEST.set(call.request_id)
        return await super().embed(call)

    async def task(self, call: TaskCall, show: Callable[[int, int], object] | None = None) -> TaskAnswer:
        """See `Pool.task`."""
        REQUEST.set(call.request_id)
        return await super().task(call, show)

    def check(self) -> None:
        """Look whether every actor lives or may live again; where not, the replica is of no more use.

        Raises:
            Interrupted: it says which one, and why.
        """
        for supervisor in self.supervisors:
            supervisor.check()
        if self._group is not None and self._group.over is not None:
            raise Interrupted(self._group.over)

    def stats(self) -> PoolStats:
        """Return what the pool holds, as its actors last reported; those that only compute prompts are members too."""
        held = super().stats()
        more = [
            prefill.stats()
            for member in self.members.values()
            if isinstance(member, DisaggregatedModel)
            for prefill in member.prefills
        ]
        return replace(
            held,
            sequences=held.sequences + sum(each.sequences for each in more),
            used_blocks=held.used_blocks + sum(each.used_blocks for each in more),
            cached_blocks=held.cached_blocks + sum(each.cached_blocks for each in more),
            total_blocks=held.total_blocks + sum(each.total_blocks for each in more),
            waiting=held.waiting + sum(each.waiting for each in more),
            members=(*held.members, *more),
        )

    async def close(self) -> None:
        """Cancel what runs, shadows and audits first; end the actors, and give back what they ran on."""
        await self.close_background()
        if self._group is not None:
            await self._group.close()
        await asyncio.gather(*(member.close() for member in self.members.values()))
        if self.stores is not None:
            await asyncio.to_thread(self.stores.close)
        if self._own is not None:
            remove_placement_group(self._own)


def _members(parts: Parts, supervisors: Sequence[Supervisor]) -> Mapping[str, PoolMember]:
    """The models as methods see them: the first actor of each, with those that compute prompts for it."""
    by_model: dict[str, list[RemoteModel]] = {}
    for supervisor in supervisors:
        name = supervisor.card.name
        by_model.setdefault(name, []).append(RemoteModel(name, supervisor))
    least_tokens = parts.config.placement.prefill_tokens
    return {
        name: DisaggregatedModel(models[0], models[1:], least_tokens) if len(models) > 1 else models[0]
        for name, models in by_model.items()
    }


def _check_split(name: str, config: TurnoutConfig) -> None:
    """Refuse, before anything is started, a checkpoint that cannot be loaded, or not split as configured.

    The weight files may lie on the nodes of the actors only, which check them when they load.
    """
    pool = config.pools[name]
    for model in pool.members:
        field = f"models.{model}.path"
        folder = model_path(config.models[model], field, weights=False)
        check_description(folder, field)
        ranks = config.models[model].tensor_parallel
        if ranks > 1:
            from engine.parallel import check_split

            check_split(model, folder, ranks)


def _placed(name: str, config: TurnoutConfig) -> tuple[PlacementGroup, PlacementGroup | None]:
    """The placement group for the actors, and the same again if it was made here."""
    pool = config.pools[name]
    wanted = bundles(pool, config)
    current = ray.util.get_current_placement_group()
    if current is not None:
        if current.bundle_count < len(wanted):
            message = f"pool {name!r} needs {len(wanted)} bundles, and its placement group has {current.bundle_count}"
            raise TurnoutError(Code.INTERNAL, f"{message}: it was deployed with another configuration")
        return current, None
    wanted[0] = NOBODYS
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    check_hosts(name, wanted, nodes)
    made = placement_group(wanted, strategy(pool))
    if not made.wait(pool.placement.start_timeout_s):
        remove_placement_group(made)
        raise not_free(name, wanted[1:], nodes, pool.placement.start_timeout_s)
    return made, made


async def _start(
    launchers: Sequence[Launcher], lives: list[Incarnation], foreign: Container[str], join_timeout_s: float
) -> list[int]:
    """Start all members side by side, check that they fit, and let them form a group.

    Args:
        launchers: of the members.
        lives: filled with what was started; also where this fails.
        foreign: names of the models with a vocabulary of their own.
        join_timeout_s: time to form the group.

    Returns:
        The vocabulary size of each member: what the models of the pool have in common, or its own.
    """
    lives += await _all(launcher.load(0) for launcher in launchers)
    here, firsts = Program.here(), dict[str, ModelCard]()
    for launcher, life in zip(launchers, lives, strict=True):
        here.check(launcher.name, life.card)
        check_model(launcher.name, firsts.setdefault(life.card.name, life.card), life.card)
    native = [life.card.vocab_size for life in lives if life.card.name not in foreign]
    sizes = [life.card.vocab_size if life.card.name in foreign else min(native) for life in lives]
    members = zip(launchers, lives, sizes, strict=True)
    lives[:] = await _all(launcher.begin(life, size) for launcher, life, size in members)
    if len(lives) > 1:
        names = [f"{launcher.name} at {life.place}" for launcher, life in zip(launchers, lives, strict=True)]
        await join([life.leader for life in lives], names, FIRST, join_timeout_s)
    return sizes


async def _all(works: Iterable[Coroutine[Any, Any, Incarnation]]) -> list[Incarnation]:
    """What all give; where one fails the others are ended too."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Incarnation):
                ended.kill()
        raise


def _blocking(work: Coroutine[Any, Any, T]) -> T:
    """Wait for async work where a loop may be running, on a thread with a loop of its own."""
    with ThreadPoolExecutor(1, "load-actors") as thread:
        return thread.submit(asyncio.run, work).result()
