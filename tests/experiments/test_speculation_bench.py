"""The comparison run on a tiny pair: what must come out, and what must be noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.grid.contenders import PLAIN
from experiments.replay import Verdict, compare
from experiments.speculation.bench import Report, run
from experiments.speculation.equality import check
from experiments.speculation.grid import ASSISTED, GENERATE, Grid, Setting, configured
from experiments.speculation.measure import Panel
from experiments.speculation.sides import Answer, HuggingFaceSide, OurSide, Turn
from tests.experiments.speculation_models import axes, setting
from turnout.errors import TurnoutError

DRAFTED = 4  # tokens of a draft by the default length policy


def bench(
    folder: Path, *methods: str, out: str = "cells", draft_seed: int = 0, **changes: Any
) -> tuple[Report, list[str]]:
    """Run it; what it said on the way comes back with the report."""
    sizes = {key: changes.pop(key) for key in ("prompts", "max_tokens", "turns") if key in changes}
    said: list[str] = []
    chosen = setting(folder, draft_seed, **sizes)
    return asyncio.run(run(chosen, axes(*methods, **changes), folder / "cells", said.append)), said


def test_plain_beside_plain_gives_one_token_a_forward_and_the_same_text(tmp_path: Path) -> None:
    report, _ = bench(tmp_path, PLAIN, prompts=6, temperatures=(0.0, 1.0), batches=(1, 4))
    assert report.conditions() == [(0.0, 1), (0.0, 4), (1.0, 1), (1.0, 4)]
    for condition in report.conditions():
        found = report.figures(*condition)[PLAIN]["arithmetic"]
        assert found.tokens_per_step == 1.0
        assert found.fed_per_token < 1.0  # the first one comes from the prompt
        assert found.equality == "6 equal"
        assert found.speedup.low <= found.speedup.value <= found.speedup.high
        assert 0.01 < found.speedup.value < 100.0  # so few tokens that a pause changes it tenfold


def test_prompts_are_asked_again_until_there_are_enough_turns(tmp_path: Path) -> None:
    """What was learned is forgotten before: token recycling knows nothing of an answer that it has seen."""
    once, _ = bench(tmp_path / "once", "token_recycling")
    again, _ = bench(tmp_path / "again", "token_recycling", turns=7)
    assert [len(report.cells[0].turns) for report in (once, again)] == [3, 9]
    one, three = (report.cells[0].speculation for report in (once, again))
    assert three.accepted_at == [3 * count for count in one.accepted_at]
    assert three.drafted_at == [3 * count for count in one.drafted_at]
    assert again.figures(0.0, 1)["token_recycling"][""].equality == "9 equal"


def test_a_perfect_drafter_gives_its_length_and_one(tmp_path: Path) -> None:
    report, _ = bench(tmp_path, "model_chain", max_tokens=2 * (DRAFTED + 1))
    found = report.figures(0.0, 1)["model_chain"][""]
    assert found.tokens_per_step == DRAFTED + 1
    # The prompt's round feeds the draft alone, the other one the token before it too.
    assert found.fed_per_token == (2 * DRAFTED + 1) / (2 * (DRAFTED + 1))
    assert found.acceptance == 1.0
    assert found.by_depth == (1.0,) * DRAFTED
    assert 0.0 < found.draft_share < 1.0


@pytest.mark.parametrize("threads", [1, 2])
async def test_the_other_side_has_as_many_threads_as_our_engine(threads: int) -> None:
    """Each thread has a count of its own: one that was started beside an engine with fewer keeps the fewer."""
    seen = []

    class Model:
        config = SimpleNamespace(pad_token_id=0)

        def generate(self, ids: torch.Tensor, **_: Any) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return torch.cat([ids, ids], dim=1)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - threads)
        turn = await HuggingFaceSide(Model(), 4, threads, {}).answer({0: (5, 6)})
    finally:
        torch.set_num_threads(before)
    assert seen == [threads]
    assert turn.answers[0].tokens == (5, 6)


def test_our_engine_does_not_choose_its_threads_while_it_is_measured() -> None:
    assert configured(Setting("demo", threads=None)).engine.threads == torch.get_num_threads()
    assert configured(Setting("demo", threads=1)).engine.threads == 1


def test_a_poor_drafter_gives_less_and_the_same_text(tmp_path: Path) -> None:
    methods = ("model_chain", "copyspec", "model_tree", "rsd_s", "model_sequences", "ucb")
    report, _ = bench(tmp_path, *methods, draft_seed=1, temperatures=(0.0, 1.0), batches=(2,))
    for temperature in (0.0, 1.0):
        for name, mine in report.figures(temperature, 2).items():
            in_law = temperature and not report.grid.contenders[name].seeded
            assert mine[""].equality == ("in law" if in_law else "3 equal"), name
            assert mine[""].wrong == 0
    assert report.figures(0.0, 2)["model_chain"][""].tokens_per_step < DRAFTED + 1


@pytest.fixture
async def grid(tmp_path: Path) -> AsyncIterator[Grid]:
    opened = Grid.open(setting(tmp_path, max_tokens=12))
    yield opened
    assert opened.pool.stats().sequences == 0
    await opened.pool.close()


def tampered(turn: Turn, place: int) -> Turn:
    """The first answer with one token exchanged."""
    first = turn.answers[0]
    given = list(first.given)
    given[place] = replace(given[place], id=(given[place].id + 1) % 250)
    changed = Answer(tuple(token.id for token in given), tuple(given), first.usage)
    return replace(turn, answers=(changed, *turn.answers[1:]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 7, -1])
async def test_one_exchanged_token_is_noticed(grid: Grid, temperature: float, place: int) -> None:
    [plan] = grid.plans(axes("model_chain", temperatures=(temperature,)))
    side = grid.challenger(plan)
    assert isinstance(side, OurSide)
    prompts = dict(enumerate(grid.group("arithmetic").prompts))
    plain, drafted = await Panel(grid.baseline(plan), (side,)).turn(1, prompts)
    assert (plain.answers[0].usage.method, drafted.answers[0].usage.method) == ("plain", "speculative")
    fine = await check(grid.pool, side, prompts, (plain, drafted), "float32")
    assert (fine.equal, fine.wrong) == (3, 0)
    planted = await check(grid.pool, side, prompts, (plain, tampered(drafted, place)), "float32")
    assert (planted.equal, planted.ties, planted.wrong) == (2, 0, 1)
    first = drafted.answers[0]
    short = replace(first, tokens=first.tokens[:-1], given=first.given[:-1])
    cut = replace(drafted, answers=(short, *drafted.answers[1:]))
    assert (await check(grid.pool, side, prompts, (plain, cut), "float32")).wrong == 1


async def test_rounding_excuses_only_what_it_explains(grid: Grid) -> None:
    [plan] = grid.plans(axes("model_chain"))
    side = grid.challenger(plan)
    assert isinstance(side, OurSide)
    prompt = grid.group("arithmetic").prompts[0]
    turn = await side.answer({0: prompt})
    alone, got = list(turn.answers[0].given), list(tampered(turn, 3).answers[0].given)
    assert await compare(grid.pool, side.call(0, prompt), got, alone) is Verdict.WRONG
    assert await compare(grid.pool, side.call(0, prompt), got, alone, tie_nats=1e6) is Verdict.TIE
    assert await compare(grid.pool, side.call(0, prompt), alone) is Verdict.EQUAL


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    first, said = bench(tmp_path, PLAIN, "copyspec")
    assert said == ["0 of 2 cells; arithmetic, T=0, batch 1, over plain: plain, copyspec"]
    added, said = bench(tmp_path, PLAIN, "copyspec", "aded")
    assert said[0] == "2 of 3 cells are there already"
    assert said[1] == "0 of 1 cells; arithmetic, T=0, batch 1, over plain: aded"
    assert added.figures(0.0, 1)["copyspec"] == first.figures(0.0, 1)["copyspec"]
    # A later run shows what others measured in the same setting, and nothing of another setting.
    fewer, said = bench(tmp_path, "aded")
    assert said == ["1 of 1 cells are there already"]
    assert set(fewer.figures(0.0, 1)) == {PLAIN, "copyspec", "aded"}
    other, _ = bench(tmp_path, "aded", max_tokens=5)
    assert set(other.figures(0.0, 1)) == {"aded"}


def test_a_method_that_fails_says_why_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = OurSide.answer

    async def fails(self: OurSide, prompts: Any) -> Turn:
        if self.contender.name == "aded":
            raise RuntimeError("broken")
        return await answer(self, prompts)

    monkeypatch.setattr(OurSide, "answer", fails)
    report, _ = bench(tmp_path, "aded", "copyspec", temperatures=(0.0, 1.0))
    assert report.grid.missing["aded"].endswith("RuntimeError: broken")
    assert set(report.figures(0.0, 1)) == set(report.figures(1.0, 1)) == {"copyspec"}


def test_hugging_face_answers_the_same_prompts_with_the_same_weights(tmp_path: Path) -> None:
    report, _ = bench(tmp_path, PLAIN, "model_chain", "copyspec", peers=True, prompts=2)
    found = report.peers()
    assert {f"{PLAIN} over {GENERATE}", f"model_chain over {ASSISTED}"} <= set(found)
    assert len(found) == 3
    for mine in found.values():
        assert mine[""].equality == "2 equal"
        assert mine[""].baseline_tokens_per_s > 0.0


def test_artifacts_of_other_models_are_not_used(tmp_path: Path) -> None:
    report, _ = bench(tmp_path, PLAIN)
    assert "was made for the large model with digest" in report.grid.missing["medusa"]


def test_an_unknown_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TurnoutError, match="'nonsense' is not known"):
        bench(tmp_path, "nonsense")
