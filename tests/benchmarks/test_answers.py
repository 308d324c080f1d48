"""Statistics of the page of several answers by hand, choices as they are served, and the page of a tiny pair."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.answers import aggregators, figures, look_ahead, prompts, real, run, uncertainty
from benchmarks.answers.aggregators import compare, served
from benchmarks.answers.drawing import Drawn, chosen, drawn
from benchmarks.answers.figures import area, area_difference, area_interval, at_cost, difference, numbers
from benchmarks.answers.prompts import TASKS, asked, others, short_questions
from benchmarks.harness import parse
from benchmarks.pieces import Pieces, Section, Values
from benchmarks.strategies import Arm
from benchmarks.switching_arms import Prompts
from benchmarks.verdicts import sentences
from decoding.aggregators.base import AnswerSet, Candidate, make_aggregator
from experiments.stats.intervals import Interval
from pool.local_pool import LocalPool
from tests.near_pair import save_near_pair
from training.calibration_data import Question
from training.router_runs import asked_for_shipped
from turnout.config import ModelConfig, PoolConfig, TurnoutConfig
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

HERE = {"name": "processor", "cores": "2"}


def test_an_area_counts_pairs_and_half_of_ties() -> None:
    doubts, wrong = np.array([0.9, 0.5, 0.5, 0.1]), np.array([1.0, 1.0, 0.0, 0.0])
    assert area(doubts, wrong) == (1 + 1 + 0.5 + 1) / 4  # of four pairs of a wrong and a right answer, one is a tie
    assert area(-doubts, wrong) == 0.5 / 4
    assert area(np.zeros(4), wrong) == 0.5
    assert np.isnan(area(doubts, np.ones(4)))
    found = area_interval(np.tile(doubts, 25), np.tile(wrong, 25))
    assert found.low < found.value == 0.875 < found.high


def test_both_sides_of_a_prompt_are_drawn_together() -> None:
    rng = np.random.default_rng(1)
    wrong, doubts = (rng.random(60) < 0.5).astype(float), rng.random(60)
    assert difference(wrong, wrong) == Interval(0.0, 0.0, 0.0)
    assert area_difference(doubts, np.exp(doubts), wrong) == Interval(0.0, 0.0, 0.0)  # the same order
    better = wrong.copy()
    better[np.flatnonzero(wrong == 0.0)[:8]] = 1.0
    found = difference(better, wrong)
    assert found.value == pytest.approx(8 / 60)
    assert found.low > 0.0  # prompts differ by more among themselves
    assert (found.high - found.low) < 2 * 1.96 * np.sqrt(2 * 0.25 / 60) / 1.5


def test_at_a_cost_between_two_points_each_prompt_is_on_the_line() -> None:
    curve = [(3.0, np.array([1.0, 0.0])), (1.0, np.array([0.0, 0.0])), (2.0, np.array([0.0, 1.0]))]
    assert at_cost(curve, 1.5).tolist() == [0.0, 0.5]
    assert at_cost(curve, 2.75).tolist() == [0.75, 0.25]
    assert (at_cost(curve, 0.1).tolist(), at_cost(curve, 9.0).tolist()) == ([0.0, 0.0], [1.0, 0.0])


def test_what_does_not_help_is_said_from_the_rows() -> None:
    sure, open_, worse = Interval(0.2, 0.1, 0.3), Interval(0.1, -0.1, 0.3), Interval(-0.2, -0.3, -0.1)
    text = sentences("greedy", {"a": {"2": open_, "4": sure}, "b": {"2": open_, "4": worse}, "c": {"2": open_}})
    assert text == "Compared with greedy: better: a (4); worse: b (4); neither shown: c."
    assert (
        sentences("chance", {"a": {"": sure}}) == "Compared with chance: better: a; worse: none; neither shown: none."
    )


def candidates(*answers: tuple[str, int]) -> Drawn:
    made = [Candidate(text, text, text, (1,) * length, (-1.0,) * length) for text, length in answers]
    return Drawn(AnswerSet(made), np.zeros(len(made)), tuple(length for _, length in answers))


@pytest.mark.parametrize(
    ("part", "count", "expected"),
    [
        (PartChoice(name="first_finish"), 4, (2, 4 * 3)),
        (PartChoice(name="first_finish"), 2, (1, 2 * 5)),
        (PartChoice.of("majority", early=True), 4, (1, 3 + 3 * 5)),  # two of three that ended agree, one is left
        (PartChoice(name="majority"), 4, (1, 9 + 5 + 3 + 5)),
        (PartChoice(name="majority"), 1, (0, 9)),
    ],
)
async def test_one_that_stops_early_pays_for_what_was_written_until_then(
    part: PartChoice, count: int, expected: tuple[int, int]
) -> None:
    found = candidates(("a", 9), ("b", 5), ("c", 3), ("b", 5))
    if part.params.get("early"):
        found = candidates(("a", 9), ("b", 5), ("b", 3), ("b", 5))
    place, tokens = await chosen(make_aggregator(part), found, count)
    assert tokens == expected[1]
    assert found.group.answers[place].text == found.group.answers[expected[0]].text


def test_no_prompt_is_scored_and_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MOST", 50)
    for task in TASKS:
        scored, learnt = ({each.key for each in found} for found in (asked(task, 50), others(task, 40)))
        assert len(scored) >= 50
        assert not scored & (learnt | asked_for_shipped(task))
        assert not learnt & asked_for_shipped(task)


def test_short_questions_are_sixty_and_their_judges_read_words_and_numbers() -> None:
    found = {each.prompt: each.judge for each in short_questions()}
    assert len(found) == 60
    said = {"What is the capital of France? Answer with the name only.": ("It is **Paris**.", "Parisian food")}
    said["What is 7 + 5? Answer with the number only."] = ("7 + 5 = 12", "7 + 5 = 13")
    for prompt, (right, wrong) in said.items():
        judge = found[prompt]
        assert judge is not None
        assert (judge(right), judge(wrong)) == (1.0, 0.0)


@pytest.fixture
async def near(tmp_path: Path) -> AsyncIterator[LocalPool]:
    save_near_pair(tmp_path)
    models = {
        name: ModelConfig(path=str(tmp_path / name), dtype="float32", kv_memory_bytes=4 << 20)
        for name in ("small", "large")
    }
    config = TurnoutConfig(models=models, pools={"demo": PoolConfig(small="small", large="large")})
    one_thread = config.engine.model_copy(update={"threads": 1})
    pool = LocalPool.load("demo", config.model_copy(update={"engine": one_thread}))
    yield pool
    await pool.close()


async def test_the_page_of_a_tiny_pair_end_to_end(
    near: LocalPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregators, "MAX_TOKENS", 6)
    monkeypatch.setattr(aggregators, "SERVED_PROMPTS", 1)
    monkeypatch.setattr(figures, "ROUNDS", 20)
    questions = [Question(text, lambda text: float(len(text) % 2)) for text in ("one", "two?", "three")]
    parts = {name: PartChoice(name=name) for name in ("majority", "self_certainty", "mbr", "first_finish")}
    terms = tuple(PartChoice(name=each.name) for each in aggregators.TERMS)
    votes = await compare(near, questions, parts, (1, 2, 3), [])
    sure = {"self_certainty", "mbr", "majority"}
    assert {name for name, each in votes["served"].items() if numbers(each["same"]).all()} >= sure
    assert all(numbers(votes["served"][name]["tokens"]) == [1.0] for name in sure)
    doubts = await uncertainty.doubts_of(near, questions, uncertainty.choices({}), 3, 6)
    tiny = Prompts("tiny", questions, questions, 6)
    programs = [Arm("cntp, small", "cntp", {"model": "small", "trials": 2}, 1.0), Arm("ips, large", "ips", {}, 0.0)]
    rows = await look_ahead.compare(near, tiny, programs)
    values: dict[str, Values] = {
        "aggregators-lists-large": {**votes, "weights": [1.0] * len(terms), "missing": {"daemon": "out of reach"}},
        "uncertainty-lists-large": doubts,
        "look-ahead-lists": {"prompts": 3, "rows": rows},
        "real-questions": {**doubts, "votes": await real.votes(near, questions, (1, 2))},
    }
    kept = {
        name: {"date": "2026-11-30", "machine": HERE, "setting": {}, "values": each} for name, each in values.items()
    }
    report = run.page(Pieces(None, kept), {"look-ahead-arithmetic": "no memory"})
    report.save(tmp_path / "answers.md")
    text = (tmp_path / "answers.md").read_text()
    assert "| mbr | 3 |" in text
    assert "Left out: daemon: out of reach." in text
    assert "Not measured: look-ahead-arithmetic (no memory)." in text
    assert text.count("neither shown") >= 5
    assert Pieces.read(tmp_path / "answers.json").values(values) == values


async def test_candidates_are_those_that_are_served(near: LocalPool) -> None:
    asked_for, sampling = Question("what?", lambda _: 1.0), SamplingParams(temperature=1.0, max_tokens=6)
    async with drawn(near, asked_for, 5, sampling, 3) as found:
        texts = [each.text for each in found.group.answers]
    assert len(set(texts)) > 1
    longest = max(range(3), key=lambda place: found.group.answers[place].mean_logprob)
    text, tokens = await served(near, asked_for, 5, sampling, PartChoice(name="logprob"), 3)
    assert (text, tokens) == (texts[longest], sum(found.lengths))


async def test_a_piece_is_measured_again_only_in_another_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    async def measure(name: str, options: Namespace) -> Values:
        measured.append(name)
        return {}

    def planted(section: Section) -> Section:
        return replace(section, measure=measure, write=lambda report, pieces: None)

    monkeypatch.setattr(run, "SECTIONS", tuple(map(planted, run.SECTIONS)))
    out = str(tmp_path / "answers.md")
    await run.measure(parse(run.parser(), ["--out", out]))
    names = [name for section in run.SECTIONS for name in section.pieces]
    assert measured == names
    await run.measure(parse(run.parser(), ["--out", out, "--questions", "9", "--probing", "64"]))
    assert measured[len(names) :] == [
        "uncertainty-lists-large",
        "uncertainty-arithmetic-small",
        "real-questions",
        "real-asked",
    ]
