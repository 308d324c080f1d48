"""Measuring cells: all sides answer the same prompts in turns, so that each turn gives pairs."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

from experiments.speculation.cells import Cell, Plan
from experiments.speculation.equality import Equality, check
from experiments.speculation.sides import OurSide, Side, Turn
from experiments.speculation.tasks import Prompt, TaskGroup
from pool.local_pool import LocalPool
from turnout.cost import SpeculationMeter

WARM_UP_TURNS = 2


@dataclass(frozen=True, slots=True)
class Panel:
    """The sides of cells that share a baseline, which answers once for all of them."""

    baseline: Side
    challengers: tuple[Side, ...]

    @property
    def sides(self) -> tuple[Side, ...]:
        """All of them, the baseline first."""
        return (self.baseline, *self.challengers)

    async def turn(self, number: int, prompts: dict[int, Prompt]) -> tuple[Turn, ...]:
        """Each side answers, in an order that rotates: a machine that slows down slows all."""
        start = number % len(self.sides)
        turns = {}
        for place in [*range(start, len(self.sides)), *range(start)]:
            turns[place] = await self.sides[place].answer(prompts)
        return tuple(turns[place] for place in range(len(self.sides)))

    def forget(self) -> None:
        """Drop what all sides learned and cached."""
        for side in self.sides:
            side.forget()


async def measure(plans: list[Plan], panel: Panel, group: TaskGroup, pool: LocalPool, least_turns: int) -> list[Cell]:
    """Measure cells that differ in nothing but their challenger: every prompt on every side, after a warm-up.

    What the sides learned in the warm-up is forgotten. What they learn from then on they keep until all prompts were
    asked; where these are asked once more, they begin anew.

    Args:
        plans: the cells.
        panel: their sides, challengers in the order of the cells.
        group: their prompts.
        pool: our engine, idle.
        least_turns: all prompts are asked again until there were at least that many turns.
    """
    load_average = os.getloadavg()[0]
    for number, prompts in enumerate(_turns(group.warm_up, plans[0].batch)[:WARM_UP_TURNS]):
        await panel.turn(number, prompts)
    once = _turns(group.prompts, plans[0].batch)
    asked: list[dict[int, Prompt]] = []
    turns: list[tuple[Turn, ...]] = []
    for repeat in range(-(-least_turns // len(once))):
        panel.forget()
        start = repeat * (len(once) + 1)  # so that the same prompts are not asked in the same order of sides again
        turns += [await panel.turn(number, prompts) for number, prompts in enumerate(once, start)]
        asked += once
    cells = []
    for plan, side, place in zip(plans, panel.challengers, itertools.count(1), strict=False):
        pairs = [(each[0], each[place]) for each in turns]
        equality = None
        if isinstance(side, OurSide) and isinstance(panel.baseline, OurSide):
            equality = await _equality(pool, side, list(zip(asked, pairs, strict=True)), str(plan.setting["dtype"]))
        cells.append(_cell(plan, pairs, len(once), pool, equality, load_average))
    panel.forget()
    return cells


def _cell(
    plan: Plan,
    pairs: list[tuple[Turn, Turn]],
    turns_once: int,
    pool: LocalPool,
    equality: Equality | None,
    load_average: float,
) -> Cell:
    speculation, steps, fed = _counted(pool, pairs)
    alike = [a.tokens == b.tokens for mine, theirs in pairs for a, b in zip(mine.answers, theirs.answers, strict=True)]
    return Cell(
        plan=plan,
        turns=[(a.seconds, a.num_tokens, b.seconds, b.num_tokens) for a, b in pairs],
        turns_once=turns_once,
        speculation=speculation,
        target_steps=steps,
        target_tokens=fed,
        equality=None if equality is None else equality.as_dict(),
        num_answers=len(alike),
        agreement=sum(alike) / len(alike),
        load_average=load_average,
    )


def _turns(prompts: tuple[Prompt, ...], batch: int) -> list[dict[int, Prompt]]:
    """The prompts in batches, each under its number."""
    numbered = list(enumerate(prompts))
    return [dict(numbered[start : start + batch]) for start in range(0, len(numbered), batch)]


async def _equality(
    pool: LocalPool, side: OurSide, turns: list[tuple[dict[int, Prompt], tuple[Turn, Turn]]], dtype: str
) -> Equality:
    found = Equality()
    for prompts, both in turns:
        found.add(await check(pool, side, prompts, both, dtype))
    return found


def _counted(pool: LocalPool, pairs: list[tuple[Turn, Turn]]) -> tuple[SpeculationMeter, int, float]:
    """What the challenger's answers cost the target: speculation's counters, forwards that gave tokens, tokens fed.

    A round of speculation is one such forward, the first one's prompt included. Plain decoding makes one where the
    prompt ends and one for each token it reads afterwards.
    """
    meter, steps, fed = SpeculationMeter(), 0, 0.0
    for _, turn in pairs:
        for answer in turn.answers:
            if answer.usage is None:
                continue
            meter.merge(answer.usage.speculation)
            target = answer.usage.models[pool.roles["large"]]
            steps += answer.usage.speculation.rounds or 1 + target.decode_tokens
            fed += target.processed_tokens - target.prompt_tokens - target.spared_tokens
    return meter, steps, fed
