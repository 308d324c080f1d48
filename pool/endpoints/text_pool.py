"""A pool of whose models some are servers elsewhere: it answers over texts, and no method sees a token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import cast

from decoding.artifacts import Artifacts
from decoding.model import Model, ModelPool
from decoding.sequence import Sequence
from pool.components import pool_of, prices_of
from pool.concurrency import ConcurrencyLimiter
from pool.endpoints.client import EndpointClient
from pool.endpoints.failover import TextModels, TextRequest
from pool.endpoints.intake import TextIntake
from pool.endpoints.reports import described, stats_of, usage_of
from pool.endpoints.routed_models import RoutedModels, endpoint_names, token_costs
from pool.endpoints.streams import until
from pool.endpoints.text_model import EndpointModel, LocalModel, TextModel
from pool.pool import Pool, held_place
from pool.request_defaults import RequestDefaults
from pool.routing import SHADOW_TENANT, PoolRouting, Routing, explaining
from pool.text import TextTokenizer
from pool.token_rate import Rate
from pool.usage import billed
from pool.validation import PreparedRequest
from router.decision import Decision
from turnout.calls import (
    Begun,
    Decided,
    Event,
    GenerateCall,
    ModelDescription,
    PoolStats,
    ScoreCall,
    ScoredTokens,
    Usage,
)
from turnout.config import MethodChoice, PoolConfig, TurnoutConfig, artifacts_path
from turnout.cost import Price
from turnout.embed_calls import EmbedCall, Embeddings, TaskAnswer, TaskCall
from turnout.errors import invalid, not_found
from turnout.pool_config import LARGE, SMALL
from turnout.registry import ALONE, load
from turnout.tracing import begin, end, header_of
from turnout.types import NO_LIMITS

METHODS = "pool.endpoints.methods"
# What of a pool's configuration holds for each of its models that is computed here.
OF_MEMBERS = (
    *("artifacts", "sampling", "max_answer_tokens", "chat_template_kwargs", "reasoning_effort", "reasoning"),
    *("tool_format", "embedding_pooling", "max_ongoing_requests", "max_queued_requests"),
)

LoadPool = Callable[[str, TurnoutConfig], Pool]


class TextPool:
    """Pool of models that answer over texts. All calls must come from one event loop. Use `load_text_pool`.

    Args:
        name: what requests put in `model`.
        config: its configuration.
        models: by name.
        prices: of those whose tokens cost money, by name.

    Attributes:
        members: models that are computed here, by name: those whose weights replicas compare.
        notes: findings of loading for the operator of the pool.
        routing: chooses a method where a call leaves it open; None: the default method is used.
    """

    def __init__(
        self, name: str, config: PoolConfig, models: Mapping[str, TextModel], prices: Mapping[str, Price]
    ) -> None:
        self.name = name
        self._config = config
        self.models_by_name = dict(models)
        self._local = {each.name: each.pool for each in models.values() if isinstance(each, LocalModel)}
        self._endpoints = {each.name: each for each in models.values() if isinstance(each, EndpointModel)}
        self.members = {name: pool.members[name] for name, pool in self._local.items()}
        notes = (f"{member}: {note}" for member, pool in self._local.items() for note in getattr(pool, "notes", ()))
        self.notes = list(dict.fromkeys(notes))
        self._prices = prices
        self._models = TextModels(self.models_by_name, config.roles, config.failover)
        local: dict[str, Model] = dict(self.members)
        reader = self._local.get(config.small)
        tokenizer = cast(TextTokenizer, reader.tokenizer if reader is not None else None)
        self.model_pool = RoutedModels(
            local,
            config.roles,
            tokenizer,
            Artifacts(artifacts_path(config)),
            elsewhere=endpoint_names(models),
            costs=token_costs(models, prices),
        )
        self._places = ConcurrencyLimiter(name, config.max_ongoing_requests, config.max_queued_requests)
        self._low_priority_places = self._places.copy()
        self._began = time.time()
        self._rate = Rate()
        self.routing: PoolRouting | None = None

    def open_routing(self) -> None:
        """Open the routing, where there is one.

        Raises:
            TurnoutError: a policy, an artifact or the log's file is at fault, or a policy needs more than texts.
        """
        if self._config.routing is not None:
            # Without a model here the pool is in the ingress, whose successor comes before it goes.
            alone = bool(self._local) and self._config.replicas == 1 and self._config.autoscaling is None
            self.routing = PoolRouting(self._config.routing, self.name, self.model_pool, alone=alone)
            self.routing.check(self.intake())

    def intake(self) -> TextIntake:
        """What the pool accepts, as it is now."""
        config = self._config
        endpoints = {role: name for role, name in config.roles.items() if name in self._endpoints}
        return TextIntake(
            self.name,
            {config.roles[role]: role for role in (*config.roles, SMALL, LARGE)},
            cast(TextTokenizer, None),
            0,
            0,
            config.default.name,
            config.default.params,
            self.routing is not None,
            frozenset(config.roles),
            RequestDefaults(config.sampling.given, config.max_answer_tokens),
            endpoints=endpoints,
            reader=self._local.get(config.small),
        )

    async def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        """Answer a call: chunks, then one `Usage`. Closing the iterator ends what was asked of endpoints.

        Raises:
            TurnoutError: a refusal before the first event; DEADLINE_EXCEEDED; UNAVAILABLE, also after parts of an
                answer, and RESOURCE_EXHAUSTED, where an endpoint cannot answer.
        """
        span, failed = begin(f"pool {self.name}", call.trace, request_id=call.request_id), ""
        if span is not None:
            call = replace(call, trace=header_of(span))
        deadline = None if call.deadline_s is None else asyncio.get_running_loop().time() + call.deadline_s
        try:
            prepared = await self.intake().admit(call)
            untold = call.include_prompt_len
            async with (
                self._started(prepared) as (events, queue_s),
                aclosing(until(deadline, call.deadline_s, events)) as timed,  # type: ignore[type-var]
            ):
                async for event in timed:
                    if untold:
                        untold = False
                        yield Begun(len(prepared.prompt))
                    self._rate.count(event)
                    yield replace(event, queue_s=queue_s) if isinstance(event, Usage) else event
        except BaseException as error:
            failed = type(error).__name__
            raise
        finally:
            end(span, failed)

    @asynccontextmanager
    async def _started(self, prepared: PreparedRequest) -> AsyncIterator[tuple[AsyncIterator[Event], float]]:
        """Wait for a place; yield the events of a request, and the seconds waited."""
        call = prepared.call
        low_priority = call.priority == "batch"
        places = self._low_priority_places if low_priority else self._places
        shadows = None if low_priority else self.routing
        with nullcontext() if shadows is None else shadows.during_request(lambda: self._places.full):
            async with held_place(places, call) as queue_s:
                if prepared.plan is None:
                    assert self.routing is not None
                    routing = Routing(self.routing.router, self.intake())
                    events = self.routing.recorded(prepared, routing, self._run)
                else:
                    events = self._run(prepared, self.model_pool)
                yield events, queue_s

    async def _run(
        self, prepared: PreparedRequest, models: ModelPool, routing: Routing | None = None
    ) -> AsyncIterator[Event]:
        """Run a prepared call."""
        began, notes = time.perf_counter(), []
        if prepared.plan is None:
            assert routing is not None
            prepared = await self._route(prepared, models, routing)
            notes = routing.notes
            if prepared.call.include_decision and routing.decision is not None:
                yield Decided(routing.decision.as_json())
        plan, call = prepared.plan, prepared.call
        assert plan is not None
        asked = replace(
            call, deadline_s=None, session="", limits=NO_LIMITS, decided=None, include_decision=False, explain=False
        )
        shadow = prepared.account == SHADOW_TENANT
        request = TextRequest(asked, one_model=call.model != self.name, shadow=shadow)
        run = load(METHODS, plan.method.name, "method").run
        first_s = 0.0
        async with aclosing(run(request, self._models, plan.params)) as chunks:
            async for chunk in chunks:
                first_s = first_s or time.perf_counter() - began
                yield chunk
        seconds = (first_s, time.perf_counter() - began)
        usage = usage_of(prepared, request, self.models_by_name[self._config.large], seconds, notes, routing)
        yield billed(usage, self._prices, self._config.large)

    async def _route(self, prepared: PreparedRequest, models: ModelPool, routing: Routing) -> PreparedRequest:
        call = prepared.call
        sequence = Sequence(prepared.prompt, prepared.sampling, prepared.seed, tenant=prepared.account or call.tenant)
        try:
            return (await routing.route(prepared, sequence, models))[0]
        finally:
            for model in models.models.values():
                model.release(sequence)

    async def explain(self, call: GenerateCall) -> Decision:
        """See `Pool.explain`."""
        prepared = await self.intake().admit(call)
        routing = explaining(self.routing, prepared, self.intake())
        await self._route(prepared, self.model_pool, routing)
        assert routing.decision is not None
        return routing.decision

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """Log-likelihood of each completion under a model that is computed here; see `Pool.score`."""
        name = self._asked(call.model)
        return await self._here(name).score(replace(call, model=name))

    async def embed(self, call: EmbedCall) -> Embeddings:
        """Embeddings by a model that is computed here; see `Pool.embed`."""
        name = self._asked(call.model)
        return await self._here(name).embed(replace(call, model=name))

    async def task(self, call: TaskCall, show: Callable[[int, int], object] | None = None) -> TaskAnswer:
        """Carry out a task by a model that is computed here; see `Pool.task`."""
        name = self._asked(call.model)
        return await self._here(name).task(replace(call, model=name), show)

    def _asked(self, model: str) -> str:
        if model not in (self.name, *self.models_by_name):
            raise not_found("model", model, [self.name, *self.models_by_name])
        return model if model in self.models_by_name else self._config.large

    async def tokens(self, call: GenerateCall) -> list[int]:
        """Refuse: the models of the pool have no tokens in common.

        Raises:
            TurnoutError: INVALID_ARGUMENT.
        """
        model = next(iter(self._endpoints))
        raise invalid("model", f"the tokens of a prompt are not known where a model is an endpoint, as {model!r} is")

    def decode(self, ids: list[int]) -> str:
        """Return nothing: there are no ids, see `tokens`."""
        return ""

    def _here(self, name: str) -> Pool:
        """The pool of a model that is computed here; INVALID_ARGUMENT: it is an endpoint."""
        if name not in self._local:
            raise invalid("model", f"scores, embeddings and tasks need the model itself, and {name!r} is an endpoint")
        return self._local[name]

    def models(self) -> list[ModelDescription]:
        """The pool first, then its members."""
        return described(self.name, self._config, self.models_by_name, self.routing is not None)

    def stats(self) -> PoolStats:
        """What the pool holds right now."""
        stats = stats_of(self.models_by_name)
        return replace(
            stats,
            requests=self._places.num_held + self._places.num_waiting,
            tokens_per_second=self._rate.per_second(),
            batch_requests=self._low_priority_places.num_held + self._low_priority_places.num_waiting,
            queued=self._places.num_waiting + self._low_priority_places.num_waiting,
            began=self._began,
            **(self.routing.stats() if self.routing is not None else {}),
        )

    def send_away(self, count: int) -> int:
        """See `Pool.send_away`."""
        return self._places.send_away(count)

    def forget(self, tenant: str) -> None:
        """See `Pool.forget`."""
        for pool in self._local.values():
            pool.forget(tenant)
        if self.routing is not None:
            self.routing.router.forget(tenant)

    def check(self) -> None:
        """Return: an endpoint that is down makes the pool degraded, and no new replica would mend it."""

    async def close(self) -> None:
        """Cancel what runs, shadows first; close connections and models."""
        if self.routing is not None:
            await self.routing.close()
        for endpoint in self._endpoints.values():
            await endpoint.client.close()
        for pool in self._local.values():
            await pool.close()


def load_text_pool(name: str, config: TurnoutConfig, load_pool: LoadPool) -> TextPool:
    """Load a configured pool with endpoints; nothing is asked of these.

    Args:
        name: the pool's.
        config: the whole configuration.
        load_pool: loads a pool of one model that is computed here.

    Raises:
        TurnoutError: a model cannot be loaded; a key cannot be read; the routing is at fault.
    """
    pool = pool_of(name, config)
    defaults = RequestDefaults({}, None, pool.chat_template_kwargs, pool.reasoning_effort)
    models: dict[str, TextModel] = {}
    for member in pool.members:
        endpoint = config.models[member].endpoint
        if endpoint is not None:
            models[member] = EndpointModel(EndpointClient(member, endpoint), defaults)
        else:
            models[member] = LocalModel(load_pool(name, _alone(name, member, config)), member)
    made = TextPool(name, pool, models, prices_of(config, pool.members))
    made.open_routing()
    return made


def _alone(pool: str, member: str, config: TurnoutConfig) -> TurnoutConfig:
    """The configuration with one of a pool's models as all of the pool."""
    given = config.pools[pool]
    kept = {name: getattr(given, name) for name in OF_MEMBERS if name in given.model_fields_set}
    alone = PoolConfig(large=member, default=MethodChoice(name=ALONE), **kept)
    return config.model_copy(update={"pools": {pool: alone}})
