"""What steps take longer for prompts that are read in them is told apart from what their decodes take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.match import MatchVerifier
from engine.model import EngineModel
from tests.engine.harness import twins
from tests.engine.step_times import LinearTime
from training.random_models import llama_config
from turnout.types import SamplingParams

TIMES = LinearTime(base=1.0, per_token=0.1)


@pytest.fixture
async def timed() -> Any:
    """A model whose forwards take what `TIMES` says; the tokens of each operation of every step."""
    model, _ = twins(llama_config(60, hidden_size=32, pad_token_id=0), seed=4, token_budget=8, max_slowdown=100)
    model.batcher.times = TIMES
    steps: list[list[int]] = []
    original, forward = model.batcher._forwards.run, model.batcher.runner.run

    async def run(feeds: Any, *args: Any) -> Any:
        outcomes, _ = await original(feeds, *args)
        return outcomes, TIMES.of(feeds)

    def noted(feeds: Any) -> Any:
        steps.append(sorted(len(feed.tokens) for feed in feeds))
        return forward(feeds)

    model.batcher._forwards.run = run  # type: ignore[method-assign]
    model.batcher.runner.run = noted  # type: ignore[method-assign]
    yield model, steps
    await model.close()


def sequence(*prompt: int, max_tokens: int = 30) -> Sequence:
    return Sequence(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), seed=0)


async def test_a_prompt_read_beside_decodes_counts_what_it_adds(timed: tuple[EngineModel, list[list[int]]]) -> None:
    model, steps = timed
    running = [asyncio.create_task(model.decode(sequence(2, i))) for i in range(3)]
    while len(steps) < 3:
        await asyncio.sleep(0)
    before_s = model.reading_seconds()
    assert before_s == pytest.approx(sum(1.0 + 0.1 * sum(step) for step in steps if max(step) > 1))  # their own prompts
    await model.extend(sequence(*[5] * 20))
    assert [step for step in steps if max(step) > 2] == [[1, 1, 1, 5]] * 4
    assert model.reading_seconds() - before_s == pytest.approx(4 * 0.5)
    await asyncio.gather(*running)
    assert model.reading_seconds() - before_s == pytest.approx(4 * 0.5)  # decodes alone add nothing


async def test_a_draft_is_no_prompt(timed: tuple[EngineModel, list[list[int]]]) -> None:
    model, steps = timed
    seq = sequence(2, 3)
    await model.verify(seq, DraftTree.empty("m"), MatchVerifier())
    seq.extend([next(iter((await model.verify(seq, DraftTree.empty("m"), MatchVerifier())).tokens))], {"m": 1})
    before_s = model.reading_seconds()
    await model.verify(seq, DraftTree.chain([4, 5, 6], "m"), MatchVerifier())
    assert steps[-1] == [4]
    assert model.reading_seconds() == before_s


async def test_a_prompt_read_alone_counts_whole(timed: tuple[EngineModel, list[list[int]]]) -> None:
    model, steps = timed
    await model.extend(sequence(*[5] * 12))
    assert steps == [[8], [4]]
    assert model.reading_seconds() == pytest.approx(2 * 1.0 + 12 * 0.1)
