"""Forms to be filled: the question lists the fields, the answer is a fixed text around them."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from training.data.people import ANIMALS, COLOURS, GOODS, draw_date, draw_person
from training.data.problem import Problem, is_heldout

DIFFICULTIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class _Form:
    """`request` and `text` with the same fields; `entry` is repeated once per grade of difficulty."""

    fields: Callable[[random.Random], dict[str, object]]
    entry_fields: Callable[[random.Random], dict[str, object]]
    request: str
    request_entry: str
    text: str
    entry: str


def _person_and_date(rng: random.Random) -> dict[str, object]:
    person = draw_person(rng)
    return {"name": person.name, "city": person.city, "date": draw_date(rng), "number": rng.randint(100, 999)}


def _goods(rng: random.Random) -> dict[str, object]:
    return {"count": rng.randint(2, 9), "goods": rng.choice(GOODS), "price": rng.randint(2, 99)}


def _beast(rng: random.Random) -> dict[str, object]:
    return {"colour": rng.choice(COLOURS), "animal": rng.choice(ANIMALS), "age": rng.randint(1, 14)}


_FORMS: dict[str, _Form] = {
    "invoice": _Form(
        _person_and_date,
        _goods,
        "Write an invoice: {name}, {city}, {date}, number {number}",
        "; {count} {goods} at {price}",
        "Invoice {number}\nDate: {date}\nDear {name},\nwe have sent the following goods to you in {city}:\n{entries}"
        "Please pay within thirty days and give the number {number} with your payment.\nYours faithfully\n",
        "- {count} {goods} at {price} euros each\n",
    ),
    "record": _Form(
        _person_and_date,
        _beast,
        "Write a record: {name}, {city}, {date}, number {number}",
        "; {colour} {animal} of {age}",
        '{{\n  "id": {number},\n  "owner": "{name}",\n  "city": "{city}",\n  "date": "{date}",\n  "animals": [\n'
        "{entries}  ]\n}}\n",
        '    {{"kind": "{animal}", "colour": "{colour}", "age": {age}}},\n',
    ),
    "invitation": _Form(
        _person_and_date,
        _goods,
        "Write an invitation: {name}, {city}, {date}, room {number}",
        "; {count} {goods}, gate {price}",
        "Dear {name},\nwe would be glad to see you in {city} on {date}. The meeting is in room {number}.\n{entries}"
        "Please tell us by letter whether you can come. We look forward to your answer.\nWith kind regards\n",
        "Please bring {count} {goods} and leave them at gate {price}.\n",
    ),
}
TASKS = tuple(_FORMS)


def draw(rng: random.Random, difficulty: int, task: str | None = None) -> Problem:
    """One form with `difficulty` entries; a random form unless one is named.

    Raises:
        ValueError: an unknown difficulty or task.
    """
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty must be one of {DIFFICULTIES}, got {difficulty}")
    name = task or rng.choice(TASKS)
    if name not in _FORMS:
        raise ValueError(f"task must be one of {TASKS}, got {name!r}")
    form = _FORMS[name]
    fields = form.fields(rng)
    entries = [form.entry_fields(rng) for _ in range(difficulty)]
    prompt = form.request.format(**fields) + "".join(form.request_entry.format(**entry) for entry in entries)
    answer = form.text.format(**fields, entries="".join(form.entry.format(**entry) for entry in entries))
    return Problem(prompt, answer, answer, difficulty, name, key=prompt)


def draw_training(rng: random.Random, difficulty: int) -> Problem:
    """One form that is not held out."""
    while is_heldout((problem := draw(rng, difficulty)).key):
        pass
    return problem


def heldout(difficulty: int, count: int, seed: int = 0, task: str | None = None) -> list[Problem]:
    """`count` distinct forms that training never sees; the same arguments give the same list."""
    rng = random.Random(f"templates-heldout-{seed}-{difficulty}-{task}")
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw(rng, difficulty, task)
        if is_heldout(problem.key):
            found.setdefault(problem.key, problem)
    return list(found.values())


def is_correct(problem: Problem, completion_text: str) -> bool:
    """Whether the completion is the filled form, but for blanks at its ends."""
    return completion_text.strip() == problem.result.strip()
