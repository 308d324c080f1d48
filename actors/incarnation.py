"""Incarnations of a member: its processes are started, given what to load, and ended, always all together."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from actors.connection import Channel, RayChannel
from actors.model_actor import ModelActor
from actors.placement import Slot, device_settings, options
from actors.protocol import MemberSpec, ModelCard
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.sources import sources_digest

log = logging.getLogger(__name__)

STOP_S = 5.0  # to write what is queued and let go of devices


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is.

    Attributes:
        ip: address of its node.
        node: Ray's name of the node.
        pid: of the process.
    """

    ip: str
    node: str
    pid: int

    def __str__(self) -> str:
        return f"{self.ip} pid {self.pid}"


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of a member: its processes.

    Attributes:
        number: counted from 0.
        actors: handles by rank; the first leads.
        places: where they are, by rank.
        card: what the leader said of itself.
        line: the way to the leader.
        following: refs that end when a rank other than the first ends.
    """

    number: int
    actors: tuple[Any, ...]
    places: tuple[Place, ...]
    card: ModelCard
    line: Channel
    following: tuple[Any, ...] = ()

    @property
    def leader(self) -> Any:
        """The handle that is spoken to."""
        return self.actors[0]

    @property
    def place(self) -> str:
        """Where the processes are, for people."""
        return ", ".join(map(str, self.places))

    def kill(self) -> None:
        """End all processes at once; also one that was stopped by a signal."""
        kill(self.actors)

    async def stop(self) -> None:
        """End in peace: what is queued is written first, for a short time."""
        with suppress(Exception):
            async with asyncio.timeout(STOP_S):
                await self.leader.stop.remote()
        self.kill()


class Launcher:
    """Starts the processes of one member, the same way every time.

    Args:
        pool: name of its pool.
        config: the whole configuration.
        slots: of its ranks.
        owner: its number in the replica.
        group: the replica's placement group.
        host: what answers in the actors, see `MemberSpec`; None: as usual.
    """

    def __init__(
        self,
        pool: str,
        config: TurnoutConfig,
        slots: Sequence[Slot],
        owner: int,
        group: PlacementGroup,
        host: str | None = None,
    ) -> None:
        self.owner = owner
        self.slots = tuple(slots)
        self._config = config
        self._group = group
        placement = self._placement = config.pools[pool].placement
        self._pool = pool
        lead, models = self.slots[0], {name: device_settings(each) for name, each in config.models.items()}
        self._spec = MemberSpec(
            name=lead.model,
            pool=pool,
            config=config.model_copy(update={"models": models}),
            owner=owner,
            life=0,
            threads=placement.threads or config.engine.threads,
            world=lead.world,
            timeout_s=placement.join_timeout_s,
        )
        if host is not None:
            self._spec = replace(self._spec, host=host)

    @property
    def name(self) -> str:
        """For people: the model, which copy of it, and the pool."""
        lead = self.slots[0]
        copy = f", prefill {lead.copy}" if lead.copy else ""
        return f"model {lead.model!r}{copy} of pool {self._pool!r}"

    async def load(self, number: int) -> Incarnation:
        """Start the processes and let them load the model; `begin` comes after.

        Raises:
            TurnoutError: what loading refused; UNAVAILABLE: a process found no place, ended, or did not load in time.
        """
        pool = self._config.pools[self._pool]
        actors = [
            _actor_class().options(**options(slot, pool, self._config, self._group)).remote() for slot in self.slots
        ]
        places: list[Place] = []
        try:
            async with asyncio.timeout(self._placement.start_timeout_s):
                places += [Place(*each) for each in await asyncio.gather(*(actor.place.remote() for actor in actors))]
                return await self._loaded(number, actors, tuple(places))
        except BaseException as error:
            kill(actors)
            if isinstance(error, TimeoutError):
                raise self._late(places) from None
            if isinstance(error, RayError | TurnoutError):
                raise failure_of(error, self._who(places)) from None
            raise

    async def _loaded(self, number: int, actors: list[Any], places: tuple[Place, ...]) -> Incarnation:
        spec = replace(self._spec, life=number)
        if spec.world > 1:
            spec = replace(spec, address=places[0].ip, port=await actors[0].hold_port.remote())
        following = [actor.follow.remote(replace(spec, rank=rank)) for rank, actor in enumerate(actors) if rank]
        card = await _first(actors[0].load.remote(spec), following)
        return Incarnation(number, tuple(actors), places, card, RayChannel(actors[0]), tuple(following))

    async def start(self, number: int, vocab_size: int, first: ModelCard) -> Incarnation:
        """Start the member again.

        Args:
            number: of the life.
            vocab_size: that the models of the pool have in common.
            first: what the first life said: model and code must be the same.

        Raises:
            TurnoutError: as `load`; UNAVAILABLE: the node has another model or other code by now.
        """
        life = await self.load(number)
        try:
            Program.here().check(self.name, life.card)
            check_model(self.name, first, life.card)
        except BaseException:
            life.kill()
            raise
        return await self.begin(life, vocab_size)

    async def begin(self, life: Incarnation, vocab_size: int) -> Incarnation:
        """Let a loaded model take up its work; what it says of itself afterwards.

        Args:
            life: from `load`; ended where this fails.
            vocab_size: that the models of the pool have in common.

        Raises:
            TurnoutError: as `load`.
        """
        try:
            async with asyncio.timeout(self._placement.start_timeout_s):
                card = await _first(life.leader.begin.remote(vocab_size), list(life.following))
        except BaseException as error:
            life.kill()
            if isinstance(error, TimeoutError):
                raise self._late(life.places) from None
            if isinstance(error, RayError | TurnoutError):
                raise failure_of(error, self._who(life.places)) from None
            raise
        return replace(life, card=card)

    def _who(self, places: Sequence[Place]) -> str:
        return f"{self.name} ({', '.join(map(str, places)) or 'not placed'})"

    def _late(self, places: Sequence[Place]) -> TurnoutError:
        field = f"pools.{self._pool}.placement"
        time_s = self._placement.start_timeout_s
        if places:
            message = f"{self._who(places)} did not load in {time_s:g} s; look at the actor's log, or raise"
        else:
            message = (
                f"{self.name} found no process to run in for {time_s:g} s: no node has room for its bundle"
                f" {self.slots[0].bundle}, or Ray cannot start workers there; see `ray status`, or raise"
            )
        return TurnoutError(Code.UNAVAILABLE, f"{message} {field}.start_timeout_s", f"{field}.start_timeout_s")


@dataclass(frozen=True, slots=True)
class Program:
    """What runs in a process.

    Attributes:
        place: the process, for people.
        code: digest of our sources.
        versions: of Python, torch and Ray.
    """

    place: str
    code: str
    versions: dict[str, str]

    @classmethod
    def here(cls) -> Program:
        """Of this process."""
        versions = {"python": platform.python_version(), "torch": torch.__version__, "ray": ray.__version__}
        return cls(f"{ray.util.get_node_ip_address()} pid {os.getpid()}", sources_digest(), versions)

    def check(self, who: str, card: ModelCard) -> None:
        """Refuse an actor that runs another program.

        Args:
            who: the actor is.
            card: what it said of itself.

        Raises:
            TurnoutError: UNAVAILABLE, with what differs, where, and what to do.
        """
        for name, mine in self.versions.items():
            if (theirs := card.versions.get(name)) != mine:
                what = f"has {name} {theirs}, and {self.place} has {mine}"
                raise TurnoutError(Code.UNAVAILABLE, f"{who} at {card.place} {what}: install the same on every node")
        if card.code != self.code:
            what = f"runs other code of ours ({card.code}) than {self.place} ({self.code})"
            remedy = "install the same on every node, then start the replica again"
            raise TurnoutError(Code.UNAVAILABLE, f"{who} at {card.place} {what}: {remedy}")


def check_model(who: str, first: ModelCard, card: ModelCard) -> None:
    """Refuse an actor that loaded another model under the same name, or whose results differ in the last bits.

    Args:
        who: the actor is.
        first: what another one, or this one at first, said of the model.
        card: what it says.

    Raises:
        TurnoutError: UNAVAILABLE, with both places and what to do.
    """
    if card.digest != first.digest:
        what = f"loaded a model with the digest {card.digest}, and {first.place} one with {first.digest}"
        raise TurnoutError(Code.UNAVAILABLE, f"{who} at {card.place} {what}: put the same checkpoint on every node")
    if card.numerics != first.numerics:  # keys and values of one would be taken for the other's
        what = f"computes as {card.numerics!r}, and {first.place} as {first.numerics!r}"
        remedy = "name resources in placement.resources that only machines of one kind offer"
        raise TurnoutError(Code.UNAVAILABLE, f"{who} at {card.place} {what}: {remedy}")


def kill(actors: Sequence[Any]) -> None:
    """End processes at once, as far as Ray still knows them."""
    for actor in actors:
        with suppress(Exception):  # Ray is gone, and they are with it
            ray.kill(actor, no_restart=True)


def failure_of(error: BaseException, who: str) -> TurnoutError:
    """What an actor raised, or how it ended, as an error that says whose it is."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TurnoutError):
        return TurnoutError(cause.code, f"{who}: {cause.message}", cause.field)
    if isinstance(error, GetTimeoutError | TimeoutError):
        return TurnoutError(Code.UNAVAILABLE, f"{who} did not answer in time")
    if isinstance(error, RayTaskError):
        return TurnoutError(Code.INTERNAL, f"{who} failed: {type(cause).__name__}: {cause}")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return TurnoutError(Code.UNAVAILABLE, f"{who} ended: {lines[0] if lines else type(error).__name__}")


async def _first(ref: Any, others: Sequence[Any]) -> Any:
    """What a ref gives; none of the others may end before it."""
    wanted, watched = asyncio.ensure_future(ref), [asyncio.ensure_future(each) for each in others]
    try:
        done, _ = await asyncio.wait([wanted, *watched], return_when=asyncio.FIRST_COMPLETED)
        for each in (wanted, *watched):
            if each in done:
                value = each.result()
                if each is wanted:
                    return value
        raise TurnoutError(Code.UNAVAILABLE, "one of its ranks ended while the others started")
    finally:
        for each in (wanted, *watched):
            each.cancel()
        await asyncio.gather(wanted, *watched, return_exceptions=True)


@lru_cache(maxsize=1)
def _actor_class() -> Any:
    """Made when it is first needed, as Ray keeps what it has exported."""
    return ray.remote(ModelActor)
