"""What a request gives its models to read besides its prompt counts against the rate of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.access.admission import estimated_tokens
from tests.deployments.access.test_admission import call, finish
from tests.deployments.access.test_admission import make as make
from turnout.calls import Begun
from turnout.part_choice import PartChoice


def test_streams_of_a_contrast_are_charged_as_prompts_are(make: Any) -> None:
    desk = make(tokens_per_minute=100)

    def left() -> float:
        found: float = desk.admission.left("a", desk.callers.limits("a"))["tokens_per_minute"]
        return found

    lease = desk.admit(context="x" * 20, contrast=PartChoice.of("cfg", negative_prompt="x" * 80))
    assert left() == pytest.approx(100 - 10 - 5 - 20)
    lease.served((Begun(16, 21),))
    assert left() == pytest.approx(100 - 16 - 21)
    finish(lease, prompt=16, completion=3)
    assert left() == pytest.approx(100 - 16 - 21 - 3)


def test_a_context_is_estimated() -> None:
    assert estimated_tokens(call("a", prompt=(1, 2, 3), context="x" * 9)) == 3 + 3
