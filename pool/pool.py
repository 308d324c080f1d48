"""The pool: models that answer requests together, from text to text, wherever they run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from decoding.artifacts import Artifacts
from decoding.model import ModelPool
from decoding.sequence import Sequence
from decoding.thinking import Thinking
from decoding.thinking_constraint import look_astride
from engine.costs.prefill_estimate import prompt_token_seconds, waiting_seconds
from engine.member import PoolMember
from pool.audit import Audits
from pool.concurrency import ConcurrencyLimiter
from pool.embeddings import embed
from pool.prefix_stores import Share, shared, summed, unconfigured
from pool.prompt_ids import embedded_ids
from pool.reasoning import with_structure
from pool.request_defaults import NO_DEFAULTS
from pool.request_runner import RequestRunner
from pool.routing import PoolRouting, Routing, explaining
from pool.scoring import score, scored_groups
from pool.tasks import opened, run_task
from pool.text import TextTokenizer, vocabularies_of
from pool.token_rate import Rate
from pool.usage import billed
from pool.validation import PreparedRequest, RequestValidator
from router.decision import Decision
from turnout.calls import (
    Begun,
    Event,
    GenerateCall,
    MemberStats,
    ModelDescription,
    PoolStats,
    Priority,
    ScoreCall,
    ScoredTokens,
    Usage,
)
from turnout.cost import Price
from turnout.embed_calls import EmbedCall, Embeddings, ReadCall, TaskAnswer, TaskCall
from turnout.errors import invalid, not_found
from turnout.pool_config import USUAL_ROLES
from turnout.registry import ALONE
from turnout.tracing import begin, end, header_of

SCARCE = 0.75  # share of a model's blocks in use beyond which shadows are dropped


@dataclass(frozen=True, slots=True)
class DefaultMethod:
    """For requests that name none: a method and its parameters."""

    name: str = ALONE
    params: Mapping[str, Any] | None = None


PLAIN = DefaultMethod()


class Pool:
    """Pool of models that answer together. All calls must come from one event loop.

    Args:
        name: what requests put in `model`.
        members: models by name.
        roles: role -> member name; "small" and "large" are always among them.
        tokenizer: shared by the members, but for those in `foreign`.
        places: how many calls are worked on at once, and who is next.
        default: for requests that name no method.
        artifacts: what was trained for the members.
        foreign: tokenizers of the members with another vocabulary than the large one's, by name.

    Attributes:
        defaults: what holds where a request leaves it open.
        thinking: how thinking is found in answers; None: it is not.
        routing: chooses a method where a call leaves it open; None: the default method is used.
        audits: compute a share of the lossless answers again; None: they are not.
        share: says whose cache a prompt belongs to.
        revisions: commits of the members that are of a hub, by name.
        prices: of members whose tokens cost money.
    """

    def __init__(
        self,
        name: str,
        members: Mapping[str, PoolMember],
        roles: dict[str, str],
        tokenizer: TextTokenizer,
        places: ConcurrencyLimiter,
        default: DefaultMethod = PLAIN,
        artifacts: Artifacts | None = None,
        foreign: Mapping[str, TextTokenizer] | None = None,
    ) -> None:
        self.name = name
        self.members = members
        self.roles = roles
        self.tokenizer = tokenizer
        self.default_method, self.default_params = default.name, dict(default.params or {})
        self.foreign = dict(foreign or {})
        self.model_pool = _model_pool(members, roles, tokenizer, artifacts or Artifacts(), self.foreign)
        native = [model for name, model in members.items() if name not in self.foreign]
        self.max_length = min(model.max_length for model in native)
        self.vocab_size = min(model.vocab_size for model in native)
        self.revisions: dict[str, str] = {}
        self.prices: dict[str, Price] = {}
        self._places = places
        # Low-priority calls have places of their own.
        self._low_priority_places = places.copy()
        self._began = time.time()
        self._rate = Rate()
        self.defaults = NO_DEFAULTS
        self.thinking: Thinking | None = None
        self.routing: PoolRouting | None = None
        self.audits: Audits | None = None
        self.share: Share = unconfigured
        self._running: set[RequestRunner] = set()

    async def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        """Answer a call: chunks, then one `Usage`. Closing the iterator frees everything within a step.

        Raises:
            TurnoutError: a refusal before the first event, RESOURCE_EXHAUSTED when too many calls wait for a place;
                DEADLINE_EXCEEDED or INTERNAL later.
        """
        span, failed = begin(f"pool {self.name}", call.trace, request_id=call.request_id), ""
        if span is not None:
            call = replace(call, trace=header_of(span))
        try:
            prepared = await self.intake().admit(call)
            constraint = await self.tokenizer.structures.admit(prepared.call.sampling, self.vocab_size, call.tenant)
            thinking = with_structure(prepared.thinking, constraint)
            if constraint is not None:
                await look_astride(thinking, self.tokenizer, len(self.tokenizer))
            prepared = replace(prepared, constraint=constraint, thinking=thinking)
            untold = call.include_prompt_len
            async with self._started(prepared) as (events, queue_s):
                async for event in events:
                    if untold:
                        untold = False
                        contrast = prepared.contrast
                        yield Begun(len(prepared.prompt), contrast.num_tokens if contrast is not None else 0)
                    self._rate.count(event)
                    yield _finished(event, queue_s, self) if isinstance(event, Usage) else event
        except BaseException as error:
            failed = type(error).__name__
            raise
        finally:
            end(span, failed)

    @asynccontextmanager
    async def _started(self, prepared: PreparedRequest) -> AsyncIterator[tuple[AsyncIterator[Event], float]]:
        """Wait for a place; yield the events of a request, which end with the context, and the seconds waited."""
        call = prepared.call
        with self._turn(call.priority) as places:
            async with held_place(places, call) as queue_s:
                if prepared.plan is None:
                    assert self.routing is not None
                    events = self.routing.recorded(prepared, Routing(self.routing.router, self.intake()), self._run)
                else:
                    events = self._run(prepared, self.model_pool)
                async with aclosing(events):  # type: ignore[type-var]
                    yield events, queue_s

    def _run(
        self, prepared: PreparedRequest, models: ModelPool, routing: Routing | None = None
    ) -> AsyncIterator[Event]:
        # A shadow has no client: it is not handed over.
        asked = routing is None or (self.routing is not None and routing.router is self.routing.router)
        running = self._running if asked else None
        answered = self.audits.offer if asked and self.audits is not None else None
        around = (self.tokenizer, self.roles["large"], routing, self.share, running, answered)
        return RequestRunner(prepared, models, *around).events()

    def hand_over(self, request_id: str | None = None, again: bool = False) -> int:
        """Stop calls between two tokens: each ends with Interrupted, with what another replica continues from.

        Args:
            request_id: of the one call; None: all that are being answered.
            again: also calls whose answers would be made again from their start, and not continued.

        Returns:
            How many calls stop.
        """
        return sum(run.leave(again) for run in list(self._running) if request_id in (None, run.request_id))

    def send_away(self, count: int) -> int:
        """End at most `count` calls that wait for a place, none that has moved before; return how many leave."""
        return self._places.send_away(count)

    def forget(self, tenant: str) -> None:
        """Drop what was learned of a tenant's texts: another one may come under its name."""
        for member in self.members.values():
            member.forget(tenant)
        if self.routing is not None:
            self.routing.router.forget(tenant)
        self.model_pool.artifacts.forget(tenant)

    @property
    def foreign_roles(self) -> dict[str, str]:
        """Members with another vocabulary, by role."""
        return {role: member for role, member in self.roles.items() if member in self.foreign}

    def intake(self) -> RequestValidator:
        """What the pool accepts, as it is now."""
        # A member with several roles is asked for by the usual one.
        members = {self.roles[role]: role for role in (*self.roles, *USUAL_ROLES) if role in self.roles}
        known = (self.max_length, self.vocab_size, self.default_method, self.default_params, self.routing is not None)
        roles, own = frozenset(self.roles), (self.foreign_roles, self.foreign)
        return RequestValidator(self.name, members, self.tokenizer, *known, roles, self.defaults, *own, self.thinking)

    @contextmanager
    def _turn(self, priority: Priority) -> Iterator[ConcurrencyLimiter]:
        """Yield where a call waits; meanwhile shadows and audits do, and are dropped where it finds the pool full."""
        low = priority == "batch"
        with ExitStack() as stack:
            for background in () if low else (self.routing, self.audits):
                if background is not None:
                    stack.enter_context(background.during_request(self._full))
            yield self._low_priority_places if low else self._places

    def _full(self) -> bool:
        """Whether a call that comes now must wait for a place, or memory for it is scarce."""
        held = [member.stats() for member in self.members.values()]
        return self._places.full or any(each.used_blocks > SCARCE * each.total_blocks for each in held)

    async def explain(self, call: GenerateCall) -> Decision:
        """How a call would be routed now; nothing is generated, logged or remembered.

        Raises:
            TurnoutError: as `generate`; INVALID_ARGUMENT where the pool has no routing, or the call names a method.
        """
        prepared = await self.intake().admit(call)
        routing = explaining(self.routing, prepared, self.intake())
        sharing = shared(self.share, call, prepared.prompt)
        sequence = Sequence(prepared.prompt, prepared.sampling, prepared.seed, sharing=sharing, tenant=call.tenant)
        try:
            await routing.route(prepared, sequence, self.model_pool)
        finally:
            for model in self.members.values():
                model.release(sequence)
        assert routing.decision is not None
        return routing.decision

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """Log-likelihood of each completion after the prompt, under the large model or the member named.

        Raises:
            TurnoutError: as `generate`.
        """
        model = self._asked(call)
        groups = await scored_groups(self, call, model)  # what is refused takes no place
        async with self._reading(call):
            return await score(self, call, model, groups)

    async def embed(self, call: EmbedCall) -> Embeddings:
        """Embeddings by the large model or the member named.

        Raises:
            TurnoutError: as `generate`.
        """
        model = self._asked(call)
        inputs = await embedded_ids(call, self.tokenizer, self.vocab_size, model.max_length)
        async with self._reading(call):
            return await embed(self, call, model, self.defaults.pooling, inputs)

    async def task(self, call: TaskCall, show: Callable[[int, int], object] | None = None) -> TaskAnswer:
        """Carry out a task by the large model or the member named; `show` gets the parts done, and all of them.

        Raises:
            TurnoutError: as `generate`; NOT_FOUND: there is no such task.
        """
        model, task = self._asked(call), opened(call)
        async with self._reading(call):
            return await run_task(self, call, model, task, show)

    @asynccontextmanager
    async def _reading(self, call: ReadCall) -> AsyncIterator[None]:
        """Wait for a place for a call that only reads."""
        with self._turn(call.priority) as places:
            async with places.hold(call.tenant, call.deadline_s):
                yield

    def _asked(self, call: ReadCall) -> PoolMember:
        """The one model that a call is for."""
        if call.model not in (self.name, *self.members):
            raise not_found("model", call.model, [self.name, *self.members])
        if call.model in self.foreign:
            raise invalid("model", f"{call.model!r} has another vocabulary than the pool; serve it in one of its own")
        return self.members[call.model if call.model in self.members else self.roles["large"]]

    def models(self) -> list[ModelDescription]:
        """The pool first, then its members."""
        return _descriptions(self)

    def stats(self) -> PoolStats:
        """What the pool holds right now."""
        members = tuple(member.stats() for member in self.members.values())
        return PoolStats(
            requests=self._places.num_held + self._places.num_waiting,
            tokens_per_second=self._rate.per_second(),
            cache=summed([each for member in self.members.values() if (each := member.cache_stats()) is not None]),
            waiting_s=sum(map(waiting_seconds, self.members.values(), members)),
            prompt_token_s=sum(map(prompt_token_seconds, self.members.values())),
            batch_requests=self._low_priority_places.num_held + self._low_priority_places.num_waiting,
            audit=self.audits.stats() if self.audits is not None else None,
            began=self._began,
            now=time.time(),
            queued=self._places.num_waiting + self._low_priority_places.num_waiting,
            **_sums(members),
            **(self.routing.stats() if self.routing is not None else {}),
        )

    async def tokens(self, call: GenerateCall) -> list[int]:
        """Token ids of a call's prompt or conversation, as `generate` reads them; they need not fit the context."""
        return await self.intake().tokens(call)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids that were given, special tokens by their names."""
        return self.tokenizer.decode(ids, special=True)

    async def close_background(self) -> None:
        """Cancel shadows and audits; requests of callers continue."""
        for background in (self.audits, self.routing):
            if background is not None:
                await background.close()

    async def close(self) -> None:
        """Cancel what runs, shadows and audits first."""
        await self.close_background()
        self.tokenizer.structures.close()
        for member in self.members.values():
            await member.close()


def _model_pool(
    members: Mapping[str, PoolMember],
    roles: dict[str, str],
    tokenizer: TextTokenizer,
    artifacts: Artifacts,
    foreign: Mapping[str, TextTokenizer],
) -> ModelPool:
    """Make the pool that methods see; vocabularies are compared now, and not during a request."""
    vocabularies = vocabularies_of(tokenizer, foreign)
    for member in foreign:
        vocabularies.translation(members[member], members[roles["large"]])
    return ModelPool(dict(members), roles, tokenizer, artifacts, vocabularies)


def _finished(usage: Usage, queue_s: float, pool: Pool) -> Usage:
    return billed(replace(usage, queue_s=queue_s), pool.prices, pool.roles["large"])


def _descriptions(pool: Pool) -> list[ModelDescription]:
    """See `Pool.models`."""
    large = pool.members[pool.roles["large"]]
    total = sum(model.num_parameters for model in pool.members.values())
    ends = pool.tokenizer.ends.described(pool.tokenizer.name_of)
    sizes, default = (total, pool.vocab_size, pool.max_length), (pool.default_method, pool.default_params)
    routed = pool.routing is not None
    of_pool = ModelDescription(pool.name, large.architecture, *sizes, pool.roles, *default, routed, **ends)
    described = [replace(of_pool, tool_format=pool.tokenizer.tools.form.name)]
    for m in pool.members.values():
        own = pool.foreign.get(m.name)
        said = {**own.ends.described(own.name_of), "other_vocabulary": True} if own is not None else dict(ends)
        sizes = (m.num_parameters, m.vocab_size, m.max_length)
        said |= {"revision": pool.revisions.get(m.name, "")}
        described.append(ModelDescription(m.name, m.architecture, *sizes, {}, ALONE, **said))
    return described


def _sums(members: tuple[MemberStats, ...]) -> dict[str, Any]:
    """What members hold, one by one and together."""
    names = ("sequences", "used_blocks", "cached_blocks", "total_blocks", "waiting")
    sums = {name: sum(getattr(each, name) for each in members) for name in names}
    return {"members": members, "step_seconds": {each.model: each.step_seconds for each in members}, **sums}


@asynccontextmanager
async def held_place(places: ConcurrencyLimiter, call: GenerateCall) -> AsyncIterator[float]:
    """A place for a call, and the time it was waited for, in seconds."""
    queued, asked = begin("queue", call.trace), time.perf_counter()
    async with AsyncExitStack() as stack:
        try:
            stays = call.moved is not None
            await stack.enter_async_context(places.hold(call.tenant, call.deadline_s, stays, call.rank))
        finally:
            end(queued)
        yield time.perf_counter() - asked
