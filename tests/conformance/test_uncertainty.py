"""Every estimator of uncertainty, on the engine: seeded, alone as in a batch, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from decoding.candidate_report import DOUBTS
from decoding.fakes import ListText
from decoding.model import MEASURES, ModelPool, Request
from decoding.sequence import Sequence
from tests.conformance.parts import ALL_ENTAILMENT, ALL_UNCERTAINTY, VOCAB, example_of
from tests.conformance.test_identity import pool as pool
from tests.conformance.test_identity import prompts
from tests.program_runner import ProgramRunner
from turnout.registry import get_method
from turnout.types import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Texts(ListText):
    """As the pool's, with an encoding: characters by their number."""

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        return [2 + ord(char) % (VOCAB - 2) for char in text]


def params_of(name: str) -> dict[str, Any]:
    part = ALL_UNCERTAINTY[name]
    few = {"samples": 3} if "samples" in part.Params.model_fields else {}
    return {"name": name, **few, **example_of(part).params}


async def told(pool: ModelPool, uncertainty: dict[str, Any], place: int, **params: Any) -> Request:
    info = get_method("abstain")
    request = Request("r", Sequence(prompts(4)[place], SamplingParams(max_tokens=6), place, eos_ids=(1,)))
    async for _ in info.run(request, pool, info.parse({"uncertainty": uncertainty, **params})):
        pass
    for model in pool.models.values():
        model.release(request.sequence)
    return request


@pytest.fixture(autouse=True)
def _encodes(pool: ModelPool) -> None:
    pool.tokenizer = Texts([str(token) for token in range(VOCAB)])
    pool.code_executor = ProgramRunner()


@pytest.mark.parametrize("name", ALL_UNCERTAINTY)
async def test_it_is_measured_and_changes_no_answer(pool: ModelPool, name: str) -> None:
    alone = [await told(pool, params_of(name), place) for place in range(2)]
    together = await asyncio.gather(*(told(pool, params_of(name), place) for place in range(2)))
    for place, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert not [note for note in one.notes if "not measured" in note]
        value = one.extra[MEASURES][name]
        assert math.isfinite(value)
        [doubt] = one.extra[DOUBTS]
        assert doubt.unit
        assert doubt.meaning
        assert doubt.least is None or doubt.least <= value + 1e-6
        assert doubt.greatest is None or value <= doubt.greatest + 1e-6
        assert other.extra[MEASURES][name] == pytest.approx(value, abs=1e-4)
        plain = Sequence(prompts(4)[place], SamplingParams(max_tokens=6), place, eos_ids=(1,))
        await pool.large.decode(plain)
        pool.large.release(plain)
        assert one.sequence.answer == other.sequence.answer == plain.answer
    assert all(model.busy().sequences == 0 for model in pool.models.values())


@pytest.mark.parametrize("name", ALL_UNCERTAINTY)
async def test_above_the_limit_nothing_is_answered(pool: ModelPool, name: str) -> None:
    value = (await told(pool, params_of(name), 0)).extra[MEASURES][name]
    given = await told(pool, params_of(name), 0, abstain_above=value + 0.01, text="")
    held = await told(pool, params_of(name), 0, abstain_above=value - 0.01, text="")
    for request, limit, outcome in ((given, value + 0.01, "kept"), (held, value - 0.01, "abstained")):
        [doubt] = request.extra[DOUBTS]  # settled once, whatever it is measured of
        assert (doubt.part, doubt.limit, doubt.outcome) == (name, limit, outcome)
        assert doubt.value == pytest.approx(value)
    assert given.sequence.answer
    assert held.sequence.answer == []
    assert all(model.busy().sequences == 0 for model in pool.models.values())


@pytest.mark.parametrize("name", ALL_ENTAILMENT)
async def test_every_judge_tells_meanings_apart(pool: ModelPool, name: str) -> None:
    asked = {
        "name": "semantic_entropy",
        "samples": 4,
        "judge": {"name": name, **example_of(ALL_ENTAILMENT[name]).params},
    }
    request = await told(pool, asked, 1)
    assert 1 <= request.extra[MEASURES]["semantic_clusters"] <= 4
    assert all(model.busy().sequences == 0 for model in pool.models.values())
