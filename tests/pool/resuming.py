"""What tests of calls that are made again share: what a client has at some point, and the rest of the answer."""

from __future__ import annotations

import pickle
from collections.abc import Sequence as Tokens
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine.scheduler import step_builder
from pool.local_pool import LocalPool
from pool.pool import Pool
from pool.stop_strings import StopStrings
from tests.engine.harness import Reply, answer
from turnout.calls import Chunk, Delivered, Event, GenerateCall, Usage
from turnout.errors import Code, Interrupted
from turnout.moved_calls import Moved

# Methods over the test pair: (name, parameters, whether a sampled answer is gone on with).
METHODS: list[tuple[str, dict[str, Any], bool]] = [
    ("plain", {}, True),
    ("plain", {"model": "small"}, True),
    ("speculative", {"length": "fixed", "draft_length": 3}, True),
    ("speculative", {"drafter": "input_copy", "length": "fixed", "draft_length": 4}, True),
    ("speculative", {"drafter": ["model_chain", "none"], "length": "fixed", "select": "ucb"}, True),
    ("speculative", {"drafter": "input_copy", "length": "svip", "fallback": "plain"}, True),
    ("random", {"share": 0.5}, True),
    ("asap", {}, True),  # under a structure it learns, and continues from what it knows by then
    ("monitor_guided", {"provider": "listed"}, True),
    ("adadec", {"threshold": 3.0, "look_ahead": 2}, True),
    ("ips", {"candidates": 4, "weight": 0.5}, True),
    ("look_back", {"alpha": 0.5, "candidates": 4, "history": 8}, True),
    ("pearl", {}, True),
    ("pearl", {"verifier": "rejection", "draft_length": 3}, True),
    ("speculative", {"verifier": "rejection"}, False),
    ("speculative", {"drafter": "input_copy", "verifier": "typical"}, False),
    ("entropy_adaptive", {"threshold": 2.0, "window": 2, "min_stay": 2}, False),
    ("random_switch", {"share": 0.5, "mean_run": 4.0, "min_stay": 1}, False),
    ("sentence_lead", {"lead_tokens": 2}, False),
    ("cascade", {"threshold": -1.0}, False),
    ("best_of", {"k": 2, "rerank": "logprob"}, False),
    ("global_sampling", {"k": 2}, False),
    (
        "a_star",
        {"scorer": {"name": "self_grade", "reading": "expected", "question": "grade"}, "separators": [" "]},
        False,
    ),
    ("phi_decoding", {"beams": 2, "samples": 2, "max_steps": 2, "separators": [" "]}, False),
]
RESUMABLE = [(name, params) for name, params, resumable in METHODS if resumable]
MADE_AGAIN = [(name, params) for name, params, resumable in METHODS if not resumable]


@dataclass
class Client:
    """What came of a call so far."""

    texts: list[str]
    ids: list[list[int]]
    ended: list[bool]
    usage: Usage | None = None

    @classmethod
    def of(cls, call: GenerateCall) -> Client:
        n = call.sampling.n
        return cls([""] * n, [[] for _ in range(n)], [False] * n)

    def take(self, event: Event) -> None:
        if isinstance(event, Chunk):
            assert not self.ended[event.index], "a chunk after the last one"
            self.texts[event.index] += event.text
            self.ids[event.index] += [token.id for token in event.tokens]
            self.ended[event.index] = event.finish_reason is not None
        elif isinstance(event, Usage):
            assert self.usage is None
            self.usage = event

    @property
    def delivered(self) -> tuple[Delivered, ...]:
        parts = zip(self.ids, self.texts, self.ended, strict=True)
        return tuple(Delivered(tuple(ids), len(text), ended) for ids, text, ended in parts)

    def rest_of(self, call: GenerateCall) -> GenerateCall:
        return replace(call, delivered=self.delivered)


async def part(pool: LocalPool, call: GenerateCall, num_chunks: int) -> Client:
    """The first chunks of a call; then its client is gone."""
    client = Client.of(call)
    async with aclosing(pool.generate(call)) as events:  # type: ignore[type-var]
        async for event in events:
            if num_chunks == 0:
                break
            client.take(event)
            num_chunks -= 1
    return client


async def rest(pool: LocalPool, call: GenerateCall, client: Client) -> Client:
    """The call made again for the same client."""
    async for event in pool.generate(client.rest_of(call)):
        client.take(event)
    return client


async def run(pool: Pool, call: GenerateCall, client: Client, stop_after: int | None, **how: Any) -> Moved | None:
    """Answer a client's call until it ends (None) or, after so many chunks, is handed over."""
    chunks = 0
    try:
        with pytest.MonkeyPatch.context() as patch:
            if stop_after is not None:
                # However late the event loop runs, the answer is only a few tokens ahead of its client, and not ended.
                patch.setattr(step_builder, "MOST_STEPS", 2)
            async for event in pool.generate(client.rest_of(call)):
                client.take(event)
                chunks += 1
                if chunks == stop_after:
                    pool.hand_over(call.request_id, **how)
    except Interrupted as error:
        crossed = pickle.loads(pickle.dumps(error))
        assert (crossed.code, crossed.message) == (Code.UNAVAILABLE, error.message)
        moved: Moved = crossed.moved
        assert moved is not None
        return moved
    return None


def had(pool: LocalPool, call: GenerateCall, ids: Tokens[int], count: int) -> Delivered:
    """What a client has after `count` tokens that came one by one."""
    assert isinstance(call.prompt, tuple)
    text, chars = StopStrings(pool.tokenizer.detokenizer(call.prompt), call.sampling.stop), 0
    for token in ids[:count]:
        text.feed(token)
        chars += len(text.take())
    return Delivered(tuple(ids[:count]), chars)


async def finish(pool: LocalPool, call: GenerateCall, *delivered: Delivered) -> Reply:
    """What a pool sends of a call whose beginning was delivered."""
    return await answer(pool, replace(call, delivered=delivered))
