"""Requests and tokens by a server's metrics, next to what a tool counted."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

METRICS = {
    "requests": "turnout_requests_total",
    "prompt": "turnout_prompt_tokens_total",
    "output": "turnout_completion_tokens_total",
}
COUNTED_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests answered, and tokens of their prompts and answers."""

    requests: int
    prompt: int
    output: int


def counters(url: str, model: str) -> Counter[str]:
    """Return the counters of a model's requests, summed over all other labels."""
    found: Counter[str] = Counter()
    text = httpx.get(f"{url}/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("model") == model:
                found[sample.name] += int(sample.value)
    return found


def counted_since(url: str, model: str, before: Counter[str], expected: Counts) -> Counts:
    """Return what the server counted since, whatever the outcome; as soon as it is what is expected.

    A request is counted just after the client has its end.
    """
    until = time.monotonic() + COUNTED_WITHIN_S
    while True:
        now = counters(url, model)
        risen = Counts(**{name: now[metric] - before[metric] for name, metric in METRICS.items()})
        if risen == expected or time.monotonic() > until:
            return risen
        time.sleep(0.1)
