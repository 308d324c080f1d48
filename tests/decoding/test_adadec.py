"""AdaDec: where there is a pause, which token is kept in it, what it costs, and how its threshold is calibrated."""

from __future__ import annotations

import math
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding.fakes import ListText, TableModel, pair
from decoding.model import Request
from decoding.sequence import Sequence
from tests.training.test_knob_calibration import bench, questions
from training.knob_calibration import Calibrator, Target
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams

VOCAB = 12
TEXTS = ["<end>", "a", "b", "\n", *"cdefghij"]
END, A, B, LINE = range(4)


def table(seed: int, name: str = "large") -> TableModel:
    rows = torch.randn((VOCAB, VOCAB, VOCAB), generator=torch.Generator().manual_seed(seed)) * 2.0
    return TableModel(name, lambda tokens: rows[tokens[-2], tokens[-1]], VOCAB)


def spread(token: int, logp: float) -> torch.Tensor:
    """One token of a log-probability, the others alike."""
    probs = torch.full((VOCAB,), (1 - math.exp(logp)) / (VOCAB - 1))
    probs[token] = math.exp(logp)
    return probs


def tree(line: bool = False) -> TableModel:
    """`a` has log-probability -0.7, then tokens of -2; `b` has -0.8, then tokens of -0.1, or the line's end first."""

    def logits(tokens: list[int]) -> torch.Tensor:
        probs = torch.full((VOCAB,), 1e-9)
        if A in tokens[2:]:
            probs = spread(5, -2.0)
        elif B in tokens[2:]:
            probs = spread(LINE if line and tokens[-1] == B else 6, -0.1 if not line or tokens[-1] == B else -2.4)
        elif 7 in tokens[2:]:
            probs = spread(8, -2.3)
        elif len(tokens) == 2:
            probs[A], probs[B] = math.exp(-0.7), math.exp(-0.8)
            probs[7] = 1 - float(probs[A] + probs[B])
        return probs.log()

    return TableModel("large", logits, VOCAB)


async def write(
    made: TableModel, method: str = "adadec", seed: int = 5, begun: Any = (), small: Any = None, **params: Any
) -> Sequence:
    sampling = SamplingParams.model_validate({"max_tokens": 16, "temperature": 0.0, **params.pop("sampling", {})})
    seq, info = Sequence([1, 2], sampling, seed, (END,)), get_method(method)
    for token in begun:
        seq.append_plain([token], "large", 1)
    request = Request("r", seq)
    running = info.run(request, pair(small or made, made, ListText(TEXTS)), info.parse(params))
    segments = [each async for each in running]
    assert [token for each in segments for token in each.tokens] == seq.generated[len(begun) :]
    assert list(made.cached) == [seq]
    assert small is None or list(small.cached) in ([], [seq])
    made.release(seq)
    if method == "adadec":
        assert seq.meter.models["large"].generated_tokens == len(seq.generated)
    return seq


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 5}])
@pytest.mark.parametrize("never", [{"threshold": 64.0}, {"look_ahead": 0}, {"candidates": 1, "threshold": -1.0}])
async def test_without_a_pause_it_is_plain_decoding(never: dict[str, Any], sampling: dict[str, Any]) -> None:
    for seed in range(3):
        plain = await write(table(seed), "plain", sampling=sampling)
        mine = await write(table(seed), **never, sampling=sampling)
        assert mine.tokens == plain.tokens
        assert mine.meter.models["large"].forwards == plain.meter.models["large"].forwards


async def first(**params: Any) -> tuple[int, int]:
    """The first token, and the forwards that it took."""
    made, info = tree(params.pop("line", False)), get_method("adadec")
    seq = Sequence([1, 2], SamplingParams(max_tokens=16, temperature=0.0), 0, (END,))
    async with aclosing(info.run(Request("r", seq), pair(made, made, ListText(TEXTS)), info.parse(params))) as segments:  # type: ignore[type-var]
        async for segment in segments:
            return segment.tokens[0].id, made.forwards
    raise AssertionError("no token came")


async def test_the_tree_by_hand() -> None:
    """Scores (-0.7 - 4 * 2) / 5 = -1.74 and (-0.8 - 4 * 0.1) / 5 = -0.24: b, which is not the best token."""
    options: dict[str, Any] = {"threshold": 1.0, "separators": [], "look_ahead": 4}
    assert await first(**options) == (B, 1 + 3 * 4)
    assert await first(**options, candidates=2) == (B, 1 + 2 * 4)
    assert await first(**options, candidates=1) == (A, 1)
    assert await first(**{**options, "threshold": 1.5}) == (A, 1)  # the entropy is 1.25 bits
    assert await first(**{**options, "look_ahead": 0}) == (A, 1)


async def test_a_look_ahead_that_ends_with_the_line_is_divided_by_its_own_length() -> None:
    """With the line's end behind it, b has (-0.8 - 0.1) / 2 = -0.45; with three tokens of -2.4 more, -1.62.

    The line's end takes one token, so that the fewest forwards show where looking ahead has ended.
    """
    options: dict[str, Any] = {"threshold": 1.0, "look_ahead": 4, "line": True}
    assert await first(**options, separators=["\n"]) == (B, 1 + 4 + 1 + 4)
    assert await first(**options, separators=[]) == (B, 1 + 3 * 4)
    assert await first(**options, separators=["b"]) == (B, 1 + 4 + 4)  # b itself ends it: -0.8
    assert await first(**{**options, "look_ahead": 1}, separators=["\n"]) == (B, 1 + 3)


@pytest.mark.parametrize(("begun", "kept"), [(4, LINE), (LINE, A)])
@pytest.mark.parametrize("resumed", [False, True])
async def test_a_line_that_began_before_the_pause_ends_with_a_candidate(begun: int, kept: int, resumed: bool) -> None:
    """The line's end has -0.8, and -2 for each token of the next line; a has -0.7 and -1: (-0.7 - 4) / 5 = -0.94.

    Where no line has begun, there is none to end: (-0.8 - 4 * 2) / 5 = -1.76.
    """

    def logits(tokens: list[int]) -> torch.Tensor:
        probs = torch.full((VOCAB,), 1e-9)
        if len(tokens) == 2:
            probs[begun] = 1.0
        elif len(tokens) == 3:
            probs[A], probs[LINE] = math.exp(-0.7), math.exp(-0.8)
            probs[7] = 1 - float(probs[A] + probs[LINE])
        else:
            probs = spread(5, -2.0 if tokens[3] == LINE else -1.0 if tokens[3] == A else -3.0)
        return probs.log()

    given = [begun] if resumed else []
    seq = await write(
        TableModel("large", logits, VOCAB), threshold=1.0, look_ahead=4, sampling={"max_tokens": 9}, begun=given
    )
    assert seq.tokens[2:4] == [begun, kept]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("look_ahead", [1, 3])
async def test_each_pause_keeps_the_best_mean_found_by_hand_and_costs_its_look_ahead(
    seed: int, look_ahead: int
) -> None:
    made, expected, pauses, cost = table(seed), [1, 2], 0, 0
    bits, steps = 2.0, 0
    while len(expected) < 18 and expected[-1] != END:
        logp = made.next_logits(expected).log_softmax(-1)
        entropy = float(torch.special.entr(logp.exp()).sum()) / math.log(2)
        steps += 1
        best = logp.topk(3)
        scores = []
        for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            path, total = [*expected, token], [value]
            while len(total) <= look_ahead and path[-1] != END and len(path) < 18:
                row = made.next_logits(path).log_softmax(-1)
                path.append(int(row.argmax()))
                total.append(float(row.max()))
            scores.append((sum(total) / len(total), token, len(total) - 1))
        if entropy >= bits:
            pauses += 1
            cost += sum(length for *_, length in scores)
            expected.append(max(scores)[1])
        else:
            expected.append(int(logp.argmax()))
    seq = await write(made, threshold=bits, look_ahead=look_ahead, separators=[])
    assert seq.tokens == expected
    assert pauses
    meter = seq.meter.models["large"]
    assert meter.forwards == steps + cost
    assert meter.discarded_tokens == cost


async def test_the_small_model_looks_ahead_where_it_is_to() -> None:
    made, small = tree(), table(1, "small")
    seq = await write(made, threshold=-1.0, small=small, roller="small", sampling={"max_tokens": 2})
    assert {token.source for token in seq.generated} == {"large"}
    meters = seq.meter.models
    assert meters["large"].forwards == 2
    assert meters["small"].forwards == small.forwards > 0
    assert meters["small"].generated_tokens == 0
    assert meters["small"].discarded_tokens > 0
    assert meters["small"].prompt_tokens == 2  # once, not for each look ahead of each pause


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "logprobs": 2}])
async def test_an_answer_that_is_gone_on_with_is_the_same(sampling: dict[str, Any]) -> None:
    whole = await write(table(7), threshold=2.0, sampling=sampling)
    for cut in (1, len(whole.answer) // 2, len(whole.answer) - 1):
        again = await write(table(7), threshold=2.0, sampling=sampling, begun=whole.answer[:cut])
        assert again.tokens == whole.tokens
        for mine, theirs in zip(again.generated[cut:], whole.generated[cut:], strict=True):
            assert mine.logprob == (None if theirs.logprob is None else pytest.approx(theirs.logprob, abs=1e-5))
            assert len(mine.top) == sampling.get("logprobs", 0)


async def test_a_fault_while_looking_ahead_releases_all() -> None:
    made = table(1)
    whole = made.next_logits

    def fails(tokens: list[int]) -> torch.Tensor:
        if len(tokens) == 4:
            raise ZeroDivisionError
        return whole(tokens)

    made.next_logits = fails
    seq, info = Sequence([1, 2], SamplingParams(max_tokens=9), 0), get_method("adadec")
    with pytest.raises(ZeroDivisionError):
        async for _ in info.run(
            Request("r", seq), pair(made, made, ListText(TEXTS)), info.parse({"threshold": -1.0, "separators": []})
        ):
            pass
    assert list(made.cached) == [seq]
    assert seq.meter.models["large"].forwards == made.forwards


async def test_its_threshold_is_calibrated_to_a_share_of_the_large_model() -> None:
    """The small model answers, the large one looks ahead: as in `turnout calibrate adadec --param model=small ...`."""
    short = replace(bench(), sampling=SamplingParams(max_tokens=6, temperature=0.0))
    fixed = {"model": "small", "roller": "large", "candidates": 2, "look_ahead": 1, "separators": []}
    found = (await Calibrator(short, questions(0, 24), "adadec", fixed, 3).measure(Target(large_share=0.5))).calibration
    shares = [point.large_share.value for point in found.points]
    thresholds = [point.value for point in found.points]
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert thresholds == sorted(thresholds, reverse=True)  # pauses become fewer as it rises
    setting = {**fixed, "threshold": found.setting(found.chosen)}
    run = await short.run(questions(0, 24).questions, "adadec", setting)
    assert 0.0 < run.large_share < shares[-1]  # of a few entropies, which a chain has, a share is one of a few
    assert shares[-1] > 1.5  # two tokens a pause


@pytest.mark.parametrize(
    ("name", "value"), [("threshold", math.nan), ("threshold", 65.0), ("candidates", 0), ("look_ahead", -1)]
)
async def test_bad_parameters_are_refused(name: str, value: float) -> None:
    with pytest.raises(TurnoutError) as caught:
        get_method("adadec").parse({name: value})
    assert caught.value.field == f"method.params.{name}"
