"""What a calibration asks, and how it tells whether an answer is good."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StringConstraints, ValidationError, model_validator

from training.data import arithmetic, edits, lists, passages, templates
from training.data.problem import Problem, final_answer
from turnout.errors import invalid
from turnout.registry import explain

Judge = Callable[[str], float]

FEWEST = 8
DEMO = {"arithmetic": arithmetic, "edits": edits, "lists": lists, "passages": passages, "templates": templates}
DEMO_SEED = 31  # not the seeds that evaluations use
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


class Row(BaseModel):
    """One line of a calibration file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    answer: Annotated[
        str | StrictInt | Annotated[float, Field(strict=True, allow_inf_nan=False)] | None,
        Field(description="absent: agreement with the large model counts"),
    ] = None
    match: Annotated[
        Literal["exact", "numeric", "regex"] | None,
        Field(description="absent: numeric where the answer is a number, else exact"),
    ] = None

    @model_validator(mode="after")
    def _check_match(self) -> Row:
        if self.match is not None and self.answer is None:
            raise ValueError("match says how an answer is compared, and there is none")
        if self.match == "numeric" and _number(str(self.answer)) is None:
            raise ValueError(f"answer is compared as a number, and {self.answer!r} is none")
        if self.match == "regex":
            try:
                re.compile(str(self.answer))
            except re.error as error:
                raise ValueError(f"answer is no regular expression: {error}") from None
        return self

    @property
    def wanted(self) -> tuple[str | None, str | float | None]:
        """What an answer must be, however it is written: equal for rows that judge every answer alike."""
        text = None if self.answer is None else str(self.answer)
        if text is None or self.measure == "regex":
            return self.measure, text
        return self.measure, _number(text) if self.measure == "numeric" else text.strip()

    @property
    def measure(self) -> str | None:
        """How an answer is compared; None where there is none to compare with."""
        if self.answer is None or self.match is not None:
            return self.match
        return "exact" if _number(str(self.answer)) is None else "numeric"


@dataclass(frozen=True)
class Question:
    """A prompt.

    Attributes:
        judge: tells from 0 to 1 how good an answer is; None: agreement with the large model does.
        row: its number where it comes from, from 1, for refusals.
    """

    prompt: str
    judge: Judge | None
    row: int = 1


@dataclass(frozen=True)
class QuestionSet:
    """What is asked.

    Attributes:
        questions: at least `FEWEST`; all with a judge, or none.
        measure: exact, numeric, regex, mixed, or agreement.
        source: where they come from, for people.
        digest: 32 hexadecimal digits of their content.
    """

    questions: tuple[Question, ...]
    measure: str
    source: str
    digest: str


def read_questions(path: Path, count: int | None = None) -> QuestionSet:
    """Questions of a file: JSON objects with `prompt`, and perhaps `answer` and `match`, one a line.

    Args:
        path: the file.
        count: only the first `count` prompts, duplicates counted once.

    Raises:
        TurnoutError: INVALID_ARGUMENT: unreadable, too few rows, or a row at fault, naming its line and field.
    """
    found = _distinct(_rows(path))[:count]
    rows = [row for _, row in found]
    if len(rows) < FEWEST:
        raise invalid("data", f"{path.name} has {len(rows)} rows; at least {FEWEST} are needed")
    measures = {row.measure for row in rows}
    if None in measures and len(measures) > 1:
        number = next(number for number, row in found if (row.measure is None) != (rows[0].answer is None))
        raise invalid(
            "data", f"row {number}: answer: some rows have one and some have none; give all of them one, or none"
        )
    kinds = {measure for measure in measures if measure is not None}
    measure = "agreement" if not kinds else kinds.pop() if len(kinds) == 1 else "mixed"
    questions = tuple(Question(row.prompt, _judge(row), number) for number, row in found)
    return QuestionSet(questions, measure, path.name, _digest([row.model_dump(mode="json") for row in rows]))


def _distinct(rows: list[Row]) -> list[tuple[int, Row]]:
    """Each row once, with its number: what stands there again tells nothing new, and would make intervals too narrow.

    Raises:
        TurnoutError: INVALID_ARGUMENT: one prompt has two answers, or is compared in two ways.
    """
    seen: dict[str, tuple[int, Row]] = {}
    for number, row in enumerate(rows, start=1):
        before, first = seen.setdefault(row.prompt, (number, row))
        if first.wanted != row.wanted:
            raise invalid("data", f"row {number} contradicts row {before}: the same prompt with another answer")
    return list(seen.values())


def demo_questions(kind: str, count: int) -> QuestionSet:
    """Held-out problems of the kind the demo models were trained on, from all difficulties alike.

    Raises:
        TurnoutError: INVALID_ARGUMENT: no such kind, or too few.
    """
    if kind not in DEMO:
        raise invalid("demo", f"must be one of {', '.join(DEMO)} (got {kind!r})")
    if count < FEWEST:
        raise invalid("count", f"must be at least {FEWEST} (got {count})")
    data: Any = DEMO[kind]
    each = -(-count // len(data.DIFFICULTIES))
    by_grade = [data.heldout(grade, each, seed=DEMO_SEED) for grade in data.DIFFICULTIES]
    problems: list[Problem] = [problem for level in zip(*by_grade, strict=True) for problem in level][:count]
    questions = tuple(
        Question(problem.prompt, partial(is_right, data, problem), row) for row, problem in enumerate(problems, start=1)
    )
    digest = _digest([[problem.prompt, problem.result] for problem in problems])
    return QuestionSet(questions, "exact", f"demo {kind}", digest)


def is_right(data: Any, problem: Problem, text: str) -> float:
    """Whether a text answers a problem of one of the demo's kinds: 1.0 or 0.0."""
    return float(data.is_correct(problem, text))


def _rows(path: Path) -> list[Row]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines also cuts at separators inside texts
    except OSError as error:
        raise invalid("data", f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise invalid("data", f"{path.name} is not UTF-8 text") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(Row.model_validate(json.loads(line)))
        except json.JSONDecodeError as error:
            raise invalid("data", f"line {number}: is no JSON ({error.msg})") from None
        except ValidationError as error:
            raise explain(error, f"data: line {number}", Row) from None
    return rows


def _judge(row: Row) -> Judge | None:
    if row.answer is None:
        return None
    wanted = str(row.answer)
    if row.measure == "regex":
        pattern = re.compile(wanted)
        return lambda text: float(pattern.search(text) is not None)
    if row.measure == "numeric":
        number = _number(wanted)
        return lambda text: float(_last_number(text) == number)
    return lambda text: float(_final(text) == wanted.strip())


def _final(text: str) -> str:
    """What follows the last answer mark; the whole text where there is none."""
    marked = final_answer(text)
    return text.strip() if marked is None else marked


def _number(text: str) -> float | None:
    try:
        number = float(text.strip().replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(_final(text))
    return _number(found[-1]) if found else None


def _digest(rows: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(rows, sort_keys=True).encode(), digest_size=16).hexdigest()
