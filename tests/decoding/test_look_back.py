"""Look-back decoding: when a step repeats, which token follows then, and what that costs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel, markov, pair
from decoding.methods.look_back import Distributions
from decoding.model import Request
from decoding.sequence import Sequence
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams

VOCAB = 6


def chain(seed: int, sharp: float = 2.0) -> TableModel:
    logits = torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(seed)) * sharp
    return TableModel("large", markov(logits.softmax(-1)), VOCAB)


async def write(
    made: TableModel, method: str = "look_back", seed: int = 5, begun: list[int] | None = None, **params: Any
) -> Sequence:
    sampling = SamplingParams.model_validate({"max_tokens": 24, "temperature": 0.0, **params.pop("sampling", {})})
    seq, info = Sequence([1, 2, 3], sampling, seed), get_method(method)
    for token in begun or ():
        seq.append_plain([token], "large", 1)
    running = info.run(Request("r", seq), pair(made, made), info.parse(params))
    segments = [each async for each in running]
    assert [token for each in segments for token in each.tokens] == seq.generated[len(begun or ()) :]
    assert list(made.cached) == [seq]
    made.release(seq)
    return seq


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p.exp() * (p - q)).sum())


@pytest.mark.parametrize("seed", range(4))
async def test_where_nothing_repeats_it_is_greedy(seed: int) -> None:
    plain = await write(chain(seed), "plain")
    assert (await write(chain(seed), alpha=-1.0)).tokens == plain.tokens
    assert (await write(chain(seed), alpha=1000.0, candidates=1)).tokens == plain.tokens


def test_the_nearest_of_those_kept_is_that_of_all_pairs() -> None:
    rows = torch.randn((40, VOCAB), generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    for most in (1, 3, 16, 17, 100):
        kept = Distributions(most)
        assert kept.nearest(rows[0]) == math.inf
        for place, row in enumerate(rows):
            if place:
                expected = min(divergence(row, rows[each]) for each in range(max(place - most, 0), place))
                assert kept.nearest(row) == pytest.approx(expected, abs=1e-6)
            kept.add(row)
            assert kept.nearest(row) == pytest.approx(0.0, abs=1e-6)


def test_what_one_excludes_and_the_other_does_not_is_infinitely_far() -> None:
    kept, half = Distributions(4), torch.tensor([0.5, 0.5, 0.0]).log()
    kept.add(half)
    assert kept.nearest(half) == 0.0
    assert kept.nearest(torch.tensor([1.0, 0.0, 0.0]).log()) == pytest.approx(math.log(2))
    assert kept.nearest(torch.tensor([0.0, 0.0, 1.0]).log()) == math.inf


async def test_a_repeated_context_always_looks_ahead_and_one_forward_reads_all_candidates() -> None:
    """In a chain, the distribution is that of the last token: a token that comes again repeats a step, exactly."""
    for seed in range(4):
        made, seen, repeats = chain(seed), set(), 0
        seq = await write(made, alpha=1e-6, candidates=3)
        for last in seq.tokens[2:-1]:
            repeats += last in seen
            seen.add(last)
        assert repeats
        meter = seq.meter.models["large"]
        # One forward a step and one a repetition, and the prompt's distributions once.
        assert meter.forwards == 24 + repeats + 1
        assert meter.draft_tokens == 3 * repeats + 2
        assert meter.generated_tokens == 24


async def test_the_token_is_drawn_by_how_near_the_prompts_the_next_distribution_is() -> None:
    """The law by hand: rows of a chain, c of each candidate against the rows of the prompt's three tokens.

    At temperature 0, too: the nearest token alone would follow each time that the step repeats.
    """
    made, counts, runs = chain(8, sharp=1.5), Counter[int](), 300
    # After 1 2 3 | 4 4 the step repeats that after the first 4.
    rows = torch.stack([made.next_logits([token]) for token in range(VOCAB)]).log_softmax(-1)
    candidates = rows[4].topk(4).indices.tolist()
    costs = torch.tensor([min(divergence(rows[token], rows[place]) for place in (1, 2, 3)) for token in candidates])
    law = (-costs).softmax(-1)
    for seed in range(runs):
        seq = await write(made, seed=seed, begun=[4, 4], alpha=1e-6, candidates=4, sampling={"max_tokens": 3})
        counts[seq.tokens[-1]] += 1
    assert set(counts) <= set(candidates)
    for token, chance in zip(candidates, law.tolist(), strict=True):
        assert abs(counts[token] / runs - chance) < 4 * math.sqrt(chance * (1 - chance) / runs)
    assert law.max() - law.min() > 0.1  # another law would be seen


async def test_an_answer_that_is_gone_on_with_is_the_same() -> None:
    choices: list[dict[str, Any]] = [{}, {"history": 3, "prefix": 2}]
    for params in choices:
        whole = await write(chain(3), alpha=0.3, candidates=4, **params)
        assert whole.tokens != (await write(chain(3), "plain")).tokens
        for cut in (1, 7, 20):
            again = await write(chain(3), alpha=0.3, candidates=4, begun=whole.answer[:cut], **params)
            assert again.tokens == whole.tokens


async def test_answers_repeat_less_than_greedy_ones() -> None:
    def repeated(seq: Sequence) -> int:
        grams = [tuple(seq.answer[place : place + 4]) for place in range(len(seq.answer) - 3)]
        return len(grams) - len(set(grams))

    pairs = [(await write(chain(seed)), await write(chain(seed), "plain")) for seed in range(8)]
    assert sum(repeated(mine) for mine, _ in pairs) < sum(repeated(plain) for _, plain in pairs)


async def test_tokens_that_are_banned_are_no_candidates() -> None:
    banned = {"bad_word_ids": ((0,), (4,))}
    for seed in range(3):
        seq = await write(chain(seed), alpha=1000.0, candidates=VOCAB, sampling=banned)
        assert not {0, 4} & set(seq.answer)


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", math.nan), ("alpha", -2.0), ("candidates", 0), ("history", 0), ("history", 513), ("prefix", 1 << 40)],
)
async def test_bad_parameters_are_refused(name: str, value: float) -> None:
    with pytest.raises(TurnoutError) as caught:
        get_method("look_back").parse({name: value})
    assert caught.value.field == f"method.params.{name}"
