"""A*-decoding: which answers go on, which one is shown, and that the search keeps within its budget."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel
from decoding.methods.a_star import AStar
from decoding.model import ModelPool, Readout, ReadSpec, Request
from decoding.noise import derive_seed, round_seed
from decoding.sequence import Sequence
from tests.decoding.step_models import END, ID, VOCAB, answer, ids, pool, scripted, text, with_head
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams

LETTERS = "abc"
LEVELS = [0.0503, 0.2117, 0.4789, 0.6631, 0.8377, 1.0 - 1e-6, 1e-6]  # no two sums of differences are nearly equal


class Judged(TableModel):
    """Draws letters, each of them a step, and the end after some; its hidden state names the level of its text."""

    def __init__(self, level: Callable[[str], int], depth: int, name: str = "large", letters: str = LETTERS) -> None:
        self.level = level
        row = torch.full((VOCAB,), -60.0)
        row[[ID[each] for each in letters]] = 0.0
        end = torch.full((VOCAB,), -60.0)
        end[END] = 0.0
        super().__init__(name, lambda tokens: end if len(tokens) > depth else row, VOCAB)

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        rows = super()._read(seq, paths, want)
        for row, path in zip(rows, paths, strict=True):
            if want.hidden:
                row.hidden = {-1: torch.eye(len(LEVELS))[self.level(text(seq.tokens + list(path)).strip("?$"))]}
        return rows


def judged(folder: Path, level: Callable[[str], int], depth: int = 4, **options: Any) -> ModelPool:
    model = Judged(level, depth, **options)
    return with_head(pool(scripted("small", lambda _: "$"), model), "reward_model", "large", folder, LEVELS, unread=3)


def drawn(seed: int) -> Callable[[str], int]:
    """A level by chance for each text."""
    return lambda written: derive_seed(seed + 1, sum(ord(char) * 31**place for place, char in enumerate(written))) % 5


async def solve(models: ModelPool, seed: int = 0, **params: Any) -> tuple[Sequence, dict[str, Any]]:
    given = {"scorer": "reward_model", "separators": [*LETTERS], **params}
    seq, _, request = await answer(models, "a_star", given, seed=seed, temperature=1.0)
    for model in models.models.values():
        assert isinstance(model, TableModel)
        assert list(model.cached) in ([], [seq])
        model.release(seq)
    large = seq.meter.models["large"]
    assert large.generated_tokens == len(seq.generated)
    assert isinstance(models.large, TableModel)
    assert large.forwards == models.large.forwards
    return seq, request.extra["a_star"]


async def test_with_a_perfect_reward_only_the_one_path_goes_on(tmp_path: Path) -> None:
    right = "bcab"
    for seed in range(6):
        models = judged(tmp_path, lambda written: 5 if right.startswith(written) else 6)
        seq, found = await solve(models, seed, samples=16)
        assert text(seq.answer) == right + "$"
        assert found["expanded"] == len(right) + 1
        assert found["estimate"] == pytest.approx(0.0, abs=1e-4)
        assert found["reward"] == pytest.approx(1.0, abs=1e-4)
        assert found["found"]


async def test_with_one_reward_for_all_the_order_is_by_breadth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AStar] = []
    begin = AStar.run

    async def run(self: AStar, seq: Sequence) -> Any:
        made.append(self)
        return await begin(self, seq)

    monkeypatch.setattr(AStar, "run", run)
    await solve(judged(tmp_path, lambda _: 2), samples=3)
    steps = [depth for depth, _ in made[0].expanded]
    assert steps == sorted(steps)
    assert len(set(steps)) == 5


@pytest.mark.parametrize("step_cost", ["change", "none"])
@pytest.mark.parametrize("seed", range(5))
async def test_the_search_is_that_of_a_heap_over_the_same_steps(tmp_path: Path, seed: int, step_cost: str) -> None:
    """Texts drawn one by one here, with their seeds; g and h by hand; the answer is the first ended one of the heap."""
    level, model = drawn(seed), Judged(drawn(seed), 4)
    start = Sequence(ids("?"), SamplingParams(max_tokens=24), seed, (END,))
    heap: list[tuple[float, int, str, float, float, int]] = [(0.0, 0, "", 1.0, 0.0, seed)]
    pushed = expanded = 0
    popped = []
    while True:
        estimate, _, written, reward, cost, own = heapq.heappop(heap)
        popped.append(estimate)
        if written.endswith("$"):
            break
        expanded += 1
        children: dict[str, int] = {}
        for place in range(3):
            fork_seed = derive_seed(round_seed(own, expanded), place) if place else own
            fork = Sequence(start.tokens + ids(written), start.sampling, fork_seed, (END,))
            [row] = await model.extend(fork)
            children.setdefault(text([row.token]), fork_seed)
        for step, fork_seed in children.items():
            worth = LEVELS[level((written + step).strip("$"))]
            pushed += 1
            paid = cost + (abs(worth - reward) if step_cost == "change" else 0.0)
            heapq.heappush(heap, (round(paid + 1 - worth, 9), pushed, written + step, worth, paid, fork_seed))
    seq, found = await solve(judged(tmp_path, level), seed, samples=3, step_cost=step_cost)
    assert text(seq.answer) == written
    assert found["expanded"] == expanded
    assert found["estimate"] == pytest.approx(estimate, abs=1e-3)
    if step_cost == "change":  # consistent: what is popped never promises more than what was popped before
        assert popped == sorted(popped)


async def test_a_false_start_is_left_for_an_earlier_answer(tmp_path: Path) -> None:
    """`a` looks best, and everything after it is bad; the search comes back to `b`."""

    def level(written: str) -> int:
        return 4 if written == "a" else 0 if written.startswith("a") else 3 if set(written) == {"b"} else 1

    for seed in range(4):
        seq, _ = await solve(judged(tmp_path, level), seed, samples=16)
        assert text(seq.answer) == "bbbb$"


async def test_one_sample_is_one_chain_and_no_sampling_is_plain(tmp_path: Path) -> None:
    for seed in range(4):
        models = judged(tmp_path, drawn(seed))
        plain, _, _ = await answer(models, "plain", {}, seed=seed, temperature=1.0)
        models = judged(tmp_path, drawn(seed))
        assert (await solve(models, seed, samples=1))[0].tokens == plain.tokens
        greedy, _, _ = await answer(models, "plain", {}, seed=seed)
        assert (await answer(models, "a_star", {}, seed=seed))[0].tokens == greedy.tokens


@pytest.mark.parametrize(
    "budget", [{"max_search_tokens": 7}, {"max_search_tokens": 1}, {"max_scores": 5}, {"max_scores": 1}]
)
async def test_the_budget_of_the_search_is_kept_and_there_is_an_answer(tmp_path: Path, budget: dict[str, int]) -> None:
    for seed in range(4):
        models = judged(tmp_path, drawn(seed), depth=8)
        seq, found = await solve(models, seed, samples=3, **budget)
        assert found["written"] <= budget.get("max_search_tokens", 1 << 20)
        assert found["scored"] <= budget.get("max_scores", 1 << 20)
        assert not found["found"]
        assert seq.finished
        assert text(seq.answer).endswith("$")
        large = seq.meter.models["large"]
        assert large.generated_tokens + large.discarded_tokens >= found["written"]


async def test_where_the_budget_ends_the_ended_answer_of_the_greatest_reward_is_shown(tmp_path: Path) -> None:
    """`c` and what repeats it is better than all that has ended by then, and never ends; of these, `b` is the best."""

    def level(written: str) -> int:
        return 4 if set(written) == {"c"} else 1 if written == "b" else 0

    model = Judged(level, 99)
    row, end = model.next_logits([1]), torch.full((VOCAB,), -60.0)
    end[END] = 0.0
    model.next_logits = lambda tokens: end if tokens[-1] in ids("ab") else row
    models = with_head(pool(scripted("small", lambda _: "$"), model), "reward_model", "large", tmp_path, LEVELS, 3)
    # Steps are a$, b$ and c.
    seq, found = await solve(models, samples=16, max_scores=18, max_step_tokens=2, separators=["c"])
    assert text(seq.answer) == "b$"
    assert found["found"]
    assert found["scored"] <= 18
    assert found["expanded"] > 3


async def test_the_small_model_may_write_and_the_large_one_judge(tmp_path: Path) -> None:
    right = "bc"
    small = Judged(lambda _: 0, 2, name="small")
    large = Judged(lambda written: 5 if right.startswith(written) else 6, 2)
    models = with_head(pool(small, large), "reward_model", "large", tmp_path, LEVELS, unread=3)
    seq, _, _ = await answer(
        models,
        "a_star",
        {"scorer": "reward_model", "model": "small", "samples": 16, "separators": [*LETTERS]},
        temperature=1.0,
    )
    assert text(seq.answer) == right + "$"
    assert {token.source for token in seq.generated} == {"small"}
    meters = seq.meter.models
    assert meters["large"].forwards == large.forwards > 0
    assert meters["large"].generated_tokens == 0
    assert meters["small"].discarded_tokens > 0
    assert list(large.cached) in ([], [seq])


async def test_a_fault_of_the_scorer_releases_all(tmp_path: Path) -> None:
    def level(written: str) -> int:
        if len(written) > 2:
            raise ZeroDivisionError
        return 3

    models = judged(tmp_path, level)
    seq = Sequence(ids("?"), SamplingParams(max_tokens=24), 0, (END,))
    info = get_method("a_star")
    with pytest.raises(ZeroDivisionError):
        async for _ in info.run(
            Request("r", seq), models, info.parse({"scorer": "reward_model", "separators": [*LETTERS]})
        ):
            pass
    assert isinstance(models.large, TableModel)
    assert list(models.large.cached) == [seq]
    assert seq.meter.models["large"].forwards == models.large.forwards


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samples", 0),
        ("scorer", "unknown"),
        ("step_cost", "all"),
        ("max_scores", 0),
        ("max_scores", 1 << 20),
        ("max_search_tokens", -1),
    ],
)
async def test_bad_parameters_are_refused(name: str, value: Any) -> None:
    with pytest.raises(TurnoutError) as caught:
        get_method("a_star").parse({name: value})
    assert caught.value.field is not None
    assert caught.value.field.startswith(f"method.params.{name}")


async def test_a_missing_reward_model_is_refused() -> None:
    models = pool(scripted("small", lambda _: "$"), scripted("large", lambda _: "$"))
    with pytest.raises(TurnoutError, match="reward_model"):
        await answer(models, "a_star", {"scorer": "reward_model"}, temperature=1.0)
