"""Routing where the models are: decisions between prefill and decode, their log, and shadow traffic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from decoding.calibrated_params import check_current, check_method
from decoding.model import ModelPool, Request
from decoding.sequence import Sequence
from decoding.structures import short_form
from pool.prompt_ids import question_of
from pool.validation import PreparedRequest, RequestValidator
from router.base import Asked
from router.decision import Decision
from router.first_token_cache import primed
from router.log import RouteLog
from router.routing import Router
from router.shadows import Shadows, deferring
from turnout.call_context import with_context
from turnout.calls import ChatMessage, Chunk, DriftReading, Event, GenerateCall, Usage
from turnout.config import RoutingConfig
from turnout.errors import Code, Interrupted, TurnoutError, invalid
from turnout.tool_formats.grammar import CallRules

SHADOW_TENANT = "(shadow)"  # its time on the models is no tenant's, and no tenant can be called that


@dataclass(slots=True)
class Routing:
    """The routing of one call: asked once, after its prompt is known and before anything is generated."""

    router: Router
    intake: RequestValidator
    decision: Decision | None = None
    refused: dict[str, Any] | None = None  # the arm of a split that led nowhere; see `Asked.arm`
    notes: list[str] = field(default_factory=list)
    drift: tuple[DriftReading, ...] = ()

    async def route(
        self, prepared: PreparedRequest, sequence: Sequence, models: ModelPool
    ) -> tuple[PreparedRequest, ModelPool]:
        """Decide; the call as decided, and the models to run it with.

        Raises:
            TurnoutError: the call's limits cannot be kept.
        """
        call = prepared.call
        asked = Asked(
            request=Request(call.request_id, sequence, call.tenant),
            pool=self.intake.pool,
            tenant=call.tenant,
            session=call.session,
            prompt_text=question_of(with_context(call), self.intake.tokenizer),
            limits=call.limits,
        )
        before = None if call.decided is None else Decision.of_json(call.decided, "decided")

        def check(decision: Decision) -> None:
            plan = self.intake.plan(decision.method, decision.params)
            check_current(models, plan.method.name, plan.params)

        # An answer that has begun continues as it was decided.
        try:
            self.decision = await self.router.decide(asked, models, before, None if call.delivered else check)
        except TurnoutError:
            self.refused = asked.arm
            raise
        self.notes, self.drift = asked.request.notes, tuple(asked.drift)
        return self.intake.follow(prepared, self.decision), primed(models, asked)

    def shown(self, explain: bool) -> dict[str, Any] | None:
        """The decision as an answer carries it."""
        if self.decision is None:
            return None
        values = self.decision.as_json()
        return values if explain else {**values, "features": {}, "scores": {}, "limits": {}}


def explaining(routing: PoolRouting | None, prepared: PreparedRequest, intake: RequestValidator) -> Routing:
    """Return a routing that decides about a call as a pool's own would, and remembers nothing.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the pool has none, or the call names a method.
    """
    if routing is None:
        raise invalid("model", f"pool {intake.pool!r} has no routing")
    if prepared.plan is not None:
        raise invalid("method", f"the request is not routed: it names {prepared.plan.method.name!r}")
    return Routing(Router(routing.router.policy), intake)


Runs = Callable[[PreparedRequest, ModelPool, Routing], AsyncIterator[Event]]


@dataclass(slots=True)
class _Seen:
    """What went by of an answer."""

    texts: dict[int, str] = field(default_factory=dict)
    usage: Usage | None = None
    status: str = Code.CANCELLED.value
    elsewhere: bool = False  # it continues in another replica

    def take(self, event: Event) -> None:
        if isinstance(event, Chunk):
            self.texts[event.index] = self.texts.get(event.index, "") + event.text
        elif isinstance(event, Usage):
            self.usage, self.status = event, "OK"

    async def watch(self, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        """The same events."""
        try:
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    self.take(event)
                    yield event
        except TurnoutError as error:
            self.status = error.code.value
            self.elsewhere = isinstance(error, Interrupted)
            raise
        except Exception:
            self.status = Code.INTERNAL.value
            raise

    @property
    def answers(self) -> list[str]:
        return [self.texts[index] for index in sorted(self.texts)]


class PoolRouting:
    """A pool's router, its log and its shadows.

    Args:
        config: what the pool is configured with.
        pool: the pool's name.
        models: its models and artifacts.
        alone: whether no other replica writes to the same log.

    Raises:
        TurnoutError: a policy, a parameter, an artifact or the log's file is at fault; names the field.
    """

    def __init__(self, config: RoutingConfig, pool: str, models: ModelPool, alone: bool = True) -> None:
        place = f"pools.{pool}.routing"
        self.pool = pool
        self.router = Router.of(config.policy, f"{place}.policy", models, config.sticky)
        self.shadows: Shadows | None = None
        if config.shadow is not None:
            self.shadows = Shadows(config.shadow)
            self._shadow_router = Router.of(config.shadow.policy, f"{place}.shadow.policy", models, checks_limits=False)
        self.log = RouteLog(config.log, alone, f"{place}.log.path") if config.log is not None else None
        self._models = models

    def check(self, intake: RequestValidator) -> None:
        """Refuse methods that a policy may choose and whose calibration or parts are missing or do not fit.

        Args:
            intake: what the pool accepts: what it sets for its default method holds where a policy chooses it.

        Raises:
            TurnoutError: naming the field; the log is closed then.
        """
        place = f"pools.{self.pool}.routing"
        routers = [(self.router, f"{place}.policy")]
        if self.shadows is not None:
            routers.append((self._shadow_router, f"{place}.shadow.policy"))
        try:
            for router, field in routers:
                for where, choice in router.policy.methods(f"{field}.params"):
                    plan = intake.plan(choice.name, choice.params)
                    check_method(self._models, plan.method.name, plan.params, where)
        except TurnoutError:
            if self.log is not None:
                self.log.close()
            raise

    @contextmanager
    def during_request(self, full: Callable[[], bool]) -> Iterator[None]:
        """Count a request, routed or not, as in progress while the context lasts; see `Shadows.during_request`."""
        if self.shadows is None:
            yield
            return
        with self.shadows.during_request(full):
            yield

    async def recorded(self, prepared: PreparedRequest, routing: Routing, runs: Runs) -> AsyncIterator[Event]:
        """Run a routed call; afterwards it is logged, and perhaps run again in the background.

        A call that is interrupted is logged by the replica in which it continues.

        Args:
            prepared: the call.
            routing: what decides about it.
            runs: from a call, models and routing to events.
        """
        seen = _Seen()
        try:
            async with aclosing(seen.watch(runs(prepared, self._models, routing))) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, Usage):
                        # The reader may stop after the last event, and never ask for more.
                        self._answered(prepared, routing, runs, seen)
                    yield event
        finally:
            if seen.usage is None and not seen.elsewhere:
                self._write("request", prepared, routing, seen)

    def _answered(self, prepared: PreparedRequest, routing: Routing, runs: Runs, seen: _Seen) -> None:
        self._write("request", prepared, routing, seen)
        if self._wants_shadow(prepared.call):
            self._offer(prepared, routing.intake, runs, seen.answers)

    def _wants_shadow(self, call: GenerateCall) -> bool:
        return self.shadows is not None and self.shadows.wants(call.tenant, call.request_id)

    def _offer(self, prepared: PreparedRequest, intake: RequestValidator, runs: Runs, answers: list[str]) -> None:
        assert self.shadows is not None
        shadows = self.shadows
        call = replace(prepared.call, deadline_s=shadows.config.timeout_s, trace="", priority="batch")
        # A call that came from another replica is shadowed as one that began here.
        call = replace(call, decided=None, delivered=(), moved=None)
        again = replace(prepared, call=call, account=SHADOW_TENANT)

        async def run() -> None:
            routing, seen = Routing(self._shadow_router, intake), _Seen()
            models = deferring(self._models, shadows.gate)
            try:
                async with aclosing(seen.watch(runs(again, models, routing))) as events:  # type: ignore[type-var]
                    async for _ in events:
                        pass
            finally:
                # Of a call that came from another replica, only the rest of the text has gone by here.
                compared = {} if prepared.call.delivered else {"same_text": seen.answers == answers}
                self._write("shadow", again, routing, seen, compared)

        shadows.offer(prepared.call.request_id, run)

    def _write(
        self, kind: str, prepared: PreparedRequest, routing: Routing, seen: _Seen, more: dict[str, Any] | None = None
    ) -> None:
        if self.log is None:
            return
        call, decision = prepared.call, routing.decision
        entry: dict[str, Any] = {
            "kind": kind,
            "pool": self.pool,
            "request_id": call.request_id,
            "tenant": call.tenant,
            "session": call.session,
            "prompt_tokens": len(prepared.prompt),
            "seed": prepared.seed,
            "decision": decision.as_json() if decision is not None else None,
            "outcome": {"status": seen.status, **_outcome(seen.usage)},
            **({"refused": routing.refused} if routing.refused is not None else {}),
            **(more or {}),
        }
        if self.log.texts:
            entry |= {"request": _asked_again(call), "answers": seen.answers}
        self.log.write(entry)

    def stats(self) -> dict[str, Any]:
        """What of `PoolStats` is about routing."""
        shadows = self.shadows
        return {
            "shadows": len(shadows) if shadows is not None else 0,
            "shadows_dropped": shadows.num_dropped if shadows is not None else 0,
            "log_dropped": self.log.num_dropped if self.log is not None else 0,
        }

    async def close(self) -> None:
        """End the shadows, and write the rest of the log."""
        if self.shadows is not None:
            await self.shadows.close()
        if self.log is not None:
            await asyncio.to_thread(self.log.close)


def _outcome(usage: Usage | None) -> dict[str, Any]:
    """What an answer cost."""
    if usage is None:
        return {}
    return {
        "completion_tokens": usage.completion_tokens,
        "large_share": usage.cost.large_share,
        "paper": usage.cost.spent.paper,
        "flops": usage.cost.spent.flops,
        "flops_large_only": usage.cost.large_only.flops,
        "ttft_s": usage.ttft_s,
        "wall_s": usage.wall_s,
    }


def _asked_again(call: GenerateCall) -> dict[str, Any]:
    """The call as the body of an HTTP request, for `turnout route explain`."""
    asked = call.sampling.model_dump(mode="json", exclude_defaults=True, exclude={"token_details", "structure"})
    body: dict[str, Any] = {"model": call.model, **asked}
    if call.messages is not None:
        body["messages"] = [_turn(each) for each in call.messages]
        if call.tools:
            # Unless the answer may call some of them, see below.
            body |= {"tools": [tool.for_template for tool in call.tools], "tool_choice": "none"}
        logprobs = body.pop("logprobs", None)
        if logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": logprobs}
    else:
        body["prompt"] = call.prompt if isinstance(call.prompt, str) else list(call.prompt or ())
        if not call.add_special_tokens:
            body["add_special_tokens"] = False
    limits = {
        name: value
        for name in ("max_cost", "max_latency_s", "quality")
        if (value := getattr(call.limits, name)) is not None
    }
    body["decoding"] = {"session": call.session, "limits": limits, "parse_special": call.parse_special}
    if call.context:
        body["decoding"]["context"] = call.context
    structure = call.sampling.structure
    if structure is not None and structure.kind == "tools":
        rules = CallRules.of(structure)
        mode = "required" if rules.required else "auto"
        allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"name": name} for name in rules.functions]}
        some = len(rules.functions) < len(call.tools)
        body |= {"tool_choice": allowed if some else mode, "parallel_tool_calls": rules.parallel}
        structure = rules.answer
    if structure is not None:
        body["decoding"]["structure"] = short_form(structure)
    return body


def _turn(turn: ChatMessage) -> dict[str, Any]:
    """A message as a body has it."""
    made: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        made["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in turn.tool_calls
        ]
    if turn.tool_call_id:
        made["tool_call_id"] = turn.tool_call_id
    return made
