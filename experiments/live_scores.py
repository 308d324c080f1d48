"""Scores of the answers in a route log, so that arms and shadows are compared by quality and not by cost alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from experiments.grid.answering import score_of
from experiments.grid.scoring import Item, JudgeChoice, Score, Scorer, ScorerChoice, open_scorer
from experiments.live import OK, Entry, divided
from training.router_runs import asked_in
from turnout.config import Section, read_yaml
from turnout.errors import invalid
from turnout.registry import validated

AT_ONCE = 8
UNKNOWN = "without texts in the log (set routing.log.texts)"
UNASKABLE = "asked with tools or token ids, or answered without text"
FAILED = "that the scorer could not score"


class _File(Section):
    """A file with a scorer, as a dataset of an experiment has one."""

    scorer: ScorerChoice


@dataclass(frozen=True, slots=True)
class Scored:
    """A log whose answers have scores.

    Attributes:
        entries: all of them; those that were scored have `score`.
        notes: how many were, and why the others were not.
    """

    entries: list[Entry]
    notes: list[str]


class _None(NamedTuple):
    """Reason why an answer has no score."""

    why: str
    said: str = ""


@dataclass(slots=True)
class _Scoring:
    """Scoring of each answer to each prompt, once: a shadow that says the same is as good, whatever a judge's mood."""

    scorer: Scorer
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    known: dict[tuple[str, str], asyncio.Task[float | _None]] = field(default_factory=dict)

    async def entry(self, entry: Entry) -> float | _None:
        """The mean score of its answers, or why there is none."""
        if "request" not in entry or "answers" not in entry:
            return _None(UNKNOWN)
        prompt = _prompt(entry["request"])
        if prompt is None or not entry["answers"]:
            return _None(UNASKABLE)
        found = [await self._answer(prompt, str(answer)) for answer in entry["answers"]]
        missing = [each for each in found if isinstance(each, _None)]
        return missing[0] if missing else sum(each for each in found if isinstance(each, float)) / len(found)

    async def _answer(self, prompt: str, answer: str) -> float | _None:
        if (prompt, answer) not in self.known:
            item = Item(str(len(self.known)), prompt)
            self.known[prompt, answer] = asyncio.create_task(self._score(item, answer))
        return await self.known[prompt, answer]

    async def _score(self, item: Item, answer: str) -> float | _None:
        async with self.slots:
            score = await score_of(self.scorer, item, answer, None, "")
        return score.value if isinstance(score, Score) else _None(FAILED, score.why)


def read_scorer(path: Path) -> ScorerChoice:
    """The scorer of a file: `scorer: {kind: judge, address: ...}`; paths in it count from its folder.

    Raises:
        TurnoutError: INVALID_ARGUMENT: cannot be read, or the scorer needs what a route log does not hold.
    """
    choice = validated(_File, read_yaml(path), "").scorer
    if choice.needs or choice.kind == "demo":
        needed = ", ".join(choice.needs)
        raise invalid("scorer.kind", f"{choice.kind} needs {needed} of each row, which no route log holds; take judge")
    if not isinstance(choice, JudgeChoice):
        return choice
    if choice.address is None:
        raise invalid("scorer.address", "is missing: name the gRPC address of a served model that judges")
    if choice.key_file is None:
        return choice
    key_file = path.resolve().parent / Path(choice.key_file).expanduser()
    return choice.model_copy(update={"key_file": str(key_file)})


async def score_entries(entries: list[Entry], choice: ScorerChoice, control: str) -> Scored:
    """Score the answers that a live report compares: those of the arms of a split, and of shadows with their requests.

    Args:
        entries: of a route log that holds texts.
        choice: who scores.
        control: of the report; "" leaves splits out.

    Raises:
        TurnoutError: INVALID_ARGUMENT: no answer could be scored.
    """
    wanted = _compared(entries, control)
    scoring = _Scoring(open_scorer(choice))
    found = await asyncio.gather(*(scoring.entry(entries[place]) for place in wanted))
    scores = {place: each for place, each in zip(wanted, found, strict=True) if isinstance(each, float)}
    notes = list(_notes([each for each in found if isinstance(each, _None)]))
    if wanted and not scores:
        raise invalid("scorer", f"scored none of {len(wanted)} answers: {'; '.join(notes)}")
    scored = [{**each, "score": scores[at]} if at in scores else each for at, each in enumerate(entries)]
    return Scored(scored, [f"scored by {choice.kind}: {len(scores)} of {len(wanted)} answers", *notes])


def _notes(missing: list[_None]) -> Iterator[str]:
    """How many have no score, by why, with the first thing that was said of one."""
    for why, count in Counter(each.why for each in missing).items():
        said = next((each.said for each in missing if each.why == why), "")
        yield f"not scored: {count} {why}" + (f", the first: {said}" if said else "")


def _compared(entries: list[Entry], control: str) -> list[int]:
    """Places of the entries whose answers are compared with others."""
    parted = divided(entries) if control else {}
    members = {id(each) for by_arm in parted.values() for arm in by_arm.values() for each in arm}
    ended = [(place, each) for place, each in enumerate(entries) if each["outcome"].get("status") == OK]
    keys: dict[str, set[tuple[str, str]]] = {"request": set(), "shadow": set()}
    for _, each in ended:
        keys.setdefault(each["kind"], set()).add(_key(each))
    paired = keys["request"] & keys["shadow"]
    return [place for place, each in ended if id(each) in members or _key(each) in paired]


def _key(entry: Entry) -> tuple[str, str]:
    return str(entry.get("pool", "")), str(entry["request_id"])


def _prompt(body: dict[str, Any]) -> str | None:
    """What was asked, as one text; None where it was not only text."""
    asked = asked_in(body)
    if asked is None or asked.messages is None:
        return asked.text if asked is not None else None
    if len(asked.messages) == 1:
        return asked.messages[0].content
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in asked.messages)
