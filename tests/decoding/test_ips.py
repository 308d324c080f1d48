"""Isotropic and proximal search: the score by hand, each choice by hand, what it costs, and what it does to answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

from decoding.fakes import TableModel, pair
from decoding.methods.ips import OwnStates, scores
from decoding.model import Readout, ReadSpec, Request
from decoding.sequence import Sequence
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams

VOCAB, END, WIDTH = 8, 0, 4
PROMPT = [3, 4, END, 5, END, 2, 6]


class StateModel(TableModel):
    """A table model whose hidden state is drawn for the last two tokens."""

    def __init__(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        rows = torch.randn((VOCAB, VOCAB, VOCAB), generator=drawn)
        self.states = torch.randn((VOCAB, VOCAB, WIDTH), generator=drawn)
        super().__init__("large", lambda tokens: rows[tokens[-2] if len(tokens) > 1 else 1, tokens[-1]], VOCAB)

    def state(self, tokens: list[int]) -> torch.Tensor:
        return self.states[tokens[-2] if len(tokens) > 1 else 1, tokens[-1]]

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        rows = super()._read(seq, paths, want)
        for row, path in zip(rows, paths, strict=True):
            if want.hidden:
                row.hidden = {-1: self.state(seq.tokens + list(path))}
        return rows


async def write(
    made: TableModel, method: str = "ips", seed: int = 5, begun: Any = (), prompt: Any = PROMPT, **params: Any
) -> Sequence:
    given = {"max_tokens": 14, "temperature": 0.0, **params.pop("sampling", {})}
    sampling = SamplingParams.model_validate(given)
    seq, info = Sequence(prompt, sampling, seed, (END,)), get_method(method)
    for token in begun:
        seq.append_plain([token], "large", 1)
    running = info.run(Request("r", seq), pair(made, made), info.parse(params))
    segments = [each async for each in running]
    assert [token for each in segments for token in each.tokens] == seq.generated[len(begun) :]
    assert list(made.cached) == [seq]
    made.release(seq)
    return seq


def own(*states: torch.Tensor) -> OwnStates:
    kept = OwnStates()
    for state in states:
        kept.add(state)
    return kept


def test_what_is_kept_of_an_answer_is_no_more_when_it_grows() -> None:
    states = torch.randn((200, WIDTH), generator=torch.Generator().manual_seed(1))
    after, past = states[:3] + 1, states[3:5]
    kept = own(*states)
    assert kept.total.shape == kept.directions.shape == (WIDTH,)
    found = scores(torch.zeros(3), after, kept, past, 0.0)
    for value, each in zip(found.tolist(), after, strict=True):
        mean = torch.cat([states, each[None]]).mean(0)
        prox = float(cosine_similarity(each[None], states).mean())
        assert value == pytest.approx(prox - float(cosine_similarity(mean[None], past).mean()), abs=1e-5)


def test_the_score_by_hand() -> None:
    """One token of the answer at (1, 0), one utterance at (0, 1); candidates at (1, 0), (0, 2) and (1, 1)."""
    found = scores(
        torch.tensor([0.5, 0.3, 0.2]),
        torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]),
        own(torch.tensor([1.0, 0.0])),
        torch.tensor([[0.0, 3.0]]),
        0.6,
    )
    half, fifth = 1 / math.sqrt(2), 1 / math.sqrt(5)
    # Means (1, 0), (1/2, 1) and (1, 1/2).
    expected = [0.3 + 0.4 * (1 - 0), 0.18 + 0.4 * (0 - 2 * fifth), 0.12 + 0.4 * (half - fifth)]
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("params", [{"weight": 1.0}, {"candidates": 1}, {"first": 100}])
async def test_without_a_choice_it_is_greedy(params: dict[str, Any]) -> None:
    for seed in range(3):
        plain = await write(StateModel(seed), "plain")
        assert (await write(StateModel(seed), **params)).tokens == plain.tokens


@pytest.mark.parametrize("prompt", [PROMPT, [3, 4]])
@pytest.mark.parametrize("seed", range(3))
async def test_each_token_is_the_best_one_found_one_by_one(seed: int, prompt: list[int]) -> None:
    """Candidate after candidate, cosines one by one; two utterances, or a prompt that is one."""
    made, tokens = StateModel(seed), list(prompt)
    ends = [place for place, token in enumerate(prompt) if token == END] or [len(prompt) - 1]
    past = [made.state(prompt[: end + 1]) for end in ends]
    while len(tokens) < len(prompt) + 14 and (len(tokens) == len(prompt) or tokens[-1] != END):
        probs = made.next_logits(tokens).softmax(-1)
        if len(tokens) < len(prompt) + 2:
            tokens.append(int(probs.argmax()))
            continue
        own = [made.state(tokens[: place + 1]) for place in range(len(prompt), len(tokens))]
        found = []
        for token in probs.topk(4).indices.tolist():
            state = made.state([*tokens, token])
            prox = sum(float(cosine_similarity(state, each, dim=0)) for each in own) / len(own)
            mean = torch.stack([*own, state]).mean(0)
            iso = sum(float(cosine_similarity(mean, each, dim=0)) for each in past) / len(past)
            found.append((0.3 * float(probs[token]) + 0.7 * (prox - iso), token))
        tokens.append(max(found)[1])
    seq = await write(made, weight=0.3, candidates=4, prompt=prompt)
    assert seq.tokens == tokens
    meter, steps = seq.meter.models["large"], len(seq.answer)
    if steps > 2:
        assert meter.forwards == steps + (steps - 2) + len(ends)
        assert meter.draft_tokens == 4 * (steps - 2)


async def test_an_answer_that_is_gone_on_with_is_the_same() -> None:
    options: dict[str, Any] = {"weight": 0.3, "sampling": {"ignore_eos": True}}
    drawn = {"choice": "drawn", "sampling": {"ignore_eos": True, "temperature": 1.0}}
    for params in ({}, drawn):
        whole = await write(StateModel(1), **{**options, **params})
        for cut in (1, 2, 3, 9, 13):
            again = await write(StateModel(1), **{**options, **params}, begun=whole.answer[:cut])
            assert again.tokens == whole.tokens


async def test_drawn_tokens_have_the_law_of_the_scores() -> None:
    made, runs, counts = StateModel(4), 400, [0] * VOCAB
    begun, tokens = [1, 7], [3, 4, 1, 7]
    for seed in range(runs):
        sampling = {"max_tokens": 3, "temperature": 1.0}
        options: dict[str, Any] = {"weight": 0.0, "candidates": 3, "choice": "drawn", "sampling": sampling}
        counts[(await write(made, seed=seed, begun=begun, prompt=[3, 4], **options)).tokens[-1]] += 1
    best = made.next_logits(tokens).topk(3).indices.tolist()
    found = scores(
        torch.zeros(3),
        torch.stack([made.state([*tokens, token]) for token in best]),
        own(made.state([3, 4, 1]), made.state(tokens)),
        made.state([3, 4])[None],
        0.0,
    )
    for token, chance in zip(best, found.softmax(-1).tolist(), strict=True):
        assert abs(counts[token] / runs - chance) < 4 * math.sqrt(chance * (1 - chance) / runs)


async def test_at_temperature_0_the_best_token_follows_whatever_the_seed() -> None:
    options: dict[str, Any] = {"weight": 0.3, "candidates": 4}
    best = await write(StateModel(4), **options)
    for seed in range(4):
        assert (await write(StateModel(4), seed=seed, choice="drawn", **options)).tokens == best.tokens


async def test_answers_keep_more_to_themselves_than_greedy_ones() -> None:
    def within(seq: Sequence, made: StateModel) -> float:
        own = torch.stack([made.state(seq.tokens[: place + 1]) for place in range(len(PROMPT), len(seq.tokens))])
        return float(cosine_similarity(own[:, None], own[None], dim=-1).mean())

    models = [StateModel(seed) for seed in range(8)]
    options: dict[str, Any] = {"sampling": {"ignore_eos": True}, "prompt": PROMPT}
    mine = [within(await write(made, **options, weight=0.2), made) for made in models]
    plain = [within(await write(made, "plain", **options), made) for made in models]
    assert sum(mine) > sum(plain)


async def test_tokens_that_are_banned_are_no_candidates() -> None:
    seq = await write(StateModel(2), weight=0.0, candidates=VOCAB, sampling={"bad_word_ids": ((0,), (4,))})
    assert not {0, 4} & set(seq.answer)


@pytest.mark.parametrize(
    ("name", "value"), [("weight", math.nan), ("weight", 1.1), ("candidates", 0), ("first", 0), ("choice", "worst")]
)
async def test_bad_parameters_are_refused(name: str, value: Any) -> None:
    with pytest.raises(TurnoutError) as caught:
        get_method("ips").parse({name: value})
    assert caught.value.field == f"method.params.{name}"
