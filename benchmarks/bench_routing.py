"""Cost of the learned router's probe relative to the requests it routes, and samples that adaptive best-of-k saves.

Both models of the demo pair draw several answers to questions of all kinds; a router is trained on these in a temporary
folder, as `turnout train router` does. Other questions are then put to the small model, routed and not, the router's
decisions are timed apart, and the samples that it would give to prompts it was not trained on are counted against as
many for each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.best_of_samples import Needed, needed
from benchmarks.harness import Cell, Goal, Report, command_line, note, run, shown
from benchmarks.retention import judged, percent
from benchmarks.routed_walls import RoutedCost, routed_cost
from benchmarks.strategies import at_once
from decoding.model import ModelPool
from experiments.grid.answering import answer, forget
from experiments.stats.intervals import Floats, Interval, ratio, spread
from pool.local_pool import LocalPool
from pool.routing import PoolRouting
from router.base import Asked, RoutingPolicy
from router.decision import Decision
from router.difficulty.probe import ROUTER_LABELS, Probe
from training.router_outcomes import ROLES, Role
from training.router_runs import Question, questions, run_outcomes
from training.router_samples import Rerank, answered_by, shown_by
from training.router_targets import WhoIsRight
from training.router_training import Recipe, read_prompts, split, train_probe
from turnout.calls import AUTO, ChatMessage, GenerateCall
from turnout.config import PolicyChoice, RoutingConfig, TurnoutConfig
from turnout.types import SamplingParams

DEMO_ONLY = "a router is trained and judged on questions that the demo pair was trained on"
NAME = "router"
TRAIN_SEED, TEST_SEED = 0, 1
CONCURRENT = (1, 8)
MAX_TOKENS = 200
TEMPERATURE = 0.8
RERANK: Rerank = "majority"  # as the policy does it where nothing else is asked for
PROBE_GOAL, SAMPLES_GOAL = Goal(0.02, at_most=True), Goal(0.6, at_most=True)


@dataclass(frozen=True, slots=True)
class Span:
    """One decision, seconds: the small model's reading of the prompt, and everything after it."""

    read_s: float
    decide_s: float


class Clocked(RoutingPolicy):
    """A policy, and how long its decisions took.

    Args:
        policy: decides.

    Attributes:
        spans: by request.
    """

    def __init__(self, policy: RoutingPolicy) -> None:
        super().__init__()
        self._policy = policy
        self.spans: dict[str, Span] = {}

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """See `RoutingPolicy.decide`."""
        started = time.perf_counter()
        await asked.read(models)  # which the policy finds done
        read = time.perf_counter()
        decision = await self._policy.decide(asked, models)
        self.spans[asked.request.id] = Span(read - started, time.perf_counter() - read)
        return decision


@dataclass(frozen=True, slots=True)
class Probed:
    """Decisions and the requests they were made for.

    Attributes:
        share: of the requests' time, in decisions, the reading of the prompt left out.
        decide_ms: of one, median with the smallest and the largest.
        to_large: share of the requests that went to the large model.
        reading: share of these requests' time in which the small model read the prompt, which it then did not answer.
    """

    concurrent: int
    requests: int
    share: Interval
    decide_ms: Interval
    to_large: float
    reading: Interval


@dataclass(frozen=True, slots=True)
class Trained:
    """Training prompts of the router, and its predictions for other prompts.

    Attributes:
        rows: all prompts, and those held out.
        tables: by model, [held out, samples]; see `answered_by`.
        shown: likewise; see `shown_by`.
        predicted: by model, [held out] chances.
    """

    rows: tuple[int, int]
    tables: dict[Role, Floats]
    shown: dict[Role, Floats]
    predicted: dict[Role, Floats]


async def train(pool: LocalPool, folder: Path, count: int, samples: int) -> Trained:
    """Train a router into a folder, from answers that the models give now."""
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS)
    outcomes = await run_outcomes(pool, questions(count, TRAIN_SEED), sampling, samples, TRAIN_SEED, lambda *_: None)
    prompts = [row.encode(pool.tokenizer) for row in outcomes.rows]
    inputs = await read_prompts(pool.model_pool, prompts, lambda *_: None)
    artifact = train_probe(pool.model_pool, outcomes, inputs, WhoIsRight(), Recipe(seed=TRAIN_SEED)).artifact
    artifact.save(folder / f"{NAME}.safetensors")
    _, _, places = split(outcomes, TRAIN_SEED)
    probe, held = Probe.load(artifact), [outcomes.rows[place] for place in places]
    with torch.inference_mode():
        chances = probe.scaling(probe.network(inputs[places]).numpy())
    found = {role: answered_by(held, role) for role in ROLES}
    shown = {role: shown_by(held, role, RERANK) for role in ROLES}
    return Trained(
        (len(prompts), len(held)),
        {role: table for role, table in found.items() if table is not None},
        {role: table for role, table in shown.items() if table is not None},
        {role: chances[:, ROUTER_LABELS.index(f"p_{role}")] for role in ROLES},
    )


async def probed(pool: LocalPool, asked: list[Question], concurrent: int) -> Probed:
    """Ask questions through the router, several at once."""
    note(f"{len(asked)} questions through the router, {concurrent} at once")
    config = RoutingConfig(policy=PolicyChoice(name="learned", params={"artifact": NAME, "large_share": 0.5}))
    pool.routing = PoolRouting(config, pool.name, pool.model_pool)
    clock = Clocked(pool.routing.router.policy)
    pool.routing.router.policy = clock
    forget(pool)
    calls = [_call(pool.name, number, question) for number, question in enumerate(asked)]
    try:
        records = await at_once((answer(pool, call, call.request_id) for call in calls), concurrent)
    finally:
        await pool.routing.close()
        pool.routing = None
    spans = [clock.spans[record.id] for record in records]
    wall = np.array([record.wall_s for record in records])
    by_large = np.array([record.by_large > 0 for record in records])
    read, decided = (np.array([getattr(each, name) for each in spans]) for name in ("read_s", "decide_s"))
    unknown = Interval(float("nan"), float("nan"), float("nan"))
    return Probed(
        concurrent,
        len(records),
        ratio(decided, wall),
        spread((1000 * decided).tolist()),
        float(by_large.mean()),
        ratio(read[by_large], wall[by_large]) if by_large.any() else unknown,
    )


def _call(pool: str, number: int, question: Question) -> GenerateCall:
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, seed=number)
    messages = (ChatMessage("user", question.asked.key),)
    return GenerateCall(f"routed-{number}", pool, sampling, messages=messages, method=AUTO)


@dataclass(frozen=True, slots=True)
class Timed:
    """One number of requests at once: all that routing adds, and the decisions alone."""

    routed: RoutedCost
    probed: Probed


async def timed(pool: LocalPool, asked: list[Question], concurrent: int, rounds: int) -> Timed:
    """Ask questions through the router, several at once."""
    note(f"{len(asked)} questions to the small model, routed and not, {rounds} times, {concurrent} at once")
    calls = [_call(pool.name, number, question) for number, question in enumerate(asked)]
    return Timed(
        await routed_cost(pool, NAME, calls, concurrent, rounds),
        await probed(pool, asked, concurrent),
    )


async def measure(count: int, samples: int, asked: int, rounds: int) -> tuple[Trained, list[Timed]]:
    """Train, then time the router on other questions; the first ones are thrown away."""
    with tempfile.TemporaryDirectory(prefix="routing-") as folder:
        config = TurnoutConfig.demo()
        demo = config.pools["demo"].model_copy(update={"artifacts": folder})
        pool = LocalPool.load("demo", config.model_copy(update={"pools": {"demo": demo}}))
        try:
            note(f"{samples} answers of each model to about {count} questions")
            trained = await train(pool, Path(folder), count, samples)
            known = {question.asked.key for question in questions(count, TRAIN_SEED)}
            fresh = [each for each in questions(2 * asked, TEST_SEED) if each.asked.key not in known]
            fresh = [fresh[place] for place in np.random.default_rng(0).permutation(len(fresh))[:asked]]
            await probed(pool, fresh[:16], max(CONCURRENT))
            return trained, [await timed(pool, fresh, concurrent, rounds) for concurrent in CONCURRENT]
        finally:
            await pool.close()


def page(trained: Trained, times: list[Timed], found: dict[Role, list[Needed]]) -> Report:
    """The page."""
    total, held = trained.rows
    report = Report(
        "The learned router: what its probe costs, and what adaptive best-of-k saves",
        f"`make bench-routing`; the demo pair. A router trained on answers of both models to {total} questions of all"
        f" kinds at temperature {TEMPERATURE:g}, {held} of them held out. 95% intervals by bootstrap over prompts.",
    )
    report.values["rows"] = trained.rows
    report.section("The probe and the request")
    report.text("\n".join(line for each in times for line in _probe_verdicts(each)))
    report.text(
        "Routing: the same questions, to the small model by name and by the router with a threshold that no gain"
        " reaches; everything that is different counts, as the second wake-up after the prompt's reading. A decision:"
        " features, probe, threshold, drift, and whether the artifact has changed; here half of the requests go to the"
        " large model, and the share is of both kinds. What the small model takes to read the prompt, waiting"
        " included, stands apart: where it answers itself, that is its prefill."
    )
    columns = {
        "at once": lambda each: each.probed.concurrent,
        "requests": lambda each: each.probed.requests,
        "routing adds": lambda each: percent(each.routed.more),
        "same text": lambda each: f"{each.routed.alike:.0%}",
        "one decision, ms": lambda each: shown(each.probed.decide_ms, 2),
        "of the requests' time": lambda each: percent(each.probed.share),
        "to the large model": lambda each: f"{each.probed.to_large:.0%}",
        "small model's reading, of these requests' time": lambda each: percent(each.probed.reading),
    }
    report.table("probe", times, columns)
    _samples(report, found)
    return report


def _probe_verdicts(times: Timed) -> list[str]:
    where = f"- {times.probed.concurrent} at once"
    goal = judged(times.routed.more, PROBE_GOAL, "{:.0%}")
    return [
        f"{where}: routing adds {percent(times.routed.more)} to the time of requests that the small model answers"
        f" ({times.routed.rounds} rounds of {times.routed.requests}); {goal}.",
        f"{where}: decisions alone take {percent(times.probed.share)} of the requests' time.",
        f"{where}: of the time of requests that go to the large model, the small one's reading of the prompt takes"
        f" {percent(times.probed.reading)}; {judged(times.probed.reading, PROBE_GOAL, '{:.0%}')}.",
    ]


def _samples(report: Report, found: dict[Role, list[Needed]]) -> None:
    report.section("Samples that adaptive best-of-k needs")
    report.text(
        "As a part of the k samples that uniform best-of-k gives every held-out prompt, for as many prompts of which"
        " one sample is right, as a judge who knows a right answer would have it; and, which is what is served, for as"
        f" many of which the answer that `best_of` shows is right (`rerank: {RERANK}`). *Predicted*: shared out over"
        " all prompts at once by the probe; *bins*: as for requests that come one by one; *oracle*: by who is right."
        " At most half of the samples that were drawn are judged: beyond that no prompt can be given many more than"
        " uniform gives it."
    )
    report.values["samples"] = {role: [asdict(each) for each in rows] for role, rows in found.items()}
    if not found:
        report.text("Not measured: each prompt needs two samples at least.")
        return
    said = []
    for role, rows in found.items():
        for each in rows:
            if 2 * each.k <= rows[-1].k:
                said.append(sample_verdict(f"{role} model, one of k is right", each))
                if each.shown is not None:
                    said.append(sample_verdict(f"{role} model, the one shown is right", each.shown))
    report.text("\n".join(said))
    columns: dict[str, Callable[[tuple[Role, Needed]], Cell]] = {
        "model": lambda each: each[0],
        "k": lambda each: each[1].k,
        "one is right": lambda each: percent(each[1].answered),
        **{name: partial(_part, name) for name in ("predicted", "bins", "oracle")},
        "the one shown is right": lambda each: percent(each[1].shown.answered) if each[1].shown else "not known",
        "shown, predicted": partial(_part_shown, "predicted"),
        "shown, bins": partial(_part_shown, "bins"),
    }
    report.table(None, [(role, each) for role, rows in found.items() for each in rows], columns)


def _part(name: str, row: tuple[Role, Needed]) -> str:
    return percent(row[1].parts[name])


def _part_shown(name: str, row: tuple[Role, Needed]) -> str:
    return percent(row[1].shown.parts[name]) if row[1].shown else "not known"


def sample_verdict(whose: str, row: Needed) -> str:
    """One line about a model, a way of counting answers, and a k."""
    where, part = f"- {whose}, k = {row.k}", row.parts["predicted"]
    if not row.gains:
        return f"{where}: not measured, because no prompt is answered that one sample does not answer."
    goal = judged(part, SAMPLES_GOAL, "{:.0%}")
    said = "as many answers are not reached" if not np.isfinite(part.value) else f"{percent(part)} of the samples"
    return f"{where}: {said}, where uniform answers {row.answered.value:.1%} (one sample {row.by_one:.1%}); {goal}."


async def measure_all(options: argparse.Namespace) -> Report:
    """Train a router, time it, and count the samples it would give."""
    trained, times = await measure(options.questions, options.samples, options.asked, options.rounds)
    found = {
        role: needed(table, trained.predicted[role], trained.shown.get(role)) for role, table in trained.tables.items()
    }
    return page(trained, times, found)


if __name__ == "__main__":
    result = Path("docs/results/routing.md")
    parser = command_line(__doc__, result, rounds=4, demo_only=DEMO_ONLY, questions=150, samples=4, asked=40)
    parser.add_argument("--questions", type=int, default=1000, help="that the router is trained on, held-out ones too")
    parser.add_argument("--samples", type=int, default=8, help="answers of each model to each of them")
    parser.add_argument("--asked", type=int, default=300, help="questions whose routing is timed")
    run(parser, measure_all)
