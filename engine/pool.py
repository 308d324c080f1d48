"""A pool in this process: a small and a large model that answer together, from text to text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from decoding.artifacts import Artifacts
from decoding.calibrated import check_default
from decoding.model import ModelPool, Score
from decoding.sequence import Sequence
from engine.answer import AnswerRun
from engine.costs.limits import check_memory
from engine.device import Device
from engine.loading import Checkpoint, load_checkpoint
from engine.model import EngineModel
from engine.places import Places
from engine.prepare import Intake, Prepared, encode_tokens
from engine.routing import PoolRouting, Routing
from engine.sharing import Share, cache_stats, open_stores, private, reuse_spans, share_of
from engine.text import TextTokenizer
from router.decision import Decision
from router.routing import Router
from turnout.calls import Event, GenerateCall, ModelDescription, PoolStats, ScoreCall, ScoredTokens, TokenOut
from turnout.config import TurnoutConfig, artifacts_path, model_path
from turnout.errors import Code, TurnoutError, invalid, not_found, out_of_range
from turnout.types import SamplingParams, TokenKind

if TYPE_CHECKING:
    from kvstore.build import SharedStore

SCARCE = 0.75  # share of a model's blocks in use beyond which shadows give way
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class LocalPool:
    """Models loaded in this process, and the methods that run over them.

    Use `load`. All calls must come from one event loop.

    Args:
        name: what requests put in `model`.
        models: members by name.
        roles: "small" and "large" -> member name.
        tokenizer: shared by the members.
        places: how many calls are worked on at once, and who is next.
        default_method: for requests that name none.
        default_params: its parameters.
        devices: where the members run; closed with the pool.
        artifacts: what was trained for the members.

    Attributes:
        routing: chooses a method where a call leaves it open; None: the default method is used.
        stores: what the members share with other processes; None: nothing.
        share: says whose cache a prompt belongs to.
    """

    def __init__(
        self,
        name: str,
        models: dict[str, EngineModel],
        roles: dict[str, str],
        tokenizer: TextTokenizer,
        places: Places,
        default_method: str = "plain",
        default_params: dict[str, Any] | None = None,
        devices: tuple[Device, ...] = (),
        artifacts: Artifacts | None = None,
    ) -> None:
        self.name = name
        self.engines = models
        self.roles = roles
        self.tokenizer = tokenizer
        self.default_method = default_method
        self.default_params = default_params or {}
        self.pool = ModelPool(models=dict(models), roles=roles, tokenizer=tokenizer, artifacts=artifacts or Artifacts())
        self.max_length = min(model.max_length for model in models.values())
        self.vocab_size = min(model.vocab_size for model in models.values())
        self._devices = devices
        self._places = places
        self._rate = _Rate()
        self.routing: PoolRouting | None = None
        self.stores: SharedStore | None = None
        self.share: Share = private

    @classmethod
    def load(cls, name: str, config: TurnoutConfig) -> LocalPool:
        """Load a configured pool's models and tokenizer.

        Raises:
            TurnoutError: unknown pool, unsupported architecture, models that do not fit into memory or do not share
                a vocabulary.
        """
        if name not in config.pools:
            raise not_found("pools", name, list(config.pools))
        pool = config.pools[name]
        if config.engine.threads is not None:
            torch.set_num_threads(config.engine.threads)
        devices: dict[str, Device] = {}
        models: dict[str, EngineModel] = {}
        checkpoints: dict[str, Checkpoint] = {}
        members = dict.fromkeys((pool.small, pool.large))
        check_memory({member: config.models[member] for member in members}, config.engine)
        for member in members:
            settings = config.models[member]
            device = devices.setdefault(settings.device, Device(settings.device))
            checkpoints[member] = load_checkpoint(
                model_path(settings),
                DTYPES[settings.dtype],
                device.torch_device,
                config.engine.kernels,
                config.engine.shared_attention,
            )
        vocab_size = min(checkpoint.vocab_size for checkpoint in checkpoints.values())
        for member, checkpoint in checkpoints.items():
            checkpoint.vocab_size = checkpoint.plan.vocab_size = vocab_size
            settings = config.models[member]
            models[member] = EngineModel(member, checkpoint, settings, config.engine, devices[settings.device])
        tokenizer = TextTokenizer(model_path(config.models[pool.large]))
        other = TextTokenizer(model_path(config.models[pool.small]))
        _check_vocabulary(name, pool.small, pool.large, other, tokenizer)
        roles = {"small": pool.small, "large": pool.large}
        places = Places(name, pool.max_ongoing_requests, pool.max_queued_requests)
        default = pool.default
        method = (default.name, default.params)
        artifacts = Artifacts(artifacts_path(pool))
        loaded = cls(name, models, roles, tokenizer, places, *method, tuple(devices.values()), artifacts)
        check_default(loaded.pool, *method, f"pools.{name}.default")
        if pool.routing is not None:
            loaded.routing = PoolRouting(pool.routing, name, loaded.pool, alone=pool.replicas == 1)
        reuse_spans(pool, models.values())
        folders = (model_path(config.models[pool.large]), artifacts_path(pool))
        loaded.stores = open_stores(config, models, tokenizer, *folders)
        loaded.share = share_of(config, loaded.stores)
        return loaded

    async def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        """Answer a call: chunks, then one `Usage`. Closing the iterator frees everything within a step.

        Raises:
            TurnoutError: a refusal before the first event, RESOURCE_EXHAUSTED when too many calls wait for a place;
                DEADLINE_EXCEEDED or INTERNAL later.
        """
        prepared = self._intake().prepare(call)
        async with aclosing(self._events(prepared)) as events:  # type: ignore[type-var]
            async for event in events:
                self._rate.count(event)
                yield event

    async def _events(self, prepared: Prepared) -> AsyncIterator[Event]:
        call = prepared.call
        with self._beside():
            async with self._places.hold(call.tenant, call.deadline_s):
                if prepared.plan is None:
                    assert self.routing is not None
                    events = self.routing.recorded(prepared, Routing(self.routing.router, self._intake()), self._run)
                else:
                    events = self._run(prepared, self.pool)
                async with aclosing(events):  # type: ignore[type-var]
                    async for event in events:
                        yield event

    def _run(self, prepared: Prepared, models: ModelPool, routing: Routing | None = None) -> AsyncIterator[Event]:
        return AnswerRun(prepared, models, self.tokenizer, self.roles["large"], routing, self.share).events()

    def _intake(self) -> Intake:
        members = {member: role for role, member in self.roles.items()}
        default = (self.default_method, self.default_params)
        lengths = (self.max_length, self.vocab_size)
        return Intake(self.name, members, self.tokenizer, *lengths, *default, routed=self.routing is not None)

    def _beside(self) -> AbstractContextManager[None]:
        """A call is in progress: shadows wait, and are dropped where it finds the pool full."""
        return self.routing.beside(self._full) if self.routing is not None else nullcontext()

    def _full(self) -> bool:
        """Whether a call that comes now must wait for a place, or memory for it is scarce."""
        pools = [model.pool for model in self.engines.values()]
        return self._places.full or any(pool.num_held > SCARCE * pool.num_blocks for pool in pools)

    async def explain(self, call: GenerateCall) -> Decision:
        """How a call would be routed now; nothing is generated, logged or remembered.

        Raises:
            TurnoutError: as `generate`; INVALID_ARGUMENT where the pool has no routing, or the call names a method.
        """
        prepared = self._intake().prepare(call)
        if self.routing is None:
            raise invalid("model", f"pool {self.name!r} has no routing")
        if prepared.plan is not None:
            raise invalid("method", f"the request is not routed: it names {prepared.plan.method.name!r}")
        routing = Routing(Router(self.routing.router.policy), self._intake())
        sharing = self.share(call.tenant, prepared.prompt)
        sequence = Sequence(prepared.prompt, call.sampling, prepared.seed, sharing=sharing, tenant=call.tenant)
        try:
            await routing.route(prepared, sequence, self.pool)
        finally:
            for model in self.engines.values():
                model.release(sequence)
        assert routing.decision is not None
        return routing.decision

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """Log-likelihood of each completion after the prompt, under the large model or the member named.

        Raises:
            TurnoutError: as `generate`.
        """
        if call.model not in (self.name, *self.engines):
            raise not_found("model", call.model, [self.name, *self.engines])
        model = self.engines[call.model if call.model in self.engines else self.roles["large"]]
        prompt = encode_tokens("prompt", call.prompt, self.tokenizer, self.vocab_size)
        completions = [
            tuple(encode_tokens(f"completions.{i}", text, self.tokenizer, self.vocab_size))
            for i, text in enumerate(call.completions)
        ]
        longest = max((len(c) for c in completions), default=0)
        if len(prompt) + longest > model.max_length:
            raise out_of_range(
                "prompt", f"with its completion {len(prompt) + longest} tokens; at most {model.max_length}"
            )
        sharing = self.share(call.tenant, prompt)
        seq = Sequence(prompt, SamplingParams(temperature=0.0), 0, sharing=sharing, tenant=call.tenant)
        with self._beside():
            async with self._places.hold(call.tenant):
                try:
                    scores = await model.score(seq, completions, call.top)
                finally:
                    model.release(seq)
        return [
            _scored(self.tokenizer, model.name, completion, score)
            for completion, score in zip(completions, scores, strict=True)
        ]

    def models(self) -> list[ModelDescription]:
        """The pool first, then its members."""
        large = self.engines[self.roles["large"]]
        total = sum(model.num_parameters for model in self.engines.values())
        pool = ModelDescription(
            self.name, large.architecture, total, self.vocab_size, self.max_length, self.roles, self.default_method
        )
        members = [
            ModelDescription(m.name, m.architecture, m.num_parameters, m.vocab_size, m.max_length, {}, "plain")
            for m in self.engines.values()
        ]
        return [pool, *members]

    def stats(self) -> PoolStats:
        """What the pool holds right now."""
        models = self.engines.values()
        shadows = self.routing.shadows if self.routing is not None else None
        return PoolStats(
            requests=self._places.num_held + self._places.num_waiting,
            sequences=sum(len(model.batcher.tables) for model in models),
            used_blocks=sum(model.pool.num_held for model in models),
            cached_blocks=sum(model.pool.num_cached for model in models),
            total_blocks=sum(model.pool.num_blocks for model in models),
            waiting=sum(model.batcher.num_waiting for model in models),
            tokens_per_second=self._rate.per_second(),
            step_seconds={model.name: model.step_seconds() for model in models},
            shadows=len(shadows) if shadows is not None else 0,
            shadows_dropped=shadows.num_dropped if shadows is not None else 0,
            cache=cache_stats(models),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return self.tokenizer.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(ids)

    async def close(self) -> None:
        """Cancel what runs, shadows first; end the store's threads and the forward threads."""
        if self.routing is not None:
            await self.routing.close()
        for model in self.engines.values():
            await model.close()
        if self.stores is not None:
            await asyncio.to_thread(self.stores.close)
        for device in self._devices:
            await asyncio.to_thread(device.close)


class _Rate:
    """Tokens per second over the last full window."""

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._tokens = 0
        self._last = 0.0

    def count(self, event: Event) -> None:
        self._roll()
        self._tokens += len(getattr(event, "tokens", ()))

    def per_second(self) -> float:
        self._roll()
        return self._last

    def _roll(self) -> None:
        elapsed = time.monotonic() - self._since
        if elapsed >= self.WINDOW_S:
            self._last, self._tokens, self._since = self._tokens / elapsed, 0, time.monotonic()


def _check_vocabulary(pool: str, small: str, large: str, mine: TextTokenizer, other: TextTokenizer) -> None:
    """Models that continue each other's text must agree on what every token means."""
    ours, theirs = mine.vocabulary(), other.vocabulary()
    if ours != theirs:
        apart = min((token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)), key=str)
        ids = f"{apart!r} is {ours.get(apart, 'absent')} in one and {theirs.get(apart, 'absent')} in the other"
        message = f"pools.{pool}: {small!r} and {large!r} do not share one vocabulary: {ids}"
        raise TurnoutError(Code.INVALID_ARGUMENT, message, f"pools.{pool}")


def _scored(tokenizer: TextTokenizer, source: str, completion: tuple[int, ...], score: Score) -> ScoredTokens:
    text = tokenizer.text
    tokens = tuple(
        TokenOut(
            token,
            text(token),
            source,
            TokenKind.DECODED,
            logprob,
            top=tuple((other, text(other), value) for other, value in top),
        )
        for token, logprob, top in zip(completion, score.token_logprobs, score.top, strict=True)
    )
    return ScoredTokens(tokens, score.greedy)
