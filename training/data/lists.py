"""Graded list and letter tasks: sort, reverse, largest, smallest, count a letter, running sums."""

import random
from collections.abc import Callable

from training.data.problem import ANSWER_MARK, Problem, final_answer, is_heldout

DIFFICULTIES = (1, 2, 3, 4, 5)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MAX_TRIES = 100_000


def list_len(difficulty: int) -> int:
    """Number of items in a list of this difficulty."""
    return difficulty + 2


def _numbers(rng: random.Random, count: int) -> list[int]:
    return rng.sample(range(1, 100), count)


def _joined(items: list[int] | list[str]) -> str:
    return ", ".join(str(item) for item in items)


def _sort(rng: random.Random, count: int) -> tuple[str, str, str]:
    numbers = _numbers(rng, count)
    prompt = rng.choice(("Sort {}.", "Put {} in rising order.", "Sort the list {}.")).format(_joined(numbers))
    return prompt, "", _joined(sorted(numbers))


def _reverse(rng: random.Random, count: int) -> tuple[str, str, str]:
    if rng.random() < 0.5:
        items = _joined(_numbers(rng, count))
    else:
        items = _joined([rng.choice(_LETTERS) for _ in range(count)])
    prompt = rng.choice(("Reverse {}.", "Reverse the list {}.", "Write {} backwards.")).format(items)
    return prompt, "", _joined(items.split(", ")[::-1])


def _extreme(name: str, pick: Callable[[int, int], int]) -> Callable[[random.Random, int], tuple[str, str, str]]:
    def build(rng: random.Random, count: int) -> tuple[str, str, str]:
        numbers = _numbers(rng, count)
        prompt = rng.choice((f"Find the {name} of {{}}.", f"Which is the {name} of {{}}?")).format(_joined(numbers))
        best = numbers[0]
        trail = [best]
        for number in numbers[1:]:
            best = pick(best, number)
            trail.append(best)
        return prompt, f"So far: {_joined(trail)}\n", str(best)

    return build


def _count(rng: random.Random, count: int) -> tuple[str, str, str]:
    letters = [rng.choice(_LETTERS) for _ in range(2)]
    word = [rng.choice(letters) if rng.random() < 0.6 else rng.choice(_LETTERS) for _ in range(count + 2)]
    wanted = letters[0]
    spelled = " ".join(word)
    prompt = rng.choice((f"Count {wanted} in {spelled}.", f"How often is {wanted} in {spelled}?"))
    seen = 0
    trail: list[str] = []
    for letter in word:
        seen += letter == wanted
        trail.append(f"{letter} {seen}")
    return prompt, _joined(trail) + "\n", str(seen)


def _running_sum(rng: random.Random, count: int) -> tuple[str, str, str]:
    numbers = [rng.randint(1, 50) for _ in range(count)]
    prompt = rng.choice(("Give the running sums of {}.", "Running sum of {}?")).format(_joined(numbers))
    sums = [numbers[0]]
    steps: list[str] = []
    for number in numbers[1:]:
        sums.append(sums[-1] + number)
        steps.append(f"{sums[-2]}+{number}={sums[-1]}\n")
    return prompt, "".join(steps), _joined(sums)


_BUILDERS: dict[str, Callable[[random.Random, int], tuple[str, str, str]]] = {
    "sort": _sort,
    "reverse": _reverse,
    "largest": _extreme("largest", max),
    "smallest": _extreme("smallest", min),
    "count": _count,
    "running_sum": _running_sum,
}
TASKS = tuple(_BUILDERS)


def draw(rng: random.Random, difficulty: int, task: str | None = None) -> Problem:
    """One problem of the difficulty, held out or not; a random task unless one is named."""
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty must be one of {DIFFICULTIES}, got {difficulty}")
    name = task or rng.choice(TASKS)
    if name not in _BUILDERS:
        raise ValueError(f"task must be one of {TASKS}, got {name!r}")
    prompt, work, result = _BUILDERS[name](rng, list_len(difficulty))
    return Problem(prompt, f"{work}{ANSWER_MARK} {result}", result, difficulty, name, key=_key(name, prompt))


def _key(task: str, prompt: str) -> str:
    """The task and its items; the wording around them is dropped."""
    items = [piece.strip(".?,") for piece in prompt.split()]
    return task + ":" + " ".join(piece for piece in items if piece.isdigit() or len(piece) == 1)


def draw_training(rng: random.Random, difficulty: int) -> Problem:
    """One problem that is not held out."""
    while is_heldout((problem := draw(rng, difficulty)).key):
        pass
    return problem


def heldout(difficulty: int, count: int, seed: int = 0, task: str | None = None) -> list[Problem]:
    """`count` distinct problems that training never sees; the same arguments give the same list.

    Raises:
        ValueError: an unknown difficulty or task, or more problems asked for than the split holds.
    """
    rng = random.Random(f"lists-heldout-{seed}-{difficulty}-{task}")
    found: dict[str, Problem] = {}
    for _ in range(_MAX_TRIES):
        if len(found) == count:
            return list(found.values())
        problem = draw(rng, difficulty, task)
        if is_heldout(problem.key):
            found.setdefault(problem.key, problem)
    raise ValueError(f"count must be at most {len(found)} at difficulty {difficulty}, got {count}")


def is_correct(problem: Problem, completion_text: str) -> bool:
    """Whether the line after the last answer mark of the completion is the problem's result."""
    return final_answer(completion_text) == problem.result
