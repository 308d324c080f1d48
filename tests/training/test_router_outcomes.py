"""Outcomes: what a file of them may say, what is refused with its line, and what its rows come to."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from training.router_outcomes import Outcome, Outcomes, Sample
from turnout.errors import TurnoutError


def line(**values) -> str:
    return json.dumps({"prompt": "p", "correct_small": True, "correct_large": False, **values})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; at least one line is needed"),
        ("\n  \n", "is empty; at least one line is needed"),
        (line() + "\n{", "outcomes: line 2 is no JSON"),
        (line() + "\n[1]", "outcomes: line 2 must be an object"),
        (line(prompt=""), "outcomes: line 1: prompt: string should have at least 1 character"),
        (json.dumps({"correct_small": True, "correct_large": True}), "outcomes: line 1: prompt: is missing"),
        (
            json.dumps({"prompt": "p", "correct_small": True}),
            "line 1: correct_large: is missing; give correct_large or",
        ),
        (line(correct_small="perhaps"), "outcomes: line 1: correct_small: input should be a valid boolean"),
        (line(samples_small=[{"reward": 1}]), "line 1: correct_small: excludes samples_small; give one of them"),
        (line(correct_smal=True), "line 1: correct_smal: unknown; allowed here: correct_large, correct_small"),
        (line(correct_small=None, samples_small=[]), "line 1: samples_small: tuple should have at least 1 item"),
        (line(correct_small=None, samples_small=[{"reward": float("nan")}]), "line 1: samples_small.0.reward"),
        (line() + "\n" + line(correct_large=True), "line 2 contradicts line 1: the same prompt with another outcome"),
        (
            line() + "\n" + line(prompt=None, messages=[{"role": "user", "content": "p"}], correct_large=True),
            "line 2 contradicts line 1: the same prompt with another outcome",
        ),
    ],
)
def test_faulty_files_are_refused_with_the_line(tmp_path: Path, text: str, said: str):
    (tmp_path / "o.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(TurnoutError) as refused:
        Outcomes.read(tmp_path / "o.jsonl")
    assert said in str(refused.value)


def test_one_outcome_written_in_two_ways_is_no_contradiction(tmp_path: Path):
    again = [line(prompt=None, messages=[{"role": "user", "content": "p"}]), line(kind="other")]
    (tmp_path / "o.jsonl").write_text("\n".join([line(), *again]), encoding="utf-8")
    assert [row.prompt for row in Outcomes.read(tmp_path / "o.jsonl").rows] == ["p"]


def test_unreadable_files_are_refused(tmp_path: Path):
    with pytest.raises(TurnoutError, match="outcomes: cannot read"):
        Outcomes.read(tmp_path / "none.jsonl")
    (tmp_path / "o.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TurnoutError, match="is not UTF-8 text"):
        Outcomes.read(tmp_path / "o.jsonl")


def some(seed: int) -> Outcomes:
    """Five prompts, of whose answers some are right."""
    rng = random.Random(seed)

    def drawn() -> tuple[Sample, ...]:
        return tuple(
            Sample(reward=rng.randrange(2), tokens=10, entropy_bits=rng.random(), logprob=-rng.random())
            for _ in range(3)
        )

    rows = [
        Outcome(prompt=f"question {n}", kind="odd" if n % 2 else "even", samples_small=drawn(), samples_large=drawn())
        for n in range(5)
    ]
    return Outcomes.of(rows)


def test_what_is_written_is_read_and_repeated_rows_count_once(tmp_path: Path):
    outcomes = some(0)
    outcomes.write(tmp_path / "o.jsonl")
    assert Outcomes.read(tmp_path / "o.jsonl") == outcomes
    text = (tmp_path / "o.jsonl").read_text(encoding="utf-8")
    (tmp_path / "o.jsonl").write_text(text + text, encoding="utf-8")
    assert Outcomes.read(tmp_path / "o.jsonl") == outcomes
    other = some(1)
    assert other.digest != outcomes.digest


def test_rewards_and_means_of_a_row():
    samples = (Sample(reward=1, tokens=10, entropy_bits=0.5), Sample(reward=0, tokens=20))
    row = Outcome(prompt="p", correct_large=True, samples_small=samples)
    assert (row.reward("small"), row.reward("large")) == (0.5, 1.0)
    assert (row.mean("small", "tokens"), row.mean("small", "entropy_bits")) == (15.0, None)
