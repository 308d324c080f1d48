"""The report of a sweep over offered load: a table and a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import Report
from experiments.load.metrics import Objective, Summary
from experiments.load.records import MAX_CLIENT_CPU


@dataclass(frozen=True, slots=True)
class Sweep:
    """Results of several rates against one server.

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


def page(sweep: Sweep) -> Report:
    """The report of a sweep."""
    objective = sweep.objective
    report = Report(
        "Latency and goodput against offered load",
        f"`make bench-load`. Pool `{sweep.pool}`, its default method, held-out arithmetic, greedy, answers to their end"
        f" or {sweep.max_tokens} tokens; each run's schedule lasts {sweep.duration_s:g} s. Arrivals do not wait for"
        " answers, and every latency counts from the moment the schedule names. Client and server share the machine.",
        machine=sweep.machine,
    )
    report.text(
        f"Capacity, many requests at once: {sweep.capacity:.1f} requests/s. Goodput counts answers with a time to"
        f" first token of at most {objective.ttft_s * 1e3:.0f} ms and at most {objective.tpot_s * 1e3:.0f} ms per"
        " output token. Latencies are milliseconds, p50 / p90 / p99 of what was answered; the rest is under errors."
    )
    report.table(
        None,
        list(zip(sweep.runs, sweep.server_cpu, strict=True)),
        {
            "client": lambda row: row[0].client,
            "arrivals": lambda row: row[0].schedule,
            "offered, 1/s": lambda row: f"{row[0].offered:.1f}",
            "goodput, 1/s": lambda row: "VOID" if row[0].void else f"{row[0].goodput:.1f}",
            "tokens/s": lambda row: f"{row[0].tokens_per_s:.0f}",
            "TTFT": lambda row: _times(row[0].ttft_s),
            "TPOT": lambda row: _times(row[0].tpot_s),
            "end to end": lambda row: _times(row[0].end_to_end_s),
            "errors": lambda row: ", ".join(f"{n} {code}" for code, n in sorted(row[0].errors.items())) or "none",
            "sent late": lambda row: f"{row[0].send_lag_s * 1e3:.0f}",
            "client, cores": lambda row: f"{row[0].client_cpu:.2f}",
            "server, cores": lambda row: f"{row[1]:.2f}",
        },
    )
    if any(run.void for run in sweep.runs):
        report.text(f"VOID: the client used more than {MAX_CLIENT_CPU:.0%} of a core and measured itself.")
    report.picture("latency and goodput over offered load", lambda path: plot(sweep, path))
    report.values |= asdict(sweep)
    return report


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
