"""The report of a sweep over offered load: a table and a plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.load.metrics import Objective, Summary
from experiments.load.records import MAX_CLIENT_CPU
from experiments.machine import one_line


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs at several rates against one server.

    Attributes:
        machine: see `experiments.machine.describe`.
        pool: what was asked.
        objective: what counts as a good answer.
        duration_s: length of each schedule, seconds.
        max_tokens: longest answer.
        capacity: requests a second when many come at once.
        runs: figures, in the order of the runs.
        server_cpu: cores all processes of the server used, by run.
    """

    machine: dict[str, str]
    pool: str
    objective: Objective
    duration_s: float
    max_tokens: int
    capacity: float
    runs: list[Summary]
    server_cpu: list[float]


def to_markdown(sweep: Sweep) -> str:
    """The page."""
    objective = sweep.objective
    lines = [
        "# Latency and goodput against offered load",
        "",
        f"`make bench-load`: {one_line(sweep.machine)}. Pool `{sweep.pool}`, its default method, held-out arithmetic,"
        f" greedy, answers to their end or {sweep.max_tokens} tokens; each run's schedule lasts {sweep.duration_s:g} s."
        " Arrivals do not wait for answers, and every latency counts from the moment the schedule names. Client and"
        " server share the machine's cores.",
        "",
        f"Capacity, many requests at once: {sweep.capacity:.1f} requests/s. Goodput counts answers with a time to"
        f" first token of at most {objective.ttft_s * 1e3:.0f} ms and at most {objective.tpot_s * 1e3:.0f} ms per"
        " output token. Latencies are milliseconds, p50 / p90 / p99 of what was answered; the rest is under errors.",
        "",
        "| client | arrivals | offered, 1/s | goodput, 1/s | tokens/s | TTFT | TPOT | end to end | errors | sent late"
        " | client, cores | server, cores |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_row(run, server) for run, server in zip(sweep.runs, sweep.server_cpu, strict=True)]
    if any(run.void for run in sweep.runs):
        lines += ["", f"VOID: the client used more than {MAX_CLIENT_CPU:.0%} of a core and measured itself."]
    return "\n".join([*lines, ""])


def _row(run: Summary, server_cpu: float) -> str:
    goodput = "VOID" if run.void else f"{run.goodput:.1f}"
    errors = ", ".join(f"{count} {code}" for code, count in sorted(run.errors.items())) or "none"
    return (
        f"| {run.client} | {run.schedule} | {run.offered:.1f} | {goodput} | {run.tokens_per_s:.0f} "
        f"| {_times(run.ttft_s)} | {_times(run.tpot_s)} | {_times(run.end_to_end_s)} "
        f"| {errors} | {run.send_lag_s * 1e3:.0f} | {run.client_cpu:.2f} | {server_cpu:.2f} |"
    )


def _times(percentiles: dict[int, float]) -> str:
    return " / ".join(f"{value * 1e3:.0f}" for value in percentiles.values())


def plot(sweep: Sweep, path: Path) -> None:
    """Time to first token and goodput over the offered rate, of the gRPC runs with Poisson arrivals."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    runs = [run for run in sweep.runs if (run.client, run.schedule) == ("grpc", "poisson") and not run.void]
    runs.sort(key=lambda run: run.offered)
    offered = [run.offered for run in runs]
    figure, (latency, goodput) = plt.subplots(1, 2, figsize=(10, 4))
    for percent in (50, 99):
        times = [run.ttft_s.get(percent, float("nan")) * 1e3 for run in runs]
        latency.plot(offered, times, marker="o", label=f"p{percent}")
    latency.axhline(sweep.objective.ttft_s * 1e3, linestyle=":", color="grey", label="objective")
    latency.set_yscale("log")
    latency.set_ylabel("time to first token from the schedule, ms")
    goodput.plot(offered, [run.goodput for run in runs], marker="o", label="goodput")
    goodput.plot(offered, offered, ":", color="grey", label="offered")
    goodput.set_ylim(bottom=0)
    goodput.set_ylabel("answers within the objective, 1/s")
    for axes in (latency, goodput):
        axes.axvline(sweep.capacity, linestyle="--", color="grey", label="capacity")
        axes.set_xlabel("offered load, requests/s")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
