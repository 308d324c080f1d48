"""A pool in this process: a small and a large model that answer together, from text to text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import torch

from decoding.artifacts import Artifacts
from decoding.model import ModelPool, Score
from decoding.sequence import Sequence
from engine.answer import AnswerRun, encode_tokens, prepare_call
from engine.costs.limits import check_memory
from engine.device import Device
from engine.loading import Checkpoint, load_checkpoint
from engine.model import EngineModel
from engine.places import Places
from engine.text import TextTokenizer
from turnout.calls import Event, GenerateCall, ModelDescription, PoolStats, ScoreCall, ScoredTokens, TokenOut
from turnout.config import TurnoutConfig, artifacts_path, model_path
from turnout.errors import Code, TurnoutError, not_found, out_of_range
from turnout.types import SamplingParams, TokenKind

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
                model_path(settings), DTYPES[settings.dtype], device.torch_device, config.engine.kernels
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
        return cls(name, models, roles, tokenizer, places, *method, tuple(devices.values()), artifacts)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        """Answer a call: chunks, then one `Usage`. Closing the iterator frees everything within a step.

        Raises:
            TurnoutError: a refusal before the first event, RESOURCE_EXHAUSTED when too many calls wait for a place;
                DEADLINE_EXCEEDED or INTERNAL later.
        """
        members = {member: role for role, member in self.roles.items()}
        prepared = prepare_call(
            call,
            self.tokenizer,
            self.max_length,
            self.vocab_size,
            self.name,
            members,
            self.default_method,
            self.default_params,
        )
        run = AnswerRun(prepared, self.pool, self.tokenizer, self.roles["large"])
        async with (
            self._places.hold(call.tenant, call.deadline_s),
            aclosing(run.events()) as events,  # type: ignore[type-var]
        ):
            async for event in events:
                self._rate.count(event)
                yield event

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
        seq = Sequence(prompt, SamplingParams(temperature=0.0), 0, cache_salt=call.tenant, tenant=call.tenant)
        async with self._places.hold(call.tenant):
            try:
                scores = await model.score(seq, completions, call.top)
            finally:
                model.release(seq)
        return [
            self._scored(model.name, completion, score) for completion, score in zip(completions, scores, strict=True)
        ]

    def _scored(self, source: str, completion: tuple[int, ...], score: Score) -> ScoredTokens:
        text = self.tokenizer.text
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
        return PoolStats(
            requests=self._places.num_held + self._places.num_waiting,
            sequences=sum(len(model.batcher.tables) for model in models),
            used_blocks=sum(model.pool.num_held for model in models),
            cached_blocks=sum(model.pool.num_cached for model in models),
            total_blocks=sum(model.pool.num_blocks for model in models),
            waiting=sum(model.batcher.num_waiting for model in models),
            tokens_per_second=self._rate.per_second(),
            step_seconds={model.name: model.step_seconds() for model in models},
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return self.tokenizer.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(ids)

    async def close(self) -> None:
        """Cancel what runs and end the forward threads."""
        for model in self.engines.values():
            await model.close()
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
    if mine.vocabulary() != other.vocabulary():
        message = f"pools.{pool}: {small!r} and {large!r} do not share one vocabulary"
        raise TurnoutError(Code.INVALID_ARGUMENT, message, f"pools.{pool}")
