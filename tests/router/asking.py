"""Requests to route, without any model."""

from __future__ import annotations

from typing import Any

from decoding.model import ModelPool, Request
from decoding.sequence import Sequence
from router.base import Asked
from turnout.types import RouteLimits, SamplingParams

NO_MODELS = ModelPool({}, {}, None)  # type: ignore[arg-type]


def asked(text: str = "question", **given: Any) -> Asked:
    """A request; `tokens` is the prompt's length, `max_tokens` the answer's, and limits go by their names."""
    limits = {name: given.pop(name) for name in ("max_cost", "max_latency_s", "quality") if name in given}
    sampling = SamplingParams(max_tokens=given.pop("max_tokens", 100))
    sequence = Sequence([1] * given.pop("tokens", 5), sampling, seed=0)
    known = {"id": "r1", "tenant": "default", "session": "", **given}
    request = Request(known["id"], sequence, known["tenant"])
    return Asked(request, "pool", known["tenant"], known["session"], text, RouteLimits(**limits))
