"""Differentiable reading: gradients against finite differences, one-hot tokens against the served model."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from decoding.soft_likelihood import SoftLikelihood, fluency, mixtures
from decoding.soft_matches import match, ngrams, similarity
from engine import soft_likelihood
from engine.costs import limits
from engine.device import Device
from engine.loading import load_checkpoint
from engine.model import EngineModel
from tests.engine.harness import engine_model, until
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.config import EngineConfig, ModelConfig
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

PROMPT, VOCAB = [3, 14, 15, 9, 2], 24


def loaded(folder: Path, **settings: str) -> EngineModel:
    config = ModelConfig(path=str(folder), dtype="float32", kv_memory_bytes=8 << 20, **settings)  # type: ignore[arg-type]
    checkpoint = load_checkpoint(folder, torch.float32, torch.device("cpu"), weights=config.weights)
    return EngineModel("m", checkpoint, config, EngineConfig(block_size=4), Device("cpu"))


@pytest.fixture
async def model(tmp_path: Path) -> AsyncIterator[EngineModel]:
    config = llama_config(VOCAB, eos_token_id=1, pad_token_id=0, max_position_embeddings=64)
    random_model(config, seed=3, spread=0.3).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    made = loaded(tmp_path)
    yield made
    assert not made.soft_readers._users
    await made.close()


def owner(*prompt: int) -> Sequence:
    return Sequence(prompt or PROMPT, SamplingParams(max_tokens=8), 0)


def logits_of(chains: int, length: int) -> torch.Tensor:
    return 2.0 * torch.randn((chains, length, VOCAB), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "op",
    [
        SoftLikelihood(logits_of(2, 3), prediction_weight=0.0),
        SoftLikelihood(logits_of(2, 3), prediction_weight=0.0, top_k=4, uncut=(7, 8)),
        SoftLikelihood(logits_of(2, 3), (4, 5, 6), fluency_weight=0.0),
        SoftLikelihood(logits_of(1, 2), (4,), 0.4, 0.6, 1.0, 5),
    ],
    ids=["fluency", "fluency, cut down", "prediction", "both"],
)
async def test_the_gradient_is_that_of_finite_differences(model: EngineModel, op: SoftLikelihood) -> None:
    seq = owner()

    async def energy(logits: torch.Tensor) -> float:
        scores = await model.do(seq, replace(op, logits=logits))
        return float((op.fluency_weight * scores.fluency + op.prediction_weight * scores.prediction).sum())

    gradient = (await model.do(seq, op)).gradient
    directions = torch.Generator().manual_seed(1)
    for _ in range(3):
        step = torch.randn(op.logits.shape, generator=directions)
        step *= 1e-2 / step.norm()
        moved = (await energy(op.logits + step) - await energy(op.logits - step)) / 2
        assert moved == pytest.approx(float((gradient * step).sum()), rel=2e-2, abs=2e-5)
    assert gradient.abs().max() > 1e-3
    model.release(seq)


async def test_one_hot_tokens_have_the_log_probabilities_of_the_served_model(model: EngineModel) -> None:
    """Fluency of height h at the tokens y: -h times the sum of 1 - p(y); the prediction is a score."""
    seq, tokens, after, height = owner(), (5, 9, 1), (4, 17), 1e4
    logits = height * torch.nn.functional.one_hot(torch.tensor([tokens]), VOCAB).float()
    [score] = await model.score(seq, [tokens + after])
    scores = await model.do(seq, SoftLikelihood(logits, after))
    assert scores.prediction.item() == pytest.approx(sum(score.token_logprobs[3:]), abs=1e-4)
    missing = sum(1 - torch.tensor(logprob).exp() for logprob in score.token_logprobs[:3])
    assert scores.fluency.item() / height == pytest.approx(-float(missing), abs=1e-4)
    model.release(seq)


async def test_the_fluency_is_greatest_where_the_logits_are_the_models(model: EngineModel) -> None:
    """One place: the cross entropy of a distribution with itself is its entropy."""
    seq = owner()
    [row] = await model.extend(seq, want=ReadSpec(draw=None, logits=True, entropy=True))
    own = await model.do(seq, SoftLikelihood(row.logits[None, None]))
    assert own.fluency.item() == pytest.approx(-row.entropy_bits * 0.6931472, abs=1e-4)
    assert own.gradient.abs().max() < 1e-5
    other = await model.do(seq, SoftLikelihood(logits_of(1, 1)))
    assert other.fluency < own.fluency
    model.release(seq)


async def test_chains_are_read_as_each_alone(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seq, logits = owner(), logits_of(3, 4)
    together = await model.do(seq, SoftLikelihood(logits, (2, 3)))
    for chain in range(3):
        alone = await model.do(seq, SoftLikelihood(logits[chain : chain + 1], (2, 3)))
        assert torch.allclose(alone.gradient[0], together.gradient[chain], atol=1e-4)
        assert alone.prediction.item() == pytest.approx(together.prediction[chain].item(), abs=1e-3)
    assert seq.meter.models["m"].forwards == 4
    monkeypatch.setattr(soft_likelihood, "MOST_AT_ONCE", 22)  # of 11 tokens each: two chains, then the third
    parted = await model.do(seq, SoftLikelihood(logits, (2, 3)))
    assert seq.meter.models["m"].forwards == 6
    for name in ("fluency", "prediction", "gradient"):
        assert torch.allclose(getattr(parted, name), getattr(together, name), atol=1e-4), name
    assert seq.meter.models["m"].draft_tokens == (3 + 3 + 3) * 11
    model.release(seq)


async def test_weights_are_read_once_for_requests_that_follow_each_other(
    model: EngineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, real = [], soft_likelihood._load
    monkeypatch.setattr(soft_likelihood, "_load", lambda served: (loads.append(1), real(served))[-1])
    op = SoftLikelihood(logits_of(1, 1))
    first, second, third = owner(), owner(1, 2), owner(3)
    await asyncio.gather(*(model.do(seq, op) for seq in (first, second, first)))
    for seq in (first, second):
        model.release(seq)
    await model.do(third, op)
    assert len(loads) == 1
    reader = weakref.ref(model.soft_readers.reader)
    assert limits._claims[reader()] == {"cpu": 4 * model.num_parameters}
    model.release(third)
    model.soft_readers._expire()  # the time is over
    assert model.soft_readers.reader is None
    gc.collect()  # of what the test asked at once
    await until(lambda: reader() is None)  # the thread lets go of its work
    await model.do(first, op)
    assert len(loads) == 2
    model.soft_readers._expire()
    assert model.soft_readers.reader is not None  # it has a user
    model.release(first)


async def test_cancelled_requests_do_not_read_the_weights_at_once_each(
    model: EngineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, go_on, real = [], threading.Event(), soft_likelihood._load
    monkeypatch.setattr(soft_likelihood, "_load", lambda served: (loads.append(1), go_on.wait(60), real(served))[-1])
    for _ in range(3):
        given_up = owner()
        asked = asyncio.create_task(model.do(given_up, SoftLikelihood(logits_of(1, 1))))
        await until(lambda: bool(loads))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        model.release(given_up)
    last = owner()
    asked = asyncio.create_task(model.do(last, SoftLikelihood(logits_of(1, 1))))
    go_on.set()
    assert (await asked).gradient.shape == (1, 1, VOCAB)
    assert len(loads) == 1
    model.release(last)


async def test_a_load_that_failed_is_tried_again(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seq, op = owner(), SoftLikelihood(logits_of(1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(soft_likelihood, "read_model", lambda *given, **options: 1 / 0)
        with pytest.raises(TurnoutError, match="cannot be read: ZeroDivisionError"):
            await model.do(seq, op)
        assert model.soft_readers.reader is None
    await model.do(seq, op)
    model.release(seq)


async def test_a_closed_model_keeps_no_weights(model: EngineModel) -> None:
    seq = owner()
    await model.do(seq, SoftLikelihood(logits_of(1, 1)))
    model.release(seq)
    model.soft_readers.close()
    assert model.soft_readers.reader is None


async def test_gradients_for_which_there_is_no_memory_are_refused(
    model: EngineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention keeps a square of numbers for the way back: 4 * 2 layers * 2 * 4 heads * 9**2 numbers, and more."""
    seq, op = owner(), SoftLikelihood(logits_of(2, 4))
    await model.do(seq, op)
    reader = model.soft_readers.reader
    assert reader is not None
    needed = reader.bytes_needed(9, op)
    layers = 2 * (12 * 64 + 4 * 128 + 2 * 4 * 9)
    assert needed == 4 * 2 * (9 * (layers + 3 * VOCAB) + 10 * 4 * VOCAB)
    monkeypatch.setattr(soft_likelihood, "available_memory", lambda device: needed - 1)
    with pytest.raises(TurnoutError, match="no memory for gradients through 2 times 9 tokens") as refused:
        await model.do(seq, op)
    assert refused.value.code is Code.RESOURCE_EXHAUSTED
    model.release(seq)


async def test_what_cannot_be_differentiated_is_refused_by_name(
    model: EngineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq, op = owner(), SoftLikelihood(logits_of(1, 2))
    with pytest.raises(ValueError, match="5 columns, but the vocabulary has 24"):
        await model.do(seq, SoftLikelihood(torch.zeros(1, 1, 5)))
    with pytest.raises(ValueError, match=r"\[chains, length, vocabulary\]"):
        SoftLikelihood(torch.zeros(1, VOCAB))
    with pytest.raises(TurnoutError, match=r"66 tokens .* has room for 64") as refused:
        await model.do(seq, replace(op, after=(1,) * 59))
    assert (refused.value.code, refused.value.field) == (Code.OUT_OF_RANGE, "method")
    with monkeypatch.context() as patch:
        patch.setattr(soft_likelihood, "available_memory", lambda device: 0)
        with pytest.raises(TurnoutError, match="no memory for the weights of 'm'") as refused:
            await model.do(seq, op)
        assert refused.value.code is Code.RESOURCE_EXHAUSTED
    with monkeypatch.context() as patch:
        patch.setattr(model.batcher.runner.plan, "ranks", 2)
        with pytest.raises(TurnoutError, match="'m' is split over 2 processes, and cannot be differentiated"):
            await model.do(seq, op)
    with monkeypatch.context() as patch:
        patch.setattr(model, "weights", "int8")
        with pytest.raises(TurnoutError, match="'m' keeps its weights as int8, which cannot be differentiated"):
            await model.do(seq, op)
    model.release(seq)
    unnamed = engine_model(random_model(llama_config(VOCAB, eos_token_id=1, pad_token_id=0), 0))
    with pytest.raises(TurnoutError) as refused:
        await unnamed.do(owner(), op)
    assert refused.value.code in {Code.INVALID_ARGUMENT, Code.NOT_FOUND}
    await unnamed.close()


def test_mixtures_below_temperature_1_have_the_gradient_of_temperature_1() -> None:
    logits = torch.tensor([0.5, 1.0, 0.9], requires_grad=True)
    weights = torch.tensor([1.0, -2.0, 3.0])
    [straight] = torch.autograd.grad((mixtures(logits, 0.001) * weights).sum(), logits)
    [exact] = torch.autograd.grad((mixtures(logits, 1.0) * weights).sum(), logits)
    assert torch.allclose(straight, exact)
    assert torch.allclose(mixtures(logits, 0.001), torch.tensor([0.0, 1.0, 0.0]))
    assert torch.allclose(mixtures(logits, 1.0), logits.softmax(-1))


def test_energies_are_those_computed_by_hand() -> None:
    predicted, logits = torch.tensor([[[0.6, 0.3, 0.1]]]).log(), torch.tensor([[[0.5, 0.25, 0.25]]]).log()
    by_hand = 0.6 * torch.tensor(0.5).log() + 0.4 * torch.tensor(0.25).log()
    assert fluency(predicted, logits).item() == pytest.approx(by_hand.item())
    cut = (2 * torch.tensor(0.5).log() + torch.tensor(0.25).log()) / 3  # 0.6 and 0.3, renormalised
    assert fluency(predicted, logits, 2).item() == pytest.approx(cut.item())
    assert fluency(predicted, logits, 1, (1,)).item() == pytest.approx(cut.item())
    # Two places; token 0 has 1/2 and 1/4, token 1 has 1/4 and 1/2.
    logp = torch.tensor([[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]]).log()
    half, quarter = torch.tensor(0.5).log(), torch.tensor(0.25).log()
    single = (2 * half + quarter) / 3  # the softmax of log-probabilities are their shares
    assert match(logp, [(0,)]).item() == pytest.approx(single.item())
    assert match(logp, [(0, 1)]).item() == pytest.approx(half.item())
    assert match(logp, [(0, 1, 2)]).item() == 0.0
    scores = torch.stack([half, quarter, half])  # token 0 in either place, or the pair
    assert match(logp, [(0,), (0, 1)]).item() == pytest.approx((scores.softmax(0) * scores).sum().item())
    assert similarity(logp, [(0,), (0, 1), (0, 1, 2)]).item() == pytest.approx((single + half).item() / 2)
    assert similarity(logp, []).item() == 0.0
    assert ngrams((1, 2, 1, 2), (1, 2)) == ((1,), (2,), (1, 2), (2, 1))


def test_matches_have_the_gradient_of_finite_differences() -> None:
    logits = logits_of(1, 4).double().requires_grad_()
    forms, grams = [(3, 4), (4,)], [(1, 2), (2,), (5,)]

    def energy(values: torch.Tensor) -> torch.Tensor:
        logp = values.log_softmax(-1)
        return (match(logp, forms) + similarity(logp, grams)).sum()

    assert torch.autograd.gradcheck(energy, logits, atol=1e-6)
