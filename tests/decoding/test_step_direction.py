"""The direction of seed 221: what a lower threshold costs in quality and spares in time, on planted mistakes."""

from __future__ import annotations

import random

from decoding.fakes import TableModel
from decoding.model import ModelPool
from tests.decoding.step_models import answer, pool, scripted, text

QUESTIONS, LINES, WIDTH = 40, 3, 8
# A forward of the large model takes as long as ten of the small one.
SECONDS = {"small": 1.0, "large": 10.0}
THRESHOLDS = [0, 3, 5, 7, 9, 10]


def writer(name: str, mistakes: bool, grades: bool = False) -> TableModel:
    """Writes numbered lines of one letter: a, or b where it is mistaken. A question mark asks for the last one's grade.

    Grades of right lines lie above those of wrong ones, but for some.
    """

    def script(written: str) -> str:
        question, *lines = written.split("\n")
        if grades and written.endswith("?"):
            chance, line = random.Random(f"grade {question} {len(lines)}"), lines[-2]
            return str(chance.randint(1, 6) if "b" in line else chance.randint(6, 9))
        if len(lines) > LINES:
            return "$"
        if len(lines[-1]) < 2:
            slip = mistakes and random.Random(f"slip {question} {len(lines)}").random() < 0.25
            return ("b" if slip else "a") if lines[-1] else str(len(lines))
        return lines[-1][1] if len(lines[-1]) < WIDTH else "\n"

    return scripted(name, script)


async def asked(method: str, params: dict[str, object]) -> tuple[int, float]:
    """How many questions are answered without a mistake, and the time of all."""
    models: ModelPool = pool(writer("small", mistakes=True), writer("large", mistakes=False, grades=True))
    right = 0
    for number in range(QUESTIONS):
        seq, _, _ = await answer(models, method, params, prompt=f"{number}\n", max_tokens=LINES * (WIDTH + 1) + 1)
        written = text(seq.tokens)
        assert (written.count("\n"), written[-1]) == (1 + LINES, "$")
        right += "b" not in written
    return right, sum(SECONDS[model.name] * model.forwards for model in (models.small, models.large))  # type: ignore[attr-defined]


async def test_time_falls_and_quality_nears_the_small_models_as_the_threshold_falls() -> None:
    params = {"scorer": {"name": "self_grade", "question": "?"}}
    found = [await asked("step_speculation", {**params, "threshold": threshold}) for threshold in THRESHOLDS]
    small, large = [await asked("plain", {"model": role}) for role in ("small", "large")]
    rights, times = [right for right, _ in found], [time for _, time in found]
    assert rights == sorted(rights)
    assert times == sorted(times)
    assert rights[0] == small[0] < rights[2] < rights[3] == large[0] == QUESTIONS
    assert times[0] < times[2] < times[3] < times[5]
    # At the paper's threshold nothing is lost and time is won; at the ends, one of the models alone is quicker.
    assert times[3] < 0.8 * large[1]
    assert times[0] > small[1]
    assert times[5] > large[1]
