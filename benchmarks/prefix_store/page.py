"""The results as a page: tables, and which goals are met."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from benchmarks.harness import Goal, Report, shown
from benchmarks.prefix_store.decisions import Decisions
from benchmarks.prefix_store.first_token import GOAL, FirstToken
from benchmarks.prefix_store.outage import Outage
from benchmarks.prefix_store.stampede import Stampede
from benchmarks.prefix_store.write_behind import RUNNING, WriteBehind
from experiments.stats.intervals import Interval

FIRST_TOKEN_RATIO = Goal(0.2, at_most=True)
DECODE_SHARE = Goal(0.97)
ADDED_P99_MS = Goal(5.0, at_most=True)


@dataclass(frozen=True, slots=True)
class Run:
    """Setting of the measurements.

    Attributes:
        machine: it ran on.
        model: its size, as in `benchmarks.peers.checkpoints`.
        prefix: tokens.
        rounds: of what is repeated.
        requests: of the stampede.
        chunk_tokens: of a chunk.
        chunk_bytes: of a raw chunk.
    """

    machine: dict[str, str]
    model: str
    prefix: int
    rounds: int
    requests: int
    chunk_tokens: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Results:
    """Results of all parts."""

    run: Run
    first_token: list[FirstToken]
    write_behind: WriteBehind
    stampede: list[Stampede]
    outage: list[Outage]
    decisions: list[Decisions]


def page(results: Results) -> Report:
    """The report."""
    run = results.run
    report = Report(
        f"The shared prefix store (random Llama, {run.model} parameters, bfloat16)",
        "`make bench-kvstore`; the store's own server on the same machine; prefix of"
        f" {run.prefix:,} tokens in chunks of {run.chunk_tokens} ({run.chunk_bytes / 2**20:.2f} MiB); medians of"
        f" {run.rounds} interleaved rounds [smallest, largest].",
        machine=run.machine,
    )
    _add_first_token(report, results.first_token)
    _add_write_behind(report, results.write_behind)
    _add_stampede(report, results.stampede, run)
    _add_outage(report, results.outage)
    _add_decisions(report, results.decisions)
    report.section("Goals")
    goals = {"figure": lambda row: row[0], "goal": lambda row: row[1], "measured": lambda row: row[2]}
    report.table(None, _goals(results), {**goals, "met": lambda row: row[1].met(row[2])})
    report.values |= asdict(results)
    return report


def _goals(results: Results) -> list[tuple[str, Goal, Interval | float]]:
    """Each figure that has a goal."""
    warm = next(each for each in results.first_token if each.way == GOAL)
    opened = [(each.kind, each.added_p99, each.look_up_p99) for each in results.outage]
    return [
        ("first token, warm Redis, over recomputing", FIRST_TOKEN_RATIO, warm.ratio),
        (
            "decoding while prompts are written, over that without a store",
            DECODE_SHARE,
            results.write_behind.with_prompts,
        ),
        *((f"first token, {kind}, breaker open: added p99, ms", ADDED_P99_MS, added) for kind, added, _ in opened),
        *((f"look-up alone, {kind}, breaker open: p99, ms", ADDED_P99_MS, alone) for kind, _, alone in opened),
    ]


def _add_first_token(report: Report, rows: list[FirstToken]) -> None:
    report.section("Time to the first token")
    report.text(
        "The engine's own blocks are emptied before each request, except where the prefix is to be in them; host memory"
        " is off, except where it is named. Of the prompt's tokens, those found were not computed. Values of random"
        " weights say nothing about how far codecs compress: see `codecs.md`."
    )
    report.table(
        None,
        rows,
        {
            "prefix": lambda row: row.way,
            "first token, ms": lambda row: shown(row.seconds, 1, 1e3),
            "over recomputing": lambda row: row.ratio,
            "tokens found, fewest": lambda row: f"{row.found:,}",
            "read from Redis, MiB": lambda row: f"{row.bytes / 2**20:.1f}",
        },
    )


def _add_write_behind(report: Report, found: WriteBehind) -> None:
    report.section("Write-behind")
    report.text(
        f"{RUNNING} requests decode; the store over no store, round by round. With prompts: these are read one after"
        " the other, and all of their chunks written (`admission: always`). Nothing matches: short prompts, the store"
        " as configured by default, from the look-up to the last token."
    )
    rows = [
        ("decoded while prompts are read", found.with_prompts_off, found.with_prompts),
        ("prompts read meanwhile", None, found.prompts),
        ("decoded where nothing matches", found.unmatched_off, found.unmatched),
    ]
    report.table(
        None,
        rows,
        {
            "": lambda row: row[0],
            "without a store, tokens/s": lambda row: None if row[1] is None else shown(row[1]),
            "with it, over that": lambda row: row[2],
        },
    )
    written = f"{found.written_mib.value:.0f} MiB a round"
    report.text(f"Written of these prompts: {written}; chunks dropped: {found.dropped}.")


def _add_stampede(report: Report, rows: list[Stampede], run: Run) -> None:
    report.section("Stampede")
    report.text(
        f"{run.requests} requests at the same moment with one new prefix, at two engines in two processes of one thread"
        " each. Tokens are in lengths of the prefix: 1 is what has to be computed once."
    )
    report.table(
        None,
        rows,
        {
            "`kvstore.admission`": lambda row: row.admission or "no store",
            "tokens computed": lambda row: row.computed,
            "tokens fetched": lambda row: row.fetched,
            "until the last first token, s": lambda row: row.seconds,
        },
    )


def _add_outage(report: Report, rows: list[Outage]) -> None:
    report.section("Breaker open")
    report.text(
        "Milliseconds. A look-up is of a prompt as long as the prefix, digests included; the time added to the first"
        " token is the difference of the percentiles with the store and without, short prompts in turn. Opening: the"
        " slowest look-up before the breaker was open. No store: to the first token without one."
    )
    report.table(
        None,
        rows,
        {
            "outage": lambda row: row.kind,
            "opening": lambda row: f"{row.opening:.0f}",
            "look-up: p50": lambda row: f"{row.look_up_p50:.2f}",
            "look-up: p99": lambda row: f"{row.look_up_p99:.2f}",
            "no store: p50": lambda row: f"{row.off_p50:.1f}",
            "no store: p99": lambda row: f"{row.off_p99:.1f}",
            "added: p50": lambda row: f"{row.added_p50:.2f}",
            "added: p99": lambda row: f"{row.added_p99:.2f}",
            "requests": lambda row: row.requests,
        },
    )


def _add_decisions(report: Report, rows: list[Decisions]) -> None:
    report.section("Fetch or compute")
    report.text(
        "Chunks travel through a link that holds them back; computing lasts as long as this engine forecasts, or a"
        " tenth or a hundredth of that. Best: the number of chunks with which all would have been there first, by a"
        " read of everything just before. Right: at most 10% and 2 ms slower than the best. Known: the link was in use"
        " just before; else its speed has to be found out. Times are means, in milliseconds."
    )
    report.table(
        None,
        rows,
        {
            "link, GB/s": lambda row: "no limit" if row.link is None else f"{row.link:g}",
            "engine": lambda row: f"{row.speed}x",
            "link known": lambda row: "yes" if row.known else "no",
            "right": lambda row: f"{row.right:.0%}",
            "lost": lambda row: f"{row.regret_ms:.1f}",
            "as decided": lambda row: shown(row.took, 1, 1e3),
            "best": lambda row: shown(row.best, 1, 1e3),
            "compute all": lambda row: shown(row.compute, 1, 1e3),
            "fetch all": lambda row: shown(row.fetch, 1, 1e3),
            "fetched": lambda row: f"{row.fetched:.0%}",
        },
    )
    for known in (True, False):
        some = [row for row in rows if row.known is known]
        trials = sum(row.trials for row in some)
        if trials:
            right = sum(row.right * row.trials for row in some) / trials
            lost = sum(row.regret_ms * row.trials for row in some) / trials
            name = "known" if known else "unknown"
            report.text(f"Link {name}: {right:.0%} of {trials} decisions right, {lost:.1f} ms lost on average.")
