"""Large bodies are parsed beside the event loop, and refused alike."""

from __future__ import annotations

import threading

import pytest

from deployments.bodies import LARGE, parsed
from deployments.schemas import completion_job, read_json
from turnout.config import parse_config
from turnout.errors import TurnoutError


def where(_: bytes) -> str:
    return threading.current_thread().name


async def test_only_a_large_body_is_parsed_in_a_thread_of_its_own() -> None:
    here = threading.current_thread().name
    assert await parsed(b"x" * LARGE, where) == here
    assert (await parsed(b"x" * (LARGE + 1), where)).startswith("large bodies")


async def test_what_is_wrong_with_a_large_body_is_said_as_of_a_small_one() -> None:
    for size in (10, LARGE):
        for body in (b'{"prompt": "%s\\ud800"}', b'{"prompt": "%s", "top_p": 2}'):
            with pytest.raises(TurnoutError, match=r"prompt|top_p"):
                await parsed(body % (b"x" * size), lambda data: completion_job(read_json(data)))
    # A whole pair is a character as any other.
    job = await parsed(b'{"prompt": "%s\\ud83d\\ude80"}' % (b"x" * LARGE), lambda data: completion_job(read_json(data)))
    assert str(job.calls[0].prompt).endswith("x\N{ROCKET}")


def test_a_body_has_four_mebibytes_where_nobody_says_otherwise() -> None:
    models = {name: {"path": "none"} for name in ("small", "large")}
    config = parse_config({"models": models, "pools": {"p": {"small": "small", "large": "large"}}})
    assert config.server.max_body_bytes == 4 << 20
