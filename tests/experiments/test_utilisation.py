"""What the machine gave while answers were computed: exact on made signals, and nothing made up."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.grid.cells import Facts, Record, Utilisation
from experiments.grid.planning import make_plan
from experiments.grid.runner import run_plan
from experiments.grid.spec import ExperimentSpec
from experiments.grid.store import Store
from experiments.grid.utilisation import PERIOD_S, Signal, watched
from experiments.reports.data import make_report
from experiments.reports.efficiency import Efficiency, compression, efficiency
from experiments.reports.html import to_html
from experiments.reports.table import Column, Group
from experiments.reports.text import to_json, to_markdown
from tests.experiments.grid_runs import PROMPTS, dataset, pair_config, spec

GIB = 1 << 30
MACHINE = Utilisation(
    sampled_s=10.0,
    samples=200,
    memory_byte_s=10.0 * GIB,
    cpu_s=15.0,
    machine_cpu_s=18.0,
    memory_peak_bytes=2 * GIB,
    period_s=0.05,
    memory_total_bytes=8 * GIB,
    cores=2,
    peak_flops_per_s=1e9,
    weight_bytes={"small": 100, "large": 400},
    idle_s=0.5,
    idle_memory_bytes=GIB,
    idle_cores=0.1,
)
ASKED = ExperimentSpec.model_validate(
    {"name": "made", "methods": [{"name": "plain"}], "datasets": [{"path": "x.jsonl", "scorer": {"kind": "exact"}}]}
)


def column(label: str, facts: Facts, scores: list[float], models: tuple[str, ...] = ("large",)) -> Column:
    """A way of answering whose prompts took 100 tokens, 2 s and 1e9 operations each."""
    made = Column(label, "plain", nats=False, facts=[facts])
    for number, score in enumerate(scores):
        written = {name: 100 if name == models[-1] else 0 for name in models}
        made.records[0, f"p{number}"] = Record(
            f"p{number}", score, "x", 100, 100, 100.0, 1e9, 1e9, 2.0, 0.1, prompt_tokens=50, generated=written
        )
    return made


def figures(*columns: Column) -> list[Efficiency]:
    """Of made columns, the first the baseline."""
    asked = ASKED.model_copy(update={"baseline": columns[0].label})
    group = Group("pool", "data", "load", nats=False, columns={each.label: each for each in columns})
    return efficiency([group], asked, {})


@given(
    value=st.floats(0.0, 1e12),
    gaps=st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=30),
)
def test_a_constant_signal_has_itself_for_its_mean(value: float, gaps: list[float]) -> None:
    signal, at = Signal(), 0.0
    for gap in (0.0, *gaps):
        at += gap
        signal.add(at, value)
    assert signal.area / signal.seconds == pytest.approx(value, rel=1e-9)
    assert (signal.most, signal.count) == (value, len(gaps) + 1)


def test_a_straight_line_is_averaged_exactly_however_it_is_looked_at() -> None:
    signal = Signal()
    for at in (0.0, 0.1, 0.7, 4.0, 10.0):
        signal.add(at, 3.0 * at + 1.0)
    assert signal.area / signal.seconds == pytest.approx(16.0)


def test_a_thread_looks_every_period() -> None:
    looks, enough = 0, threading.Event()

    def memory() -> float:
        nonlocal looks
        looks += 1
        if looks == 10:
            enough.set()
        return 7.0

    with watched(memory, period_s=0.01) as seen:
        assert enough.wait(60)
    assert seen.samples == looks >= 11
    assert seen.memory_byte_s / seen.sampled_s == pytest.approx(7.0)
    assert seen.memory_peak_bytes == 7
    assert seen.period_s == 0.01
    assert seen.sampled_s > 0.0


def test_figures_are_time_averages_of_what_was_seen() -> None:
    [line] = figures(column("plain", Facts(wall_s=10.0, energy_j=250.0, utilisation=MACHINE), [1.0, 0.0]))
    assert line.amu == pytest.approx(1 / 8)
    assert line.idle_amu == pytest.approx(1 / 8)
    assert line.memory_peak_bytes == 2 * GIB
    assert line.pcu == pytest.approx(2e9 / (10.0 * 1e9))
    assert line.cores == pytest.approx(1.5)
    assert line.machine_cores == pytest.approx(1.8)
    assert line.al_s == pytest.approx(2.0)
    assert line.tokens_per_s == pytest.approx(20.0)
    assert line.aec_w == pytest.approx(25.0)
    assert line.joules == pytest.approx(125.0)


def test_the_peak_is_reached_by_one_who_computes_all_the_time_and_missed_by_one_who_sleeps() -> None:
    busy, asleep = (column(name, Facts(wall_s=2.0, utilisation=MACHINE), [1.0]) for name in ("busy", "asleep"))
    for record in busy.records.values():
        record.flops = 2.0 * MACHINE.peak_flops_per_s
    for record in asleep.records.values():
        record.flops = 0.0
    assert [line.pcu for line in figures(busy, asleep)] == [pytest.approx(1.0), 0.0]


def test_what_was_not_measured_has_no_figure() -> None:
    [line] = figures(column("plain", Facts(wall_s=10.0), [1.0]))
    nothing = ("amu", "pcu", "aec_w", "idle_w", "memory_peak_bytes", "mcr", "price", "joules", "idealised_s")
    assert [getattr(line, name) for name in nothing] == [None] * len(nothing)
    assert line.seconds == pytest.approx(10.0)


def test_compression_is_one_of_the_unchanged_model_and_weighs_size_and_quality() -> None:
    facts = Facts(wall_s=1.0, utilisation=MACHINE)
    plain = column("plain", facts, [1.0, 1.0, 0.0, 0.0])
    small = column("small", facts, [1.0, 0.0, 0.0, 0.0], models=("small",))
    both = column("both", facts, [1.0, 1.0, 0.0, 0.0], models=("small", "large"))
    assert [line.mcr for line in figures(plain, small, both)] == [
        pytest.approx(1.0),
        pytest.approx((400 / 100) * (0.25 / 0.5)),
        pytest.approx(400 / 500),
    ]
    wrong = column("plain", facts, [0.0, 0.0, 0.0, 0.0])
    assert compression(plain, wrong, nats=False) is None
    assert compression(plain, plain, nats=True) is None
    assert compression(plain, None, nats=False) is None


def test_what_comes_later_adds_up_and_the_machine_is_as_it_was_last() -> None:
    seen = replace(MACHINE)
    seen.add(replace(MACHINE, sampled_s=2.0, samples=10, memory_peak_bytes=1, peak_flops_per_s=3e9))
    assert (seen.sampled_s, seen.samples, seen.memory_byte_s) == (12.0, 210, 20.0 * GIB)
    assert (seen.memory_peak_bytes, seen.peak_flops_per_s) == (2 * GIB, 3e9)


def test_facts_of_an_earlier_version_can_be_read(tmp_path: Path) -> None:
    known = Facts(wall_s=2.0, utilisation=MACHINE)
    assert Facts.from_dict(json.loads(json.dumps(asdict(known)))) == known
    assert Facts.from_dict({"wall_s": 1.0, "peak_bytes": 5}) == Facts(wall_s=1.0)


def test_cells_are_watched_and_the_report_has_one_record_of_each_way(tmp_path: Path) -> None:
    dataset(tmp_path)
    store = Store(tmp_path / "store")
    methods = [{"name": "plain"}, {"name": "plain", "params": {"model": "small"}}]
    loads = [{"at_once": 2}, {"rate": 20.0, "duration_s": 0.3}]
    asked = spec(pair_config(tmp_path), tmp_path, methods=methods, loads=loads, price_per_hour=3.6, accelerators=2)
    assert run_plan(make_plan(asked, store), store).failed == {}
    for cell in store.load("small").cells:
        facts = store.facts(cell)
        assert facts is not None
        assert facts.utilisation is not None
        assert facts.utilisation.samples >= 2
        assert facts.utilisation.sampled_s > 0.0
        assert set(facts.utilisation.weight_bytes) == {"small", "large"}
        used = {name for record in store.records(cell) for name in record.generated}
        assert used == {"small" if "small" in cell.label else "large"}
    report = make_report(store.load("small"), store)
    lines = json.loads(to_json(report))["efficiency"]
    assert [line["label"] for line in lines] == ["plain", "plain model=small"] * 2
    for line in lines:
        assert 0.0 < line["idle_amu"] <= 1.0
        assert 0.0 < line["amu"] <= 1.0
        assert line["pcu"] > 0.0
        assert line["period_s"] == PERIOD_S
        assert line["al_s"] > 0.0
        assert line["price"] == pytest.approx(1000 * line["seconds"] * 2 * 3.6 / 3600)
        assert (line["aec_w"] is None) == (line["joules"] is None)
    closed = lines[0]
    assert closed["answers"] == len(PROMPTS)
    assert closed["mcr"] == pytest.approx(1.0)
    page, text = to_html(report), to_markdown(report)
    assert "arithmetic (PCU)" in page
    assert "## What it took" in text
    assert "idle with all models loaded" in text
