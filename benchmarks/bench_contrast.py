"""Contrasts on the real model: context against memory (paper #169), and what kNN-LM does to text (paper #174).

Context against memory: the model begins to write a country's capital after a text that names another city. Countries
whose capital it does not know without the text are left out. An answer counts by the city that it names first.

kNN-LM: a datastore of texts, the surprise of held-out ones with and without it, and passages that the model continues.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench_processors import repeated
from benchmarks.harness import Report, command_line, note, run, shown
from benchmarks.strategies import at_once
from decoding.contrast import savcd
from decoding.contrast.knn_lm import TokenStore
from decoding.model import Model, ReadSpec
from decoding.sequence import Sequence
from experiments import real_model
from experiments.stats.intervals import Interval, bootstrap_mean, wilson
from pool.local_pool import LocalPool
from training.datastores import Settings, build_tokens
from turnout.calls import Chunk, GenerateCall
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

PAIRS = (
    "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Austria:Vienna Hungary:Budapest"
    " Poland:Warsaw Greece:Athens Sweden:Stockholm Norway:Oslo Denmark:Copenhagen Finland:Helsinki Ireland:Dublin"
    " Belgium:Brussels Switzerland:Bern Russia:Moscow Ukraine:Kyiv Romania:Bucharest Bulgaria:Sofia Serbia:Belgrade"
    " Croatia:Zagreb Turkey:Ankara Egypt:Cairo Kenya:Nairobi Nigeria:Abuja Ghana:Accra Ethiopia:Addis Morocco:Rabat"
    " Tunisia:Tunis Japan:Tokyo China:Beijing India:New Thailand:Bangkok Vietnam:Hanoi Indonesia:Jakarta"
    " Malaysia:Kuala Iran:Tehran Iraq:Baghdad Israel:Jerusalem Lebanon:Beirut Canada:Ottawa Cuba:Havana Peru:Lima"
    " Chile:Santiago Argentina:Buenos Colombia:Bogot Venezuela:Caracas Ecuador:Quito Uruguay:Montevideo Bolivia:La"
    " Australia:Canberra Nepal:Kathmandu Pakistan:Islamabad Afghanistan:Kabul Mongolia:Ulaanbaatar"
)
CAPITALS = dict(each.split(":") for each in PAIRS.split())  # or how their names begin
CITIES = ("Lyon", "Hamburg", "Milan", "Seville", "Osaka", "Boston", "Calgary", "Melbourne", "Mumbai", "Glasgow")
# What stands before the question: said plainly, said in other words, and about something else.
CONTEXTS = {
    "contradicts": "The capital of {country} is {city}.",
    "contradicts in other words": (
        "Parliament moved out of its old seat last year."
        " Since then {city} has been the seat of government of {country}."
    ),
    "says nothing of it": "The weather in {city} was mild, and many people went for a walk along the river.",
}
QUESTION = "Question: What is the capital of {country}?\nAnswer: The capital of {country} is"
WAYS: dict[str, PartChoice | None] = {
    "plain": None,
    "cad, alpha 0.5": PartChoice.of("cad", alpha=0.5),
    "cad, alpha 1": PartChoice.of("cad", alpha=1.0),
    "cad, alpha 2": PartChoice.of("cad", alpha=2.0),
    "savcd, alpha 1": PartChoice.of("savcd", alpha=1.0),
    "savcd, alpha 1, drop": PartChoice.of("savcd", alpha=1.0, distortion="drop"),
}
CORPUS = Path("docs")
PREFIX, THIRD = 24, 3


@dataclass(frozen=True, slots=True)
class Following:
    """Of one way and one kind of context: shares of answers that follow the context, or memory."""

    context: str
    way: str
    follows_context: Interval
    follows_memory: Interval
    answers: int


@dataclass(frozen=True, slots=True)
class Written:
    """Passages continued with or without the datastore.

    Attributes:
        way: how.
        repeated: share of 4-grams that occurred before in the answer.
        law: mean entropy of the model's law, nats, in the first and in the last third of an answer.
        found: the same of the neighbours' law.
    """

    way: str
    repeated: Interval
    law: tuple[float, float]
    found: tuple[float, float]


async def answered(pool: LocalPool, prompt: str, tokens: int, **fields: Any) -> tuple[str, list[int]]:
    """Continue a prompt greedily: the text, and its ids."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    call = GenerateCall(f"{prompt[:8]} {fields}", pool.name, sampling, prompt=prompt, method="plain", **fields)
    chunks = [event async for event in pool.generate(call) if isinstance(event, Chunk)]
    return "".join(each.text for each in chunks), [token.id for each in chunks for token in each.tokens]


def named(text: str, country: str, city: str) -> str:
    """Say which of two cities a text names first: context, memory, or neither."""
    places = {"context": text.find(city), "memory": text.find(CAPITALS[country])}
    found = {name: place for name, place in places.items() if place >= 0}
    return min(found, key=lambda name: found[name]) if found else "neither"


async def known(pool: LocalPool, tokens: int, most: int) -> list[tuple[str, str]]:
    """Countries whose capital the model knows, each with another city."""
    asked = list(CAPITALS)[:most]
    texts = await at_once([answered(pool, QUESTION.format(country=each), tokens) for each in asked], 16)
    kept = [each for each, (text, _) in zip(asked, texts, strict=True) if CAPITALS[each] in text]
    return [(country, CITIES[place % len(CITIES)]) for place, country in enumerate(kept)]


async def following(pool: LocalPool, asked: Items[tuple[str, str]], kind: str, way: str, tokens: int) -> Following:
    """Ask about all countries after one kind of context."""
    work = [
        answered(
            pool,
            QUESTION.format(country=country),
            tokens,
            contrast=WAYS[way],
            context=CONTEXTS[kind].format(country=country, city=city),
        )
        for country, city in asked
    ]
    texts = await at_once(work, 16)
    counts = [named(text, *each) for (text, _), each in zip(texts, asked, strict=True)]
    shares = [wilson(counts.count(side), len(counts)) for side in ("context", "memory")]
    return Following(kind, way, shares[0], shares[1], len(counts))


async def choices(pool: LocalPool, asked: Items[tuple[str, str]]) -> str:
    """Say how often the model chooses which distortion of savcd by these questions."""
    most = savcd.SavcdParams().choice_tokens
    questions = [savcd.QUESTION.format(question=QUESTION.format(country=country)) for country, _ in asked]
    texts = await at_once([answered(pool, each, most) for each in questions], 16)
    counts = Counter(savcd.chosen(text) for text, _ in texts)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def corpus() -> list[str]:
    """Paragraphs of the documentation, without tables and code."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(CORPUS.glob("*.md"))]
    found = [text for page in pages for text in page.split("\n\n") if len(text) > 200]
    return [" ".join(text.split()) for text in found if not text.startswith(("|", "```", "<!--", "- "))]


async def entropies(model: Model, store: TokenStore, ids: list[int], first: int, knn: dict[str, Any]) -> Any:
    """Entropies of the model's and the neighbours' law at each token of an answer, nats: float64 [tokens, 2]."""
    seq = Sequence(ids[:first], SamplingParams(max_tokens=1), 0)
    want = ReadSpec(draw=None, logits=True, hidden=frozenset({-1}))
    try:
        rows = await model.extend(seq, tuple(ids[first:-1]), want, every=True)
    finally:
        model.release(seq)
    made = []
    for row in rows:
        assert row.logits is not None
        law = store.law(store.key_of(row.hidden[-1]), knn["neighbours"], knn["temperature"], model.vocab_size)
        both = (row.logits.float().softmax(-1), law)
        made.append([float(torch.special.entr(each).sum()) for each in both])
    return np.array(made)


async def written(pool: LocalPool, store: TokenStore, texts: list[str], tokens: int, knn: dict[str, Any]) -> Any:
    """Continue passages without and with the datastore."""
    model = pool.engines[pool.roles["large"]]
    rows = []
    for way, contrast in (("plain", None), ("knn_lm", PartChoice.of("knn_lm", **knn))):
        note(f"continuing, {way}")
        prompts = [" ".join(text.split()[:PREFIX]) for text in texts]
        made = await at_once([answered(pool, each, tokens, contrast=contrast) for each in prompts], 8)
        encoded = [pool.tokenizer.encode(each) for each in prompts]
        read = [
            await entropies(model, store, [*prompt, *ids], len(prompt), knn)
            for prompt, (_, ids) in zip(encoded, made, strict=True)
        ]
        third = max(1, tokens // THIRD)
        begun, ended = (
            np.mean([each[part].mean(0) for each in read], 0) for part in (slice(third), slice(-third, None))
        )
        shares = np.array([repeated(ids) for _, ids in made])
        ends = [(float(begun[side]), float(ended[side])) for side in (0, 1)]
        rows.append(Written(way, bootstrap_mean(shares, seed=0), ends[0], ends[1]))
    return rows


async def measure(options: argparse.Namespace) -> Report:
    """Context against memory, then kNN-LM."""
    report = Report(
        "Contrasts",
        "`python -m benchmarks.bench_contrast`: SmolLM2-135M-Instruct in bfloat16, greedy, prompts without a chat"
        " template. Intervals are of 95% (Wilson's, or of the mean by resampling).",
    )
    with tempfile.TemporaryDirectory() as folder:
        config = real_model.alone()
        named_pool = config.pools[real_model.POOL].model_copy(update={"artifacts": folder})
        pool = LocalPool.load(real_model.POOL, config.model_copy(update={"pools": {real_model.POOL: named_pool}}))
        try:
            await _conflicts(report, pool, options)
            await _neighbours(report, pool, options, Path(folder))
        finally:
            await pool.close()
    return report


async def _conflicts(report: Report, pool: LocalPool, options: argparse.Namespace) -> None:
    asked = await known(pool, options.tokens, options.countries)
    rows = []
    for kind in CONTEXTS:
        for way in WAYS:
            note(f"{kind}, {way}")
            rows.append(await following(pool, asked, kind, way, options.tokens))
    report.section("Context against memory")
    report.text(
        f"Of {min(options.countries, len(CAPITALS))} countries the model names the capital of {len(asked)} without a"
        " context. Each is asked about after a context with another city."
    )
    columns: dict[str, Any] = {
        "context": lambda row: row.context,
        "way": lambda row: row.way,
        "follows the context": lambda row: shown(row.follows_context, 2),
        "follows memory": lambda row: shown(row.follows_memory, 2),
    }
    report.table("conflicts", rows, columns)
    report.text(
        "An answer follows the context if it names the city in it first, whether or not the text says that this is the"
        f" capital. Distortions that the model chose for savcd: {await choices(pool, asked)}."
    )


async def _neighbours(report: Report, pool: LocalPool, options: argparse.Namespace, folder: Path) -> None:
    model, texts = pool.engines[pool.roles["large"]], corpus()
    note(f"reading {len(texts)} paragraphs")
    made = await build_tokens(model, pool.tokenizer, texts, Settings(most=options.entries))
    made.artifact.save(folder / "knn_lm.safetensors")
    store, found = TokenStore.of(made.artifact), made.report
    knn = {"weight": found["weight"], "neighbours": 1024, "temperature": found["temperature"]}
    heldout = texts[7::8][: options.passages]
    rows = await written(pool, store, heldout, options.written, knn)
    report.section("kNN-LM")
    report.text(
        f"A datastore of {found['entries']:,} tokens of this documentation's paragraphs; every eighth is held out."
        f" Weight {found['weight']}, 1024 neighbours, temperature {found['temperature']:g}, the best of seven on"
        " held-out text. These paragraphs are continued from their first words."
    )
    report.facts(
        {
            "held-out tokens": f"{found['heldout_tokens']:,}",
            "nats a token, model": found["nats_per_token"],
            "nats a token, with neighbours": found["nats_per_token_mixed"],
            "share of tokens that became less probable": found["tokens_harmed"],
        }
    )
    report.values["knn_lm"] = found
    columns: dict[str, Any] = {
        "way": lambda row: row.way,
        "4-grams that repeat": lambda row: shown(row.repeated, 3),
        "entropy of p, first third": lambda row: f"{row.law[0]:.2f}",
        "last third": lambda row: f"{row.law[1]:.2f}",
        "of p(neighbours), first third": lambda row: f"{row.found[0]:.2f}",
        "last third ": lambda row: f"{row.found[1]:.2f}",
    }
    report.table("written", rows, columns)


if __name__ == "__main__":
    page = Path("docs/results/contrast.md")
    made = command_line(__doc__, page, rounds=None, countries=8, entries=500, passages=2, written=12)
    made.add_argument("--countries", type=int, default=len(CAPITALS), help="asked about")
    made.add_argument("--tokens", type=int, default=8, help="of an answer about a country")
    made.add_argument("--entries", type=int, default=20_000, help="of the datastore")
    made.add_argument("--passages", type=int, default=16, help="continued")
    made.add_argument("--written", type=int, default=96, help="tokens of a continued passage")
    run(made, measure)
