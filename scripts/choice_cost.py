"""Cost of a choice among many replicas: `python -m scripts.choice_cost`, a JSON object.

Times `PrefixRouter` on replicas that are made up, and reading and writing what replicas say of themselves as Serve's
long poll does.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from deployments.prompt_prefix import DIGEST_BYTES, prefixes, unpacked
from deployments.replica_choice import PrefixRouter
from turnout.calls import GenerateCall
from turnout.types import SamplingParams

FEW, MANY = 8, 1024
ROUNDS = 7
DIGESTS = 512  # as many as `Held` remembers


@dataclass(frozen=True)
class _Id:
    unique_id: str


def measure() -> dict[str, float]:
    """Seconds and bytes.

    Returns:
        base_s, per_replica_s: of a choice: so much, and more for each replica.
        hear_s: for each replica, when it has said something new.
        byte_s: to write one byte of it for one listener.
        stats_bytes: what a replica says.
    """
    few, many = _seconds_of_choice(FEW), _seconds_of_choice(MANY)
    per_replica = (many - few) / (MANY - FEW)
    stats = [_stats(number) for number in range(MANY)]
    blob = pickle.dumps(stats)

    def hear() -> None:
        for each in pickle.loads(blob):
            unpacked(each["held"])

    return {
        "base_s": max(few - FEW * per_replica, 0.0),
        "per_replica_s": per_replica,
        "hear_s": _fastest(hear) / MANY,
        "byte_s": _fastest(lambda: pickle.dumps(stats)) / len(blob),
        "stats_bytes": len(blob) / MANY,
    }


def _seconds_of_choice(count: int) -> float:
    known = [
        SimpleNamespace(replica_id=_Id(str(number)), routing_stats=_stats(number), max_ongoing_requests=336)
        for number in range(count)
    ]
    router: Any = PrefixRouter.__new__(PrefixRouter)
    router._replica_queue_len_cache = SimpleNamespace(get=lambda replica_id: 3)
    router.initialize_state()
    call = GenerateCall("r", "p", SamplingParams(), prompt="All that follows is said of one house. " * 30)
    known[count // 2].routing_stats["held"] = b"".join(digest for _, digest in prefixes(call))
    router._ordered(known, call)  # what has been said is read once
    return _fastest(lambda: router._ordered(known, call))


def _stats(number: int) -> dict[str, Any]:
    held = b"".join((number * DIGESTS + place).to_bytes(DIGEST_BYTES, "big") for place in range(DIGESTS))
    return {"held": held, "call_s": 0.1, "byte_s": 1e-5, "waiting_s": 0.01 * (number % 7), "requests": number % 5}


def _fastest(do: Callable[[], object]) -> float:
    """Of some times."""
    times = []
    for _ in range(ROUNDS):
        start = perf_counter()
        do()
        times.append(perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()) + "\n")
