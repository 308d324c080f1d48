"""Tokens per second on real prompts, next to `generate`, vLLM, llama.cpp and OpenVINO: a piece for each batch size."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from benchmarks.bench_peers import BATCHES, Bench
from benchmarks.harness import Report, shown
from benchmarks.peers.plan import INT4, OURS, REAL_TEXT
from benchmarks.pieces import Section, Values
from experiments.stats.intervals import spread

DTYPE = "bfloat16"
THREADS = 2
NAMES = {f"speed-{batch}": batch for batch in BATCHES}


async def measure(name: str, options: Namespace) -> Values:
    """All engines in turn, at one batch size."""
    bench = Bench(DTYPE, THREADS, options.rounds, options.peers_python, options.vllm_python)
    bench.find_peers(list(REAL_TEXT))
    await bench.measure_real((NAMES[name],), options.tokens)
    return bench.comparison.as_dict()


def write(report: Report, pieces: Mapping[str, Values]) -> None:
    """Figures and ratios, an engine a row."""
    settings = next(iter(pieces.values()))["setting"]
    report.text(
        f"Greedy, {settings['dtype']} where a row names nothing else, {settings['threads']} threads on every side"
        " (OpenVINO computes in float32 where the processor has no bfloat16);"
        f" tokens per second with the reading of the prompts, median of {settings['rounds']} alternating rounds"
        " [smallest, largest]; ratios: ours over the engine, round by round. `generate` pads batches of at most eight."
    )
    rows = [row for name, values in pieces.items() for row in _rows(NAMES[name], values)]
    columns = {
        "prompts at once": lambda row: row["batch"],
        "engine": lambda row: row["engine"],
        "tokens/s": lambda row: row["speed"],
        "ours over it": lambda row: row["ratio"],
        "ours in int4 over it": lambda row: row["int4"],
    }
    report.table(None, rows, columns)
    versions = {name: each for values in pieces.values() for name, each in values["versions"].items()}
    report.text(
        "Versions and settings: "
        + "; ".join(f"{name}: {', '.join(f'{k} {v}' for k, v in each.items())}" for name, each in versions.items())
        + "."
    )


def _rows(batch: int, values: Values) -> list[dict[str, Any]]:
    [outcome] = [outcome for found in values["subjects"].values() for outcome in found]
    measured, rows = outcome["values"], []
    for engine in REAL_TEXT:
        if engine in measured:
            speed = shown(spread(measured[engine]), 1)
        elif reason := values["missing"].get(engine) or outcome["failures"].get(engine):
            speed = f"not measured: {reason}"
        else:
            continue  # an engine that came after the piece
        over = {"ratio": _ratio(measured, OURS, engine), "int4": _ratio(measured, INT4, engine)}
        rows.append({"batch": batch, "engine": engine, "speed": speed, **over})
    return rows


def _ratio(measured: Mapping[str, list[float]], ours: str, engine: str) -> str | None:
    if engine == ours or not {ours, engine} <= measured.keys():
        return None
    return shown(spread([mine / other for mine, other in zip(measured[ours], measured[engine], strict=True)]), 2)


SECTION = Section(
    "Speed, next to other engines",
    tuple(NAMES),
    measure,
    lambda options: {"rounds": options.rounds, "tokens": options.tokens},
    write,
)
