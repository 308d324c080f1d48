"""What a calibration asks: rows read or refused by line and field, and answers judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from training.calibration_data import DEMO, demo_questions, read_questions
from turnout.errors import TurnoutError


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def rows(count: int = 8, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"question {index}", **more} for index in range(count)]


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        (
            {"answer": "42"},
            ["42", "it is 42.", "40+2=42\nAnswer: 42", "1,0 or 42.0"],
            ["43", "none", "42 or 43", "4 2"],
        ),
        ({"answer": 42}, ["42"], ["41"]),
        ({"answer": "1,200"}, ["Answer: 1200"], ["Answer: 1,201"]),
        ({"answer": "-7"}, ["so -7"], ["so 7"]),
        ({"answer": "a, b"}, ["a, b", " a, b \n", "b, a reversed\nAnswer: a, b"], ["a,b", "it is a, b"]),
        ({"answer": "42", "match": "exact"}, ["42", "Answer: 42"], ["it is 42", "42.0"]),
        ({"answer": r"\bRome\b", "match": "regex"}, ["in Rome."], ["Romeo"]),
    ],
)
def test_answers_are_judged(tmp_path: Path, row: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    found = read_questions(write(tmp_path / "x.jsonl", rows(**row)))
    judge = found.questions[0].judge
    assert judge is not None
    assert [judge(text) for text in right] == [1.0] * len(right)
    assert [judge(text) for text in wrong] == [0.0] * len(wrong)


def test_line_separators_inside_texts_end_no_line(tmp_path: Path) -> None:
    asked = [{"prompt": f"question {index}\u2028of\x85two\u2029lines"} for index in range(8)]
    found = read_questions(write(tmp_path / "a", [json.dumps(row, ensure_ascii=False) for row in asked]))
    assert [question.prompt for question in found.questions] == [row["prompt"] for row in asked]


def test_a_question_that_stands_there_again_counts_once_and_one_with_two_answers_is_refused(tmp_path: Path) -> None:
    """Repeats would make intervals too narrow; with two answers one of them is right whatever is said."""
    again = [*rows(9, answer="3"), *rows(3, answer="3")]
    assert len(read_questions(write(tmp_path / "a", again)).questions) == 9
    with pytest.raises(TurnoutError, match="data: b has 4 rows"):
        read_questions(write(tmp_path / "b", [*rows(4), *rows(4)]))
    for other in ({"answer": "4"}, {"answer": "3", "match": "exact"}):
        with pytest.raises(TurnoutError, match="data: row 10 contradicts row 3: the same prompt with another answer"):
            read_questions(write(tmp_path / "c", [*rows(9, answer="3"), {"prompt": "question 2", **other}]))


@pytest.mark.parametrize("answer", ["true", "NaN", "Infinity"])
def test_what_is_no_answer_is_refused(tmp_path: Path, answer: str) -> None:
    spoilt = f'{{"prompt": "question 8", "answer": {answer}}}'
    with pytest.raises(TurnoutError, match=r"data: (row|line) 9"):
        read_questions(write(tmp_path / "a", [*rows(8, answer="3"), spoilt]))


def test_measures_are_named(tmp_path: Path) -> None:
    assert read_questions(write(tmp_path / "a", rows())).measure == "agreement"
    assert read_questions(write(tmp_path / "b", rows(answer="3"))).measure == "numeric"
    both = [*rows(8, answer="3")[:4], *rows(8, answer="yes")[4:]]
    assert read_questions(write(tmp_path / "c", both)).measure == "mixed"


def test_a_digest_names_the_rows_and_not_the_file(tmp_path: Path) -> None:
    first = read_questions(write(tmp_path / "a", rows(answer="3")))
    spaced = [json.dumps(row, indent=None, separators=(", ", " : ")) for row in rows(answer="3")]
    assert read_questions(write(tmp_path / "b", [*spaced, ""])).digest == first.digest
    assert read_questions(write(tmp_path / "c", rows(answer="4"))).digest != first.digest
    assert len(read_questions(write(tmp_path / "d", rows(20)), count=9).questions) == 9


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "data: x.jsonl has 0 rows; at least 8 are needed"),
        (["", "  "], "data: x.jsonl has 0 rows"),
        (rows(7), "data: x.jsonl has 7 rows; at least 8 are needed"),
        ([*rows(2), {"answer": "3"}], "data: line 3.prompt: field required"),
        ([*rows(2), {"prompt": "  "}], "data: line 3.prompt: "),
        ([*rows(1), {"prompt": 3}], "data: line 2.prompt: "),
        ([*rows(1), '{"prompt": '], "data: line 2: is no JSON"),
        ([*rows(1), [1]], "data: line 2: "),
        ([{"prompt": "a", "anwser": "b"}], "data: line 1.anwser: unknown; allowed here: answer, match, prompt"),
        ([{"prompt": "a", "match": "regex"}], "match says how an answer is compared, and there is none"),
        ([{"prompt": "a", "answer": "(", "match": "regex"}], "answer is no regular expression"),
        ([{"prompt": "a", "answer": "b", "match": "numeric"}], "answer is compared as a number, and 'b' is none"),
        ([{"prompt": "a", "answer": "b", "match": "fuzzy"}], "line 1.match: "),
        ([*rows(8, answer="1"), *rows(9)[8:]], "data: row 9: answer: some rows have one and some have none"),
    ],
)
def test_bad_rows_are_refused_by_line_and_field(tmp_path: Path, lines: list[Any], said: str) -> None:
    with pytest.raises(TurnoutError) as caught:
        read_questions(write(tmp_path / "x.jsonl", lines))
    assert said in caught.value.message


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TurnoutError, match="data: cannot read"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TurnoutError, match="data: bytes is not UTF-8"):
        read_questions(tmp_path / "bytes")


@pytest.mark.parametrize("kind", ["arithmetic", "lists", "passages", "templates"])
def test_demo_problems_are_of_all_difficulties_and_judge_their_own_answers(kind: str) -> None:
    found = demo_questions(kind, 12)
    assert len({question.prompt for question in found.questions}) == len(found.questions) == 12
    assert demo_questions(kind, 12) == found or demo_questions(kind, 12).digest == found.digest
    data: Any = DEMO[kind]
    problem = data.heldout(1, 3, seed=31)[0]
    judge = found.questions[0].judge
    assert judge is not None
    assert found.questions[0].prompt == problem.prompt
    assert judge(problem.answer) == 1.0
    assert judge("no") == 0.0


def test_unknown_demo_kinds_and_too_few_are_refused() -> None:
    with pytest.raises(TurnoutError, match="demo: must be one of arithmetic, edits, lists, passages, templates"):
        demo_questions("poems", 20)
    with pytest.raises(TurnoutError, match="count: must be at least 8"):
        demo_questions("lists", 3)


@pytest.mark.parametrize(
    "again", [{"answer": "3"}, {"answer": "3.0"}, {"answer": 3, "match": "numeric"}, {"answer": 3.0}], ids=str
)
def test_one_answer_written_in_two_ways_is_no_contradiction(tmp_path: Path, again: dict[str, Any]) -> None:
    lines = [*rows(8, answer=3), {"prompt": "question 2", **again}]
    assert len(read_questions(write(tmp_path / "x.jsonl", lines)).questions) == 8


def test_rows_keep_their_numbers_and_count_says_how_many_different_ones(tmp_path: Path) -> None:
    lines = [rows(1)[0], *rows(9), {"prompt": "last", "answer": 1}]
    path = write(tmp_path / "x.jsonl", lines)
    with pytest.raises(TurnoutError, match=r"data: row 11: answer: some rows have one"):
        read_questions(path)
    found = read_questions(path, count=8)
    assert [each.row for each in found.questions] == [1, 3, 4, 5, 6, 7, 8, 9]
