"""What a replica tells the cluster about itself: for the number of replicas, and for the choice among them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from deployments.prompt_prefix import BYTES_PER_TOKEN, Held, prefixes
from turnout.calls import GenerateCall, PoolStats

MEMORY_S = 30.0  # busy time after which what was counted weighs 1/e


class ReplicaLoad:
    """Watches the calls of one replica.

    Args:
        stats: what the pool holds now.
        block_size: tokens per block of its models.
        clock: seconds.
    """

    def __init__(
        self, stats: Callable[[], PoolStats], block_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stats = stats
        self._clock = clock
        self._held = Held(_room(stats(), block_size) * BYTES_PER_TOKEN)
        self._active = 0
        self._since = 0.0
        self._unanswered_s = 0.0
        self._busy_s = 0.0  # this and the calls answered in it: both fade with busy time, not with each call, so that
        self._answered = 0.0  # many calls that end at once count as what they are

    def begun(self) -> None:
        """A call has come."""
        if not self._active:
            self._since = self._clock()
        self._active += 1

    def ended(self, call: GenerateCall, answered: bool) -> None:
        """A call has gone; where it was answered, its prompt is cached."""
        now = self._clock()
        self._unanswered_s += now - self._since
        self._since = now
        self._active -= 1
        if not answered:
            return
        self._held.note(prefixes(call))
        took, self._unanswered_s = self._unanswered_s, 0.0
        kept = math.exp(-took / MEMORY_S)
        self._busy_s = kept * self._busy_s + took
        self._answered = kept * self._answered + 1

    def autoscaling(self) -> dict[str, float]:
        """For `deployments.autoscaling.PoolPolicy`: the names are what it reads."""
        stats = self._stats()
        return {
            "requests": float(stats.requests),
            "waiting_s": stats.waiting_s,
            "kv": kv_share(stats),
            "tokens_per_second": stats.tokens_per_second,
        }

    def routing(self) -> dict[str, Any]:
        """For `deployments.replica_choice.PrefixRouter`.

        Returns:
            held: digests of the beginnings of prompts that are cached here, packed.
            call_s: busy time by answered calls, lately: what one call costs this replica, in seconds.
            byte_s: time to compute one byte of a prompt, in seconds.
            waiting_s: time that what waits will take, in seconds.
            requests: calls in progress.
        """
        stats = self._stats()
        return {
            "held": self._held.packed(),
            "call_s": self._busy_s / self._answered if self._answered else 0.0,
            "byte_s": stats.prompt_token_s / BYTES_PER_TOKEN,
            "waiting_s": stats.waiting_s,
            "requests": stats.requests,
        }


def kv_share(stats: PoolStats) -> float:
    """Share of the blocks in use, of the model that has fewest left."""
    shares = [each.used_blocks / each.total_blocks for each in stats.members if each.total_blocks]
    if shares:
        return max(shares)
    return stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0


def _room(stats: PoolStats, block_size: int) -> int:
    """Tokens that the model with the smallest cache has room for."""
    return min((each.total_blocks for each in stats.members), default=stats.total_blocks) * block_size
