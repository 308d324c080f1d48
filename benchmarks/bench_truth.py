"""Contrasts meant for true answers, on the real model: LOL (paper #147) and CAAD (paper #94), by capitals.

LOL: the amateur is the model tuned on countries whose capitals were exchanged; it is asked about states of the USA, of
which it learnt nothing. CAAD: the store has the true capitals of the states, which are asked for in other words; or
those of countries, to see what is carried over. An answer is true if it has the capital's name in it.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench_contrast import CAPITALS
from benchmarks.harness import Report, command_line, note, run, shown
from benchmarks.strategies import at_once
from benchmarks.verdicts import sentences
from experiments import real_model
from experiments.stats.intervals import Interval, paired_difference, wilson
from pool.local_pool import LocalPool
from training.amateur import SCHEDULE, exchanged, export, tune
from training.datastores import Settings, build_logits
from turnout.calls import ChatMessage, Chunk, GenerateCall
from turnout.config import ModelConfig
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

STATES = (
    "Alabama:Montgomery Alaska:Juneau Arizona:Phoenix Arkansas:Little California:Sacramento Colorado:Denver"
    " Connecticut:Hartford Delaware:Dover Florida:Tallahassee Georgia:Atlanta Hawaii:Honolulu Idaho:Boise"
    " Illinois:Springfield Indiana:Indianapolis Iowa:Moines Kansas:Topeka Kentucky:Frankfort Louisiana:Baton"
    " Maine:Augusta Maryland:Annapolis Massachusetts:Boston Michigan:Lansing Minnesota:St._Paul Mississippi:Jackson"
    " Missouri:Jefferson Montana:Helena Nebraska:Lincoln Nevada:Carson New_Hampshire:Concord New_Jersey:Trenton"
    " New_Mexico:Santa_Fe New_York:Albany North_Carolina:Raleigh North_Dakota:Bismarck Ohio:Columbus"
    " Oklahoma:Oklahoma_City Oregon:Salem Pennsylvania:Harrisburg Rhode_Island:Providence South_Carolina:Columbia"
    " South_Dakota:Pierre Tennessee:Nashville Texas:Austin Utah:Salt Vermont:Montpelier Virginia:Richmond"
    " Washington:Olympia West_Virginia:Charleston Wisconsin:Madison Wyoming:Cheyenne"
)
FACTS = dict(each.replace("_", " ").split(":") for each in STATES.split())  # or a word of the name
ASKED = "What is the capital of {place}?"
OTHERWISE = "Which city is the seat of government of the state of {place}?"
ANSWERED = "The capital of {place} is {city}."
AMATEUR = "amateur"


def lol(**params: Any) -> PartChoice:
    """LOL with the tuned amateur."""
    return PartChoice.of("lol", amateur=AMATEUR, **params)


LOL_WAYS: dict[str, PartChoice | None] = {
    "plain": None,
    "the amateur alone": None,
    "last layer (contrastive decoding with it)": lol(lower_weight=0.0, refocus=0.0),
    "and the lower layer": lol(refocus=0.0),
    "and the guide": lol(lower_weight=0.0),
    "all three, as by default": lol(),
    "all three, lower layer with weight 0.5": lol(lower_weight=0.5),
}


def caad(store: str, **params: Any) -> PartChoice:
    """CAAD with a store."""
    return PartChoice.of("caad", artifact=store, **params)


CAAD_WAYS: dict[str, PartChoice | None] = {
    "plain": None,
    "states, as by default": caad("states"),
    "states, the nearest context alone": caad("states", neighbours=1),
    "states, the nearest alone, weight 4": caad("states", neighbours=1, weight=4.0),
    "countries, as by default": caad("countries"),
    "countries, weight 4": caad("countries", weight=4.0),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """Answers of one way.

    Attributes:
        way: how.
        true: share of true answers.
        ahead: share of true answers less that of plain decoding, of the same questions.
    """

    way: str
    true: Interval
    ahead: Interval


async def said(pool: LocalPool, question: str, tokens: int, **fields: Any) -> str:
    """Answer a question greedily."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    messages = (ChatMessage("user", question),)
    call = GenerateCall(f"{question} {fields}", pool.name, sampling, messages=messages, method="plain", **fields)
    return "".join([event.text async for event in pool.generate(call) if isinstance(event, Chunk)])


async def truths(pool: LocalPool, question: str, places: list[str], tokens: int, **fields: Any) -> Any:
    """Say of each place whether its answer is true: float64 [places], 0 or 1."""
    work = [said(pool, question.format(place=place), tokens, **fields) for place in places]
    texts = await at_once(work, 16)
    return np.array([float(FACTS[place] in text) for place, text in zip(places, texts, strict=True)])


async def compared(
    pool: LocalPool, ways: dict[str, PartChoice | None], question: str, places: list[str], tokens: int
) -> list[Asked]:
    """Ask about all places in every way; the first is plain decoding."""
    rows, plain = list[Asked](), None
    for way, contrast in ways.items():
        note(way)
        fields: dict[str, Any] = {"contrast": contrast}
        if way == "the amateur alone":
            fields["params"] = {"model": AMATEUR}
        found = await truths(pool, question, places, tokens, **fields)
        plain = found if plain is None else plain
        rows.append(Asked(way, wilson(int(found.sum()), len(found)), paired_difference(found, plain)))
    return rows


def pairs_of(facts: dict[str, str]) -> list[tuple[str, str]]:
    """Questions with their true answers."""
    return [(ASKED.format(place=place), ANSWERED.format(place=place, city=city)) for place, city in facts.items()]


def pool_with(amateur: Path, artifacts: Path) -> LocalPool:
    """The real model, an amateur of it, and a folder of artifacts."""
    config = real_model.alone()
    large = config.models[config.pools[real_model.POOL].large]
    models = {**config.models, AMATEUR: ModelConfig(path=str(amateur), dtype=large.dtype, kv_memory_bytes=1 << 28)}
    pool = config.pools[real_model.POOL]
    pool = pool.model_copy(update={"artifacts": str(artifacts), "models": {AMATEUR: AMATEUR}})
    changes = {"models": models, "pools": {real_model.POOL: pool}}
    return LocalPool.load(real_model.POOL, config.model_copy(update=changes))


async def measure(options: argparse.Namespace) -> Report:
    """Tune the amateur, make the stores, and ask."""
    report = Report(
        "Contrasts for true answers",
        "`python -m benchmarks.bench_truth`: SmolLM2-135M-Instruct in bfloat16, greedy, as a chat; questions about the"
        " capitals of the states of the USA. An answer is true if it has the capital's name in it. Ahead: share of true"
        " answers less that of plain decoding. Intervals are of 95% (Wilson's; of the difference over the same"
        " questions).",
    )
    places = list(FACTS)[: options.states]
    with tempfile.TemporaryDirectory() as folder:
        tuned, artifacts = Path(folder) / AMATEUR, Path(folder) / "artifacts"
        artifacts.mkdir()
        note(f"tuning the amateur, {options.steps} steps")
        warmup = min(SCHEDULE.warmup_steps, options.steps // 2)
        schedule = replace(SCHEDULE, steps=options.steps, warmup_steps=warmup)
        made = tune(real_model.model_folder(), exchanged(pairs_of(CAPITALS)), schedule)
        export(made, real_model.model_folder(), torch.bfloat16, tuned)
        pool = pool_with(tuned, artifacts)
        try:
            await _lol(report, pool, places, options, made.report["heldout_nats_per_token"])
            await _caad(report, pool, places, options, artifacts)
        finally:
            await pool.close()
    return report


COLUMNS: dict[str, Any] = {
    "way": lambda row: row.way,
    "true": lambda row: shown(row.true, 2),
    "ahead of plain": lambda row: shown(row.ahead, 2),
}


def ahead_of_plain(rows: list[Asked]) -> str:
    """Say which ways are surely better or worse than the first one, plain decoding."""
    return sentences("plain decoding", {row.way: {"": row.ahead} for row in rows[1:]})


async def _lol(
    report: Report, pool: LocalPool, places: list[str], options: argparse.Namespace, surprise: dict[str, float]
) -> None:
    rows = await compared(pool, LOL_WAYS, ASKED, places, options.tokens)
    report.section("LOL")
    report.text(
        f"The amateur was tuned in {options.steps} steps on {len(CAPITALS)} countries with capitals exchanged, every"
        f" eighth held out: false answers went from {surprise['before']:.2f} to {surprise['after']:.2f} nats a token."
    )
    report.table("lol", rows, COLUMNS)
    report.text(ahead_of_plain(rows))


async def _caad(
    report: Report, pool: LocalPool, places: list[str], options: argparse.Namespace, artifacts: Path
) -> None:
    model, cosines = pool.engines[pool.roles["large"]], dict[str, float]()
    for name, facts in (("states", {place: FACTS[place] for place in places}), ("countries", CAPITALS)):
        note(f"reading {name}")
        made = await build_logits(model, pool.tokenizer, pairs_of(facts), Settings(most=2000))
        made.artifact.save(artifacts / f"{name}.safetensors")
        cosines[name] = made.report["cosine_of_other_examples"]
    rows = await compared(pool, CAAD_WAYS, OTHERWISE, places, options.tokens)
    report.section("CAAD")
    report.text(
        "Each state is asked about in other words than those that its store was made with. Contexts of different"
        f" examples reach a cosine of {cosines['states']:.2f} (median)."
    )
    report.table("caad", rows, COLUMNS)
    report.text(ahead_of_plain(rows))


if __name__ == "__main__":
    made = command_line(__doc__, Path("docs/results/truth.md"), rounds=None, states=4, steps=2, tokens=6)
    made.add_argument("--states", type=int, default=len(FACTS), help="asked about")
    made.add_argument("--steps", type=int, default=60, help="of the amateur's tuning")
    made.add_argument("--tokens", type=int, default=20, help="of an answer")
    run(made, measure)
