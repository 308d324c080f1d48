"""Cautious next-token prediction: how many trials, which one is kept, what it costs."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from decoding.fakes import ListText, TableModel, pair
from decoding.methods.cntp import CntpParams
from decoding.model import ReadSpec, Request, StopCondition
from decoding.noise import derive_seed, round_seed
from decoding.rollouts import branches_of
from decoding.sequence import Sequence
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams

TEXTS = ["<end>", "a", "b", " c", ".", "d,", "e"]
END, VOCAB = 0, 7


def model(seed: int, sharp: float = 1.0) -> TableModel:
    """Probabilities depend on the two tokens before."""
    table = torch.randn((VOCAB, VOCAB, VOCAB), generator=torch.Generator().manual_seed(seed)) * sharp
    return TableModel("large", lambda tokens: table[tokens[-2], tokens[-1]], VOCAB)


async def write(made: TableModel, method: str = "cntp", seed: int = 5, params: Any = None, **sampling: Any) -> Any:
    asked = SamplingParams.model_validate({"max_tokens": 16, **sampling})
    seq, info = Sequence([1, 2], asked, seed, (END,)), get_method(method)
    running = info.run(Request("r", seq), pair(made, made, ListText(TEXTS)), info.parse(params or {}))
    segments = [each async for each in running]
    assert [token for each in segments for token in each.tokens] == seq.generated
    assert list(made.cached) == [seq]
    made.release(seq)
    return seq, segments


def test_the_number_of_trials_grows_with_the_entropy() -> None:
    params = CntpParams()
    assert [params.count(entropy) for entropy in (0.005, 0.5, 1.0, 2.0)] == [1, 3, 6, 10]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 4}])
async def test_without_trials_it_is_plain_decoding(sampling: dict[str, Any]) -> None:
    for seed in range(4):
        params = {"trials": 1} if sampling["temperature"] else {}
        plain, _ = await write(model(seed), "plain", **sampling)
        assert (await write(model(seed), params=params, **sampling))[0].tokens == plain.tokens
        sure = {"low": 50.0, "high": 60.0}  # no entropy reaches that: one trial everywhere
        assert (await write(model(seed), params=sure, **sampling))[0].tokens == plain.tokens


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 5}])
@pytest.mark.parametrize("seed", range(4))
async def test_each_place_has_the_likeliest_of_its_trials(seed: int, sampling: dict[str, Any]) -> None:
    """Drawn here one by one, each with its seed, up to its first mark."""
    made, asked = model(seed), SamplingParams.model_validate({"max_tokens": 16, **sampling})
    params, expected = CntpParams(trials=5, high=2.0), Sequence([1, 2], asked, 5, (END,))
    while not expected.finished:
        [row] = await made.extend(expected, want=ReadSpec(draw=None, probs=True))
        assert row.probs is not None
        count = params.count(float(torch.special.entr(row.probs).sum()))
        if count == 1:
            await made.decode(expected, StopCondition(max_tokens=1))
            continue
        found = []
        for index in range(count):
            trial = expected.fork(derive_seed(round_seed(5, len(expected)), index) if index else 5)
            while not trial.finished:
                await made.decode(trial, StopCondition(max_tokens=1))
                if TEXTS[trial.tokens[-1]][-1] in ".,":
                    break
            own = trial.tokens[len(expected) :]
            rows = [
                made.next_logits(trial.tokens[: len(expected) + place]).log_softmax(-1) for place in range(len(own))
            ]
            logp = sum(float(row[token]) for row, token in zip(rows, own, strict=True))
            found.append((math.exp(-logp / len(own)), trial))
            made.release(trial)
        best = min(found, key=lambda each: each[0])[1]
        expected.extend(best.generated[len(expected.generated) :], {"large": 1})
    made.release(expected)
    seq, _ = await write(made, params={"trials": 5, "high": 2.0}, **sampling)
    assert seq.tokens == expected.tokens
    meter = seq.meter.models["large"]
    assert meter.discarded_tokens > 0
    assert meter.generated_tokens == len(seq.generated)


async def test_trials_raise_the_likelihood_of_answers() -> None:
    def mean(seq: Sequence, made: TableModel) -> float:
        rows = [made.next_logits(seq.tokens[: 2 + place]).log_softmax(-1) for place in range(len(seq.generated))]
        return sum(float(row[token]) for row, token in zip(rows, seq.answer, strict=True)) / len(rows)

    made, values, longest = model(9), {"plain": 0.0, "cntp": 0.0}, 0
    for seed in range(20):
        for method in values:
            seq, segments = await write(made, method, seed, max_tokens=24, ignore_eos=True)
            longest = max(longest, *(len(each.tokens) for each in segments)) if method == "cntp" else longest
            values[method] += mean(seq, made)
    assert values["cntp"] > values["plain"] + 20 * 0.2
    assert longest > 1  # trials are kept as a whole


async def test_a_fault_in_one_trial_ends_and_releases_all() -> None:
    made, calls = model(3), []

    def fails(tokens: list[int]) -> torch.Tensor:
        calls.append(tokens)
        if len(calls) > 5:
            raise ZeroDivisionError
        return torch.zeros(VOCAB)

    made.next_logits = fails
    seq, info = Sequence([1, 2], SamplingParams(max_tokens=9), 0), get_method("cntp")
    running = info.run(Request("r", seq), pair(made, made, ListText(TEXTS)), info.parse({"high": 0.5}))
    with pytest.raises(ZeroDivisionError):
        await anext(running)
    assert list(made.cached) == [seq]
    meter = seq.meter.models["large"]
    assert meter.forwards == made.forwards
    assert meter.generated_tokens == 0 < meter.discarded_tokens


async def test_cancelled_while_the_others_end_with_one_that_failed_it_releases_all() -> None:
    made, ending = model(3), asyncio.Event()

    async def decode(fork: Sequence, until: StopCondition) -> None:
        if fork.seed == 1:
            raise ZeroDivisionError
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.Event().wait()

    async def run() -> None:
        with branches_of(seq) as branches:
            await branches.write(made, [seq] * 3, [2, 3, 1], StopCondition(max_tokens=8))
            raise AssertionError("no rollout ends")

    made.decode = decode  # type: ignore[method-assign, assignment]
    seq = Sequence([1, 2], SamplingParams(max_tokens=9), 0)
    task = asyncio.ensure_future(run())
    await ending.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made.cached == {}


async def test_bounds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(TurnoutError, match=r"must be below high, 0\.5") as caught:
        get_method("cntp").parse({"low": 1.0, "high": 0.5})
    assert caught.value.field == "method.params.low"
