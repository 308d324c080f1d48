"""A passage of facts about invented people and one question, answered by the sentence that tells it."""

import random

from training.data.people import Person, draw_person
from training.data.problem import ANSWER_MARK, Problem, final_answer, is_heldout

DIFFICULTIES = (1, 2, 3, 4, 5)
_MAX_TRIES = 100_000
# fact: how a passage says it, how it is asked
_FACTS = {
    "city": ("{name} lives in {value}.", "Where does {name} live?"),
    "trade": ("{name} works as a {value}.", "What is the trade of {name}?"),
    "animal": ("{name} has a {value}.", "Which animal does {name} have?"),
    "colour": ("The house of {name} is {value}.", "What colour is the house of {name}?"),
    "birth_year": ("{name} was born in {value}.", "When was {name} born?"),
}
TASKS = tuple(_FACTS)


def _sentence(person: Person, fact: str) -> str:
    return _FACTS[fact][0].format(name=person.name, value=getattr(person, fact))


def draw(rng: random.Random, difficulty: int, task: str | None = None) -> Problem:
    """One passage about `difficulty` people and more sentences than that, and a question on one of its facts.

    Raises:
        ValueError: an unknown difficulty or task.
    """
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty must be one of {DIFFICULTIES}, got {difficulty}")
    fact = task or rng.choice(TASKS)
    if fact not in _FACTS:
        raise ValueError(f"task must be one of {TASKS}, got {fact!r}")
    people: list[Person] = []
    for _ in range(difficulty):
        people.append(draw_person(rng, frozenset(person.name.split()[0] for person in people)))
    asked = rng.choice(people)
    told = {(person, rng.choice(TASKS)) for person in people for _ in range(2)} | {(asked, fact)}
    sentences = sorted(_sentence(person, which) for person, which in told)
    rng.shuffle(sentences)
    result = str(getattr(asked, fact))
    prompt = " ".join(sentences) + "\n" + _FACTS[fact][1].format(name=asked.name)
    answer = f"{_sentence(asked, fact)}\n{ANSWER_MARK} {result}"
    return Problem(prompt, answer, result, difficulty, fact, key=f"{asked.name}:{fact}:{result}")


def draw_training(rng: random.Random, difficulty: int) -> Problem:
    """One problem that is not held out."""
    while is_heldout((problem := draw(rng, difficulty)).key):
        pass
    return problem


def heldout(difficulty: int, count: int, seed: int = 0, task: str | None = None) -> list[Problem]:
    """`count` distinct problems that training never sees; the same arguments give the same list.

    Raises:
        ValueError: an unknown difficulty or task, or more problems asked for than were found.
    """
    rng = random.Random(f"passages-heldout-{seed}-{difficulty}-{task}")
    found: dict[str, Problem] = {}
    for _ in range(_MAX_TRIES):
        if len(found) == count:
            return list(found.values())
        problem = draw(rng, difficulty, task)
        if is_heldout(problem.key):
            found.setdefault(problem.key, problem)
    raise ValueError(f"count must be at most {len(found)} at difficulty {difficulty}, got {count}")


def is_correct(problem: Problem, completion_text: str) -> bool:
    """Whether the line after the last answer mark of the completion is the asked fact."""
    return final_answer(completion_text) == problem.result
