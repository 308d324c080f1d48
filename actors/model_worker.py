"""What runs in an actor: one model, the replicas of the sequences it works on, and the operations under way."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import platform
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch

from actors.packing import Unpacker, kind_of, pack_result
from actors.protocol import (
    HEARTBEAT_S,
    Load,
    MemberSpec,
    ModelCard,
    ReplyKind,
    RequestKind,
    Update,
    pack_tokens,
    trimmed,
)
from actors.remote_objects import Receiver
from actors.sequence_replica import Replica, Replicas, keep
from actors.tensor_store import Key, TensorStore
from actors.tensor_transfer import TensorEndpoint
from actors.transport import Transport
from decoding.operations import Observe, Operation
from engine.fingerprint import numerics_class
from engine.kv_transfer import token_bytes
from engine.model import EngineModel
from pool.member_loading import LoadedMember, Ranks, load_member
from turnout.errors import Code, TurnoutError
from turnout.sources import sources_digest
from turnout.tracing import within

log = logging.getLogger(__name__)

GAP_S = 10.0  # how long a post may be missing while later ones are there
Packed = tuple[Any, ...]


class ModelWorker:
    """A model in this process, and what coordinators ask of it; knows nothing of Ray's calls.

    Args:
        spec: what to load.
        address: IP address of this node.
        node_id: Ray's name of it.
    """

    def __init__(self, spec: MemberSpec, address: str = "127.0.0.1", node_id: str = "") -> None:
        self.spec = spec
        self.store = TensorStore(spec.owner, spec.life)
        self.transport = Transport(torch.device(spec.config.models[spec.name].device), address)
        self._endpoint = TensorEndpoint(self.store, self.transport)
        self._place = (address, node_id)
        self._member: LoadedMember | None = None
        self._receiver = Receiver()
        self._tasks: dict[int, tuple[Replica, asyncio.Task[None]]] = {}
        self._lessons: dict[Replica, asyncio.Task[None]] = {}
        self._held: dict[int, bytes] = {}
        self._next_post = 0
        self._gap_since: float | None = None
        self._applying = asyncio.Lock()
        self._out: list[tuple[Any, ...]] = []
        self._wake = asyncio.Event()
        self._stopped = False
        self._fault: Exception | None = None

    def load(self) -> ModelCard:
        """Load the weights. Blocks: for a thread.

        Raises:
            TurnoutError: see `pool.member_loading.load_member`.
        """
        spec = self.spec
        ranks = None
        if spec.world > 1:
            ranks = Ranks(spec.rank, spec.world, spec.address, spec.port, spec.timeout_s, spec.listen_fd)
        self._member = load_member(spec.name, spec.pool, spec.config, spec.threads, ranks)
        return card_of(self._member, *self._place)

    def begin(self, vocab_size: int) -> ModelCard:
        """Open the model for the tokens of its pool; once, after `load`. Blocks: for a thread.

        Raises:
            TurnoutError: see `LoadedMember.begin`.
        """
        assert self._member is not None
        model = self._member.begin(vocab_size)
        self._replicas = Replicas(model, self._member.tokenizer, self._receiver.constants)
        return card_of(self._member, *self._place)

    @property
    def model(self) -> EngineModel:
        """The model, after `begin`."""
        assert self._member is not None
        assert self._member.model is not None
        return self._member.model

    async def post(self, number: int, blob: bytes) -> None:
        """Messages of the coordinator; posts may come in any order and are applied in that of their numbers.

        Args:
            number: counted from 0.
            blob: a pickled list of tuples, see `protocol.RequestKind`.
        """
        self._held[number] = blob
        async with self._applying:
            first = self._next_post
            while self._next_post in self._held:
                blob = self._held.pop(self._next_post)
                self._next_post += 1
                try:
                    for message in pickle.loads(blob):
                        await self._apply(message)
                except Exception as error:
                    log.exception("%s: post %d could not be applied", self._name, self._next_post - 1)
                    self._fault = self._fault or error  # later messages build on what is missing now
                    self._wake.set()
            if not self._held:
                self._gap_since = None
            elif self._gap_since is None or self._next_post != first:  # later posts make a gap no younger
                self._gap_since = time.monotonic()

    async def replies(self) -> AsyncIterator[bytes]:
        """Lists of answers, pickled, as they come; a sign of life at least every HEARTBEAT_S.

        Raises:
            TurnoutError: INTERNAL: a post is missing. Whatever a post failed with.
        """
        loop, alive = asyncio.get_running_loop(), 0.0
        while not self._stopped:
            if not self._out:
                timer = loop.call_at(max(alive + HEARTBEAT_S, loop.time()), self._wake.set)
                await self._wake.wait()
                timer.cancel()
            self._wake.clear()
            if self._fault is not None:
                raise portable(self._fault)
            if self._gap_since is not None and time.monotonic() - self._gap_since > GAP_S:
                raise TurnoutError(Code.INTERNAL, f"post {self._next_post} to {self._name} never came")
            now = loop.time()
            if now - alive >= HEARTBEAT_S:
                alive = now
                self._out.append((ReplyKind.ALIVE, self._load()))
            if self._out:
                out, self._out = self._out, []
                yield pickle.dumps(out, protocol=5)

    @property
    def _name(self) -> str:
        return f"{self.spec.name} at {self._place[0]} pid {os.getpid()}"

    def _load(self) -> Load:
        model = self.model
        busy, step_s, cache = model.busy(), model.step_seconds(), model.cache_stats()
        return Load(model.stats(), busy, step_s, model.step_time, cache, len(self.store), len(self._tasks))

    async def _apply(self, message: tuple[Any, ...]) -> None:
        match message[0]:
            case RequestKind.CALL:
                await self._begin(*message[1:])
            case RequestKind.CANCEL:
                self._cancel(message[1])
            case RequestKind.FORK:
                self._replicas.fork(*message[1:])
            case RequestKind.RELEASE:
                self._replicas.release(message[1])
            case RequestKind.CONSTANT:
                self._receiver.add_constant(*message[1:])
            case RequestKind.FORGET:
                self._receiver.forget(message[1])
            case RequestKind.DROP:
                self.store.drop(message[1])
            case RequestKind.SHIP:
                self._endpoint.ship(*message[1:])
            case RequestKind.PARTS:
                for packed in message[1]:
                    self._receiver.unpack(packed)
            case RequestKind.DEPARTED:
                self.model.forget(message[1])

    async def _begin(
        self, number: int, update: Packed, packed: Packed, parts: Packed = (), needed: Packed = (), trace: str = ""
    ) -> None:
        """Start an operation; the replica and what it carries are brought up to date before the next message."""
        coming = [self._endpoint.receive(*each) for each in needed]
        kind = kind_of(packed, self._receiver)
        try:
            if kind is Operation:
                raise TurnoutError(Code.INTERNAL, f"class {packed[0]} of operations never came")
            copies = [self._receiver.unpack(each) for each in parts]
            replica = await self._replicas.update(Update(*update))
        except Exception as error:
            log.warning("%s: %s could not begin: %s", self._name, kind.name, error)
            if kind.answers:
                self._say((ReplyKind.FAILED.value, number, portable(error)))
            return
        unpacker = Unpacker.of(packed, self._receiver, replica, copies)
        if not kind.answers and not coming and replica not in self._lessons:
            self._learn(unpacker, {})
            return
        before = self._lessons.get(replica)
        work = self._work(number, unpacker, coming, before, trace)
        task = asyncio.get_running_loop().create_task(work, name=f"{kind.name}-{number}")
        if kind.answers:
            self._tasks[number] = replica, task
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
        else:
            self._lessons[replica] = task
            task.add_done_callback(lambda done: self._lessons.get(replica) is done and self._lessons.pop(replica))

    def _cancel(self, number: int) -> None:
        if number in self._tasks:
            replica, task = self._tasks[number]
            replica.ending.add(task)
            task.add_done_callback(replica.ending.discard)
            # One that has not begun would end without an answer: this comes after its first step.
            asyncio.get_running_loop().call_soon(task.cancel)

    def _learn(self, unpacker: Unpacker, received: dict[Key, torch.Tensor]) -> None:
        replica = unpacker.replica
        try:
            op = unpacker.unpack(self._endpoint.tensors(received))
            assert isinstance(op, Observe)
            self.model.observe(replica.seq, op.drafter, op.draft, op.verdict)
        except Exception as error:
            replica.fault = replica.fault or error

    async def _work(
        self,
        number: int,
        unpacker: Unpacker,
        coming: list[asyncio.Future[dict[Key, torch.Tensor]]],
        before: asyncio.Task[None] | None,
        trace: str,
    ) -> None:
        """One operation, from its arguments to its answer."""
        replica, kind = unpacker.replica, unpacker.kind
        start = len(replica.seq.generated)
        said, states = ReplyKind.FAILED, tuple[tuple[int, bytes], ...]()
        try:
            if before is not None:
                await asyncio.wait([before])
            await replica.ready()
            received = {key: tensor for each in coming for key, tensor in (await each).items()}
            if not kind.answers:
                self._learn(unpacker, received)
                return
            if replica.fault is not None:
                fault, replica.fault = replica.fault, None
                raise fault
            op = unpacker.unpack(self._endpoint.tensors(received))
            with within(f"{self.spec.name} {op.name} in its actor", trace):
                value = await self.model.do(replica.seq, op)
            op.settle(value)
            states = unpacker.states()
            result = pack_result(op, value, self.store)
            said = ReplyKind.DONE
            keep(replica.kept, number, op.kept(value))
        except asyncio.CancelledError:
            result = TurnoutError(Code.CANCELLED, "the operation was cancelled")
        except Exception as error:
            if not kind.answers:
                replica.fault = replica.fault or error
                return
            result = portable(error)
        if kind.answers:
            tokens = pack_tokens(replica.seq.generated[start:]) if kind.appends else ()
            grown = trimmed([tokens, replica.counts(self.spec.name), states])
            self._say((said.value, number, result, *grown))

    def _say(self, message: tuple[Any, ...]) -> None:
        self._out.append(message)
        self._wake.set()

    async def stop(self) -> None:
        """Cancel what is under way and free everything; `replies` ends."""
        self._stopped = True
        self._wake.set()
        tasks = [task for _, task in self._tasks.values()] + list(self._lessons.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.transport.close()
        self.store.clear()
        if self._member is not None:
            if self._member.model is not None:
                self._replicas.clear()
            await self._member.close()


def card_of(member: LoadedMember, address: str, node_id: str) -> ModelCard:
    """What an actor says of its model, as far as it is there yet, and of itself."""
    checkpoint, model, plan = member.checkpoint, member.model, member.checkpoint.plan
    return ModelCard(
        name=member.name,
        architecture=checkpoint.architecture,
        num_parameters=checkpoint.num_parameters,
        vocab_size=checkpoint.vocab_size,
        max_length=model.max_length if model is not None else checkpoint.max_length,
        num_layers=plan.num_layers,
        digest=checkpoint.digest,
        code=sources_digest(),
        versions={"python": platform.python_version(), "torch": torch.__version__, "ray": ray.__version__},
        node_ip=address,
        node_id=node_id,
        pid=os.getpid(),
        numerics=numerics_class(plan.backend.name, member.device.torch_device, plan.kv_dtype),
        token_bytes=token_bytes(model) if model is not None else 0,
        by_length=plan.by_length,
        times=model.step_time if model is not None else None,
    )


def portable(error: Exception) -> Exception:
    """An error as it can be raised elsewhere."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        again = None
    if type(again) is type(error):
        return error
    return TurnoutError(Code.INTERNAL, f"{type(error).__name__}: {error}")
