"""The results as a page: tables, and which goals are met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness import shown
from benchmarks.prefix_store.decisions import Decisions
from benchmarks.prefix_store.first_token import GOAL, FirstToken
from benchmarks.prefix_store.outage import Outage
from benchmarks.prefix_store.stampede import Stampede
from benchmarks.prefix_store.write_behind import RUNNING, WriteBehind
from experiments.machine import one_line

FIRST_TOKEN_RATIO = 0.2
DECODE_SHARE = 0.97
ADDED_P99_MS = 5.0


@dataclass(frozen=True, slots=True)
class Run:
    """How the measurements were taken.

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
    """Everything that was measured."""

    run: Run
    first_token: list[FirstToken]
    write_behind: WriteBehind
    stampede: list[Stampede]
    outage: list[Outage]
    decisions: list[Decisions]


def to_markdown(results: Results) -> str:
    """The page."""
    run = results.run
    lines = [
        f"# The shared prefix store (random Llama, {run.model} parameters, bfloat16)",
        "",
        f"`make bench-kvstore`; {one_line(run.machine)}; the store's own server on the same machine; prefix of"
        f" {run.prefix:,} tokens in chunks of {run.chunk_tokens} ({run.chunk_bytes / 2**20:.2f} MiB); medians of"
        f" {run.rounds} interleaved rounds [smallest, largest].",
        "",
        *_first_token(results.first_token),
        *_write_behind(results.write_behind),
        *_stampede(results.stampede, run),
        *_outage(results.outage),
        *_decisions(results.decisions),
        "## Goals",
        "",
        *goals(results),
    ]
    return "\n".join([*lines, ""])


def goals(results: Results) -> Iterator[str]:
    """A line for each: what was wanted, what was measured, and whether that will do."""
    warm = next(each for each in results.first_token if each.way == GOAL)
    yield _goal("first token, warm Redis, over recomputing", f"at most {FIRST_TOKEN_RATIO}", str(warm.ratio),
                warm.ratio.value <= FIRST_TOKEN_RATIO)  # fmt: skip
    beside = results.write_behind.beside
    yield _goal("decoding beside prompts that are written, over that without a store", f"at least {DECODE_SHARE}",
                str(beside), beside.value >= DECODE_SHARE)  # fmt: skip
    for each in results.outage:
        yield _goal(f"first token, {each.kind}, breaker open: added p99", f"below {ADDED_P99_MS:g} ms",
                    f"{each.added_p99:.2f} ms", each.added_p99 < ADDED_P99_MS)  # fmt: skip
        yield _goal(f"look-up alone, {each.kind}, breaker open: p99", f"below {ADDED_P99_MS:g} ms",
                    f"{each.look_up_p99:.2f} ms", each.look_up_p99 < ADDED_P99_MS)  # fmt: skip


def _goal(what: str, wanted: str, measured: str, met: bool) -> str:
    return f"- {what}: wanted {wanted}, measured {measured}: {'met' if met else 'not met'}."


def _first_token(rows: list[FirstToken]) -> Iterator[str]:
    yield from (
        "## Time to the first token",
        "",
        "The engine's own blocks are emptied before each request, except where the prefix is to be in them; host memory"
        " is off, except where it is named. Of the prompt's tokens, those found were not computed. Values of random"
        " weights say nothing about how far codecs compress: see `codecs.md`.",
        "",
        "| prefix | first token, ms | over recomputing | tokens found, fewest | read from Redis, MiB |",
        "| --- | ---: | ---: | ---: | ---: |",
    )
    for row in rows:
        yield f"| {row.way} | {shown(row.seconds, 1, 1e3)} | {row.ratio} | {row.found:,} | {row.bytes / 2**20:.1f} |"
    yield ""


def _write_behind(found: WriteBehind) -> Iterator[str]:
    yield from (
        "## Write-behind",
        "",
        f"{RUNNING} requests decode; the store over no store, round by round. Beside prompts: these are read one after"
        " the other, and all of their chunks written (`admission: always`). Nothing matches: short prompts, the store"
        " as configured by default, from the look-up to the last token.",
        "",
        "| | without a store, tokens/s | with it, over that |",
        "| --- | ---: | ---: |",
        f"| decoded beside prompts | {shown(found.beside_off)} | {found.beside} |",
        f"| prompts read meanwhile | | {found.prompts} |",
        f"| decoded where nothing matches | {shown(found.unmatched_off)} | {found.unmatched} |",
        "",
        f"Written of these prompts: {found.written_mib.value:.0f} MiB a round; chunks dropped: {found.dropped}.",
        "",
    )


def _stampede(rows: list[Stampede], run: Run) -> Iterator[str]:
    yield from (
        "## Stampede",
        "",
        f"{run.requests} requests at the same moment with one new prefix, at two engines in two processes of one thread"
        " each. Tokens are in lengths of the prefix: 1 is what has to be computed once.",
        "",
        "| `kvstore.admission` | tokens computed | tokens fetched | until the last first token, s |",
        "| --- | ---: | ---: | ---: |",
    )
    for row in rows:
        yield f"| {row.admission or 'no store'} | {row.computed} | {row.fetched} | {row.seconds} |"
    yield ""


def _outage(rows: list[Outage]) -> Iterator[str]:
    yield from (
        "## Breaker open",
        "",
        "Milliseconds. A look-up is of a prompt as long as the prefix, digests included; the time added to the first"
        " token is the difference of the percentiles with the store and without, short prompts in turn. Opening: the"
        " slowest look-up before the breaker was open. No store: to the first token without one.",
        "",
        "| outage | opening | look-up: p50 | p99 | no store: p50 | p99 | added: p50 | p99 | requests |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    for row in rows:
        yield (
            f"| {row.kind} | {row.opening:.0f} | {row.look_up_p50:.2f} | {row.look_up_p99:.2f} | {row.off_p50:.1f}"
            f" | {row.off_p99:.1f} | {row.added_p50:.2f} | {row.added_p99:.2f} | {row.requests} |"
        )
    yield ""


def _decisions(rows: list[Decisions]) -> Iterator[str]:
    yield from (
        "## Fetch or compute",
        "",
        "Chunks travel through a link that holds them back; computing lasts as long as this engine forecasts, or a"
        " tenth or a hundredth of that. Best: the number of chunks with which all would have been there first, by a"
        " read of everything just before. Right: at most 10% and 2 ms slower than the best. Known: the link was in use"
        " just before; else its speed has to be found out. Times are means, in milliseconds.",
        "",
        "| link, GB/s | engine | link known | right | lost | as decided | best | compute all | fetch all | fetched |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    for row in rows:
        link = "no limit" if row.link is None else f"{row.link:g}"
        times = " | ".join(f"{1e3 * each:.1f}" for each in (row.took, row.best, row.compute, row.fetch))
        yield (
            f"| {link} | {row.speed}x | {'yes' if row.known else 'no'} | {row.right:.0%} | {row.regret_ms:.1f}"
            f" | {times} | {row.fetched:.0%} |"
        )
    yield ""
    for known in (True, False):
        some = [row for row in rows if row.known is known]
        trials = sum(row.trials for row in some)
        if trials:
            right = sum(row.right * row.trials for row in some) / trials
            lost = sum(row.regret_ms * row.trials for row in some) / trials
            name = "known" if known else "unknown"
            yield f"- Link {name}: {right:.0%} of {trials} decisions right, {lost:.1f} ms lost on average."
    yield ""
