"""SmartSpec under a load that comes and goes, on real caches: drafts of four tokens, none, and four again."""

from __future__ import annotations

import pytest

from decoding.decode_loop import stream
from decoding.fakes import ListText
from decoding.lengths.base import Round
from decoding.lengths.smartspec import SmartSpecLength, SmartSpecParams
from decoding.model import ModelPool, Request
from decoding.selectors.first import First
from decoding.sequence import Sequence
from decoding.speculation import Arm, Speculation
from engine.model import EngineModel
from tests.engine.harness import twins
from tests.engine.step_times import LinearTime
from training.random_models import llama_config
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

VOCAB, CROWD, MOST = 40, 40, 200
ARRIVES, LEAVES = 60, 130  # lengths of the answer


class Told(SmartSpecLength):
    """Remembers how deep it said to draft."""

    def __init__(self, params: SmartSpecParams) -> None:
        super().__init__(params)
        self.depths: list[int] = []

    def before_round(self, round: Round) -> int:
        self.depths.append(super().before_round(round))
        return self.depths[-1]


def loaded() -> tuple[EngineModel, EngineModel]:
    """Equal weights, so that whatever the draft's cache lacks or has wrong would show as rejections.

    Alone, a level of a draft takes 0.8 s and a verified token 1 s beside 10 s. With forty more sequences on both models
    a level takes 13 s and a token 41 s: five tokens cost 5 * 41 + 10 + 4 * 13 s then, more than five times 41 + 10 s.
    """
    config = llama_config(VOCAB, hidden_size=32, num_hidden_layers=2, pad_token_id=0, eos_token_id=1)
    small, large = (twins(config, seed=4, spread=0.3, block_size=4)[0] for _ in range(2))
    small.step_time = LinearTime(base=0.5, per_token=0.3)  # type: ignore[assignment]
    large.step_time = LinearTime(base=10.0, per_token=1.0)  # type: ignore[assignment]
    return small, large


async def arrive(models: tuple[EngineModel, ...]) -> list[Sequence]:
    """Other requests that both models hold."""
    crowd = [Sequence([2, 3 + index % 30, 5], SamplingParams(), index) for index in range(CROWD)]
    for model in models:
        for seq in crowd:
            await model.extend(seq)
    return crowd


def leave(models: tuple[EngineModel, ...], crowd: list[Sequence]) -> None:
    for model in models:
        for seq in crowd:
            model.release(seq)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
async def test_drafts_are_as_deep_and_as_good_after_a_load_as_before(temperature: float) -> None:
    models = small, large = loaded()
    sampling = SamplingParams(max_tokens=MOST, ignore_eos=True, temperature=temperature)
    plain, seq = (Sequence([3, 5, 8], sampling, 1) for _ in range(2))
    async for _ in stream(large, plain):
        pass
    large.release(plain)
    pool = ModelPool({"s": small, "m": large}, {"small": "s", "large": "m"}, ListText([""] * VOCAB))
    length = Told(SmartSpecParams(acceptance=0.99, most=4, allowance=1.0))
    drafter = PartChoice(name="model_chain").make("decoding.drafters", "drafter")
    judge = PartChoice(name="match").make("decoding.verifiers", "verifier")
    crowd: list[Sequence] = []
    phase = 0
    rounds: list[list[int]] = [[], [], []]
    depths: list[int] = []  # so many were asked for when a phase ended
    async for segment in Speculation(Request("r", seq), pool, [Arm(drafter, length)], First(), judge).run():
        rounds[phase].append(len(segment.tokens))
        if len(seq.generated) >= (ARRIVES, LEAVES, MOST + 1)[phase]:
            depths.append(len(length.depths))
            phase += 1
            if phase == 1:
                crowd = await arrive(models)
            else:
                leave(models, crowd)
    assert seq.tokens == plain.tokens
    asked = [
        set(length.depths[: depths[0]]),
        set(length.depths[depths[0] : depths[1]]),
        set(length.depths[depths[1] :]),
    ]
    assert asked == [{4}, {0}, {4}]
    before, after = (sum(each) / len(each) for each in (rounds[0], rounds[2][:-1]))
    assert before > 4.5
    assert after == pytest.approx(before, rel=0.02)
    for model in models:
        model.release(seq)
        assert model.pool.num_held == 0
