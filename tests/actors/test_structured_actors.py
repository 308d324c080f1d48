"""Structures over models behind the wire: each actor makes its own constraint, and the answers are the same."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from pool.local_pool import LocalPool
from tests.actors.hosts import RemotePool
from tests.actors.test_remote_methods import told
from tests.constrained import random_schema
from tests.engine.harness import ask
from turnout.structure import Structure
from turnout.types import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMAS = 20
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("plain", {}, 1),
    ("speculative", {"length": "fixed"}, 1),
    ("plain", {}, 2),
    ("speculative", {"drafter": "copyspec", "length": "fixed"}, 1),
]


@pytest.mark.parametrize("count", [4, pytest.param(SCHEMAS, marks=pytest.mark.exactness)])
async def test_answers_are_those_of_one_process(pools: tuple[LocalPool, RemotePool], count: int) -> None:
    """Lossless methods say what plain decoding says, and finished answers validate."""
    draw, finished = random.Random(5), 0
    for place in range(count):
        made, plain = random_schema(draw), ""
        structure = Structure.model_validate({"json_schema": made})
        options = {"max_tokens": 60, "temperature": 0.9, "seed": place, "structure": structure}
        for method, params, n in CASES:
            expected, got = [await ask(pool, "x:", method, params, n=n, **options) for pool in pools]  # type: ignore[arg-type]
            assert told(got) == told(expected)
            plain = plain or got.text
            assert got.texts[0] == plain
            for text, reason in zip(got.texts, got.reasons, strict=True):
                if reason is FinishReason.STOP:
                    jsonschema.validate(json.loads(text), made)
                    finished += 1
    assert finished >= count
    await pools[1].settle()
    pools[1].assert_idle()
