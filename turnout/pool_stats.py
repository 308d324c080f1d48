"""What a pool, its models and its stores hold and have done: plain picklable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What the prefix stores of a pool's models did since it was loaded, all models together.

    Attributes:
        health: of Redis: ok; degraded, some node is left alone; off, none can be reached.
        lookups: sequences whose prefix was looked for.
        tokens: tokens that were found, by where: device (the models' own blocks), memory, redis.
        faults: what went wrong and became a miss, by kind.
        dropped: values that were not written, by reason.
        writes: values written.
        bytes_read: from Redis.
        bytes_written: to Redis.
        memory_bytes: held in this process's memory.
        regret_s: time that the other choice between fetching and computing would have saved, by its own forecasts.
        servers: of the store: product, version and place of each, as in "valkey 9.1.2 (embedded)".
    """

    health: Literal["ok", "degraded", "off"]
    lookups: int
    tokens: dict[str, int]
    faults: dict[str, int]
    dropped: dict[str, int]
    writes: int
    bytes_read: int
    bytes_written: int
    memory_bytes: int
    regret_s: float
    servers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AuditDiff:
    """A token of an answer that the large model alone would not have written.

    Attributes:
        request_id: whose answer.
        method: what wrote it.
        answer: which of the request's answers.
        position: place in the answer, from 0.
        wrote: (id, text) of the token that was sent.
        expected: (id, text) of the token that the large model chooses after the same tokens.
        margin_nats: how far the first is behind the second, noise included; None: sampling excludes it altogether.
        model: the large model's name.
        found_at: when, in seconds since 1970 by the replica's clock; 0.0: unknown.
    """

    request_id: str
    method: str
    answer: int
    position: int
    wrote: tuple[int, str]
    expected: tuple[int, str]
    margin_nats: float | None
    model: str
    found_at: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditStats:
    """What audits of lossless answers found since the pool was loaded.

    Attributes:
        equal: answers that the large model alone would have written.
        ties: those that differ only where rounding may decide.
        mismatches: those that differ elsewhere.
        dropped: audits that were not finished: no room, or no time.
        failed: audits that ended with an error.
        tokens: that were looked at.
        running: audits that wait or run.
        last: the first wrong token of the last answers that mismatched.
    """

    equal: int = 0
    ties: int = 0
    mismatches: int = 0
    dropped: int = 0
    failed: int = 0
    tokens: int = 0
    running: int = 0
    last: tuple[AuditDiff, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberStats:
    """What one model of a pool holds right now.

    Attributes:
        model: its name.
        sequences: sequences that hold cache.
        used_blocks: blocks referenced by a sequence.
        cached_blocks: blocks that are reusable, not in use.
        total_blocks: all there are.
        waiting: operations waiting for a forward pass.
        waiting_tokens: tokens these still have to feed.
        step_seconds: recent time of a decode step, in seconds.
        place: where it runs: node and process of its actor; "" in the pool's own process.
        restarts: how often its actor was started again.
        working_s: how long its device has been at its present forward, in seconds; 0.0: at none.
        block_size: tokens that a block holds; 0: not known.
    """

    model: str
    sequences: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    waiting: int
    waiting_tokens: int
    step_seconds: float
    place: str = ""
    restarts: int = 0
    working_s: float = 0.0
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class EndpointStats:
    """What a pool has asked of a model that is a server elsewhere, since the pool was loaded.

    Attributes:
        model: its name.
        breaker: closed: it is asked; half_open: one request tries it; open: it is left alone.
        opened: how often it was left alone.
        running: requests that are there now.
        waiting: requests that wait until others have ended there.
        requests: those that have ended, by outcome: ok, refused (4xx), limited (429), failed, cancelled.
        retries: those of them that were made again.
        seconds: time of all of them.
        first_s: time to the first event of those that answered.
    """

    model: str
    breaker: Literal["closed", "half_open", "open"]
    opened: int
    running: int
    waiting: int
    requests: dict[str, int]
    retries: int
    seconds: float
    first_s: float


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool holds right now; all zero when idle (`cached_blocks` are reusable, not in use).

    Attributes:
        requests: calls in progress, shadows of routing left out.
        sequences: sequences that hold cache, summed over models.
        used_blocks: blocks referenced by a sequence, summed over models.
        waiting: operations waiting for a forward pass.
        shadows: shadows of routing that wait or run.
        shadows_dropped: shadows that were not finished, since the pool was loaded.
        log_dropped: entries that the route log lost, since then.
        cache: what its prefix stores did; None: it has none.
        members: its models, one by one.
        waiting_s: time that the waiting operations will take the models, one after the other, by forecast, in seconds.
        prompt_token_s: time that a token of a prompt takes the models, one after the other, by forecast, in seconds.
        place: where the replica itself runs: its node and process; "" where it is no process of its own.
        batch_requests: calls of batch priority in progress, which `requests` leaves out.
        audit: what its audits found; None: it has none.
        began: when it was loaded, in seconds since 1970 by the replica's clock; 0.0: unknown.
        now: when this was said, by the same clock.
        notes: findings of the load for the operator of the pool.
        queued: calls of either priority that wait for a place; `requests` and `batch_requests` include them.
        endpoints: its models that are servers elsewhere.
    """

    requests: int
    sequences: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    waiting: int
    tokens_per_second: float
    step_seconds: dict[str, float]
    shadows: int = 0
    shadows_dropped: int = 0
    log_dropped: int = 0
    cache: CacheStats | None = None
    members: tuple[MemberStats, ...] = ()
    waiting_s: float = 0.0
    prompt_token_s: float = 0.0
    place: str = ""
    batch_requests: int = 0
    audit: AuditStats | None = None
    began: float = 0.0
    now: float = 0.0
    notes: tuple[str, ...] = ()
    queued: int = 0
    endpoints: tuple[EndpointStats, ...] = ()

    def since_s(self, then: float) -> float:
        """How long ago something was, by the replica's own clock, which no other machine's has to agree with.

        Args:
            then: `began`, or when an audit found something; 0.0, unknown, counts as just now.
        """
        return max(self.now - then, 0.0) if then > 0.0 else 0.0
