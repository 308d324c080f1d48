"""Choices from given logits: they are the engine's own draws, whatever they are read together with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from decoding.model import NoiseKind, Readout, ReadSpec
from decoding.operations import Choose
from decoding.readout import read
from decoding.sequence import Sequence
from engine.model import EngineModel
from tests.engine.harness import engine_model, random_prompts
from training.random_models import llama_config, random_model
from turnout.types import SamplingParams, Token

# One loop for all: the model's locks belong to it.
pytestmark = pytest.mark.asyncio(loop_scope="module")

ALL = ReadSpec(entropy=True, logprob=True, top=3, probs=True, logits=True, margin=True)
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.9, top_k=5, top_p=0.8),
    SamplingParams(temperature=1.1, min_p=0.05, presence_penalty=0.7, logit_bias={7: 3.0}),
]


@pytest.fixture(scope="module")
def model() -> EngineModel:
    return engine_model(random_model(llama_config(num_hidden_layers=2), seed=5, spread=0.2))


def sequences() -> list[Sequence]:
    """One for each way of sampling, some way into their answers."""
    made = []
    for number, (prompt, sampling) in enumerate(zip(random_prompts(5, 20), SAMPLINGS, strict=True)):
        seq = Sequence(prompt, sampling.model_copy(update={"max_tokens": 50}), seed=number)
        for token in (3, 7, 3):
            seq.append(Token(token, "m"))
        made.append(seq)
    return made


def assert_same(got: list[Readout], expected: list[Readout]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.token, mine.top, mine.margin) == (theirs.token, theirs.top, theirs.margin)
        assert (mine.entropy_bits, mine.logprob) == (theirs.entropy_bits, theirs.logprob)
        assert mine.probs is not None
        assert theirs.probs is not None
        assert torch.equal(mine.probs, theirs.probs)


def logits_of(rows: list[Readout]) -> torch.Tensor:
    return torch.stack([row.logits for row in rows if row.logits is not None])


@pytest.mark.parametrize("draw", NoiseKind)
async def test_from_the_models_own_logits_come_its_own_draws(model: EngineModel, draw: NoiseKind) -> None:
    """After the sequence, and after each of some hypothetical tokens."""
    path, want = (9, 4, 4), ReadSpec(draw) | ALL
    for seq in sequences():
        expected = await model.extend(seq, path, want, every=True)
        before = (len(seq), seq.meter.of("m", model.num_parameters).forwards)
        got = await model.choose(seq, logits_of(expected), [path[:end] for end in range(4)], want)
        assert_same(got, expected)
        assert (len(seq), seq.meter.of("m", model.num_parameters).forwards) == before
        model.release(seq)


@pytest.fixture
def readouts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each readout."""
    sizes: list[int] = []

    def counted(logits: torch.Tensor, *args: Any) -> list[Readout]:
        sizes.append(len(logits))
        return read(logits, *args)

    monkeypatch.setattr("engine.choices.read", counted)
    return sizes


async def test_choices_that_wait_together_are_read_together(model: EngineModel, readouts: list[int]) -> None:
    seqs = sequences()
    logits = torch.randn(len(seqs), 2, model.vocab_size, generator=torch.Generator().manual_seed(1))
    alone = [await model.choose(seq, each, [(), (5,)], ALL) for seq, each in zip(seqs, logits, strict=True)]
    readouts.clear()
    async with model.batcher.device.turn:
        asked = [
            asyncio.ensure_future(model.choose(seq, each, [(), (5,)], ALL))
            for seq, each in zip(seqs, logits, strict=True)
        ]
        await asyncio.sleep(0)
    for got, expected in zip(await asyncio.gather(*asked), alone, strict=True):
        assert_same(got, expected)
    assert readouts == [2 * len(seqs)]


async def test_who_gives_up_takes_nobody_along(model: EngineModel) -> None:
    first, second = sequences()[:2]
    logits = torch.zeros(1, model.vocab_size)
    async with model.batcher.device.turn:
        asked = [asyncio.ensure_future(model.choose(seq, logits, [()], ReadSpec())) for seq in (first, second)]
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while not model.batcher.device.turn.locked():
            await asyncio.sleep(0)
    asked[0].cancel()
    [row] = await asked[1]
    assert row.token == (await model.choose(second, logits, [()], ReadSpec()))[0].token
    assert (await asyncio.gather(asked[0], return_exceptions=True))[0].__class__ is asyncio.CancelledError


async def test_what_cannot_be_read_fails_alone(
    model: EngineModel, readouts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, other = sequences()[2:5]
    logits = torch.zeros(1, model.vocab_size)
    counted = read

    def faulty(logits: torch.Tensor, histories: list[Any], wants: list[ReadSpec]) -> list[Readout]:
        if any(history.seq is bad for history in histories):
            raise RuntimeError("planted")
        return counted(logits, histories, wants)

    monkeypatch.setattr("engine.choices.read", faulty)
    async with model.batcher.device.turn:
        asked = [asyncio.ensure_future(model.choose(seq, logits, [()], ReadSpec())) for seq in (good, bad, other)]
        await asyncio.sleep(0)
    first, failed, last = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(failed, RuntimeError)
    for seq, got in ((good, first), (other, last)):
        assert not isinstance(got, BaseException)
        assert got[0].token == (await model.choose(seq, logits, [()], ReadSpec()))[0].token


async def test_logits_of_another_shape_are_refused(model: EngineModel) -> None:
    seq = sequences()[0]
    assert await model.choose(seq, torch.zeros(0, model.vocab_size), [], ReadSpec()) == []
    with pytest.raises(ValueError, match=r"\[2, 8\], but \[1, vocabulary\]"):
        Choose(torch.zeros(2, 8), [()], ReadSpec())
    with pytest.raises(ValueError, match="8 columns, but the vocabulary has"):
        await model.choose(seq, torch.zeros(1, 8), [()], ReadSpec())


async def test_many_twins_are_as_if_forked_one_by_one(model: EngineModel) -> None:
    first, second = sequences()[2:4]
    for seq in (first, second):
        await model.extend(seq)
    twins = model.fork_many([second, first, second])
    assert [twin.tokens for twin in twins] == [second.tokens, first.tokens, second.tokens]
    for twin, seq in zip(twins, (second, first, second), strict=True):
        forwards = twin.meter.of("m", model.num_parameters).forwards
        [row] = await model.extend(twin, want=ALL)
        assert row.token == (await model.extend(seq, want=ALL))[0].token
        assert twin.meter.of("m", model.num_parameters).forwards == forwards + 1
    for seq in (first, second, *twins):
        model.release(seq)
    assert not model.batcher.tables
