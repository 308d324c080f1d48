"""Resources that ways of answering take: EfficientLLM's figures (paper #232), time, price and energy (paper #201)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.grid.cells import Record, Utilisation
from experiments.grid.spec import ExperimentSpec
from experiments.reports.table import Column, Group

if TYPE_CHECKING:
    from experiments.grid.references import Reference

HOUR_S = 3600.0
THOUSAND = 1000


@dataclass(slots=True)
class Efficiency:
    """One way of answering one dataset under one load. None: not known; nothing is made up.

    Attributes:
        answers: that have tokens.
        samples: of memory; `period_s` lay between two of them.
        amu: memory in use over all there is, mean over time.
        idle_amu: the same before the first answer, with all models loaded.
        memory_peak_bytes: most at a sample.
        pcu: floating-point operations done, over what matrix products measured here could have done meanwhile.
        cores: processors that the process kept busy, on average.
        machine_cores: that everything on the machine did.
        idle_cores: that everything did before the first answer.
        al_s: mean time of a request, waiting included.
        tokens_per_s: of all requests together: the paper's inference throughput.
        aec_w: mean power by the machine's own meters.
        idle_w: before the first answer.
        mcr: size of the baseline's models over that of the models at work here, times quality over the baseline's.
        seconds: of the worker, an answer.
        price: of a thousand answers.
        joules: an answer: by the meters, or where there is none, from the power that the experiment states.
        idealised_s: what an answer takes alone, each token charged to its writer; see `Reference.seconds`.
        idealised_price: of a thousand of these.
        idealised_joules: of one of these.
    """

    pool: str
    dataset: str
    load: str
    label: str
    answers: int
    samples: int = 0
    period_s: float | None = None
    amu: float | None = None
    idle_amu: float | None = None
    memory_peak_bytes: int | None = None
    pcu: float | None = None
    cores: float | None = None
    machine_cores: float | None = None
    idle_cores: float | None = None
    al_s: float | None = None
    tokens_per_s: float | None = None
    aec_w: float | None = None
    idle_w: float | None = None
    mcr: float | None = None
    seconds: float | None = None
    price: float | None = None
    joules: float | None = None
    idealised_s: float | None = None
    idealised_price: float | None = None
    idealised_joules: float | None = None


def efficiency(groups: Sequence[Group], spec: ExperimentSpec, references: Mapping[str, Reference]) -> list[Efficiency]:
    """The figures of every way of answering.

    Args:
        groups: closed and open loop.
        spec: says what is paid, and for how many accelerators.
        references: by pool, what single requests take.
    """
    found = []
    for group in groups:
        for column in group.columns.values():
            line = Efficiency(group.pool, group.dataset, group.load, column.label, len(_answered(column)))
            _watched(line, column)
            line.mcr = compression(column, group.columns.get(spec.baseline), group.nats)
            _spent(line, column, spec, references.get(group.pool))
            found.append(line)
    return found


def _answered(column: Column) -> list[Record]:
    return [record for record in column.records.values() if record.tokens]


def _seen(column: Column) -> Utilisation | None:
    """Of all cells together; None where one of them was not watched."""
    whole = Utilisation()
    for facts in column.facts:
        if facts.utilisation is None:
            return None
        whole.add(facts.utilisation)
    return whole if whole.sampled_s else None


def _watched(line: Efficiency, column: Column) -> None:
    records, seen = _answered(column), _seen(column)
    wall_s = sum(facts.wall_s for facts in column.facts)
    spent = [facts.energy_j for facts in column.facts]
    if records:
        line.al_s = float(np.mean([record.wall_s for record in records]))
    if records and wall_s:
        line.tokens_per_s = sum(record.tokens for record in records) / wall_s
    if wall_s and None not in spent:
        line.aec_w = sum(each for each in spent if each is not None) / wall_s
    if seen is None:
        return
    line.samples, line.period_s = seen.samples, seen.period_s
    line.amu = seen.memory_byte_s / seen.sampled_s / seen.memory_total_bytes
    line.idle_amu = seen.idle_memory_bytes / seen.memory_total_bytes
    line.memory_peak_bytes = seen.memory_peak_bytes
    line.cores, line.machine_cores = seen.cpu_s / seen.sampled_s, seen.machine_cpu_s / seen.sampled_s
    line.idle_cores, line.idle_w = seen.idle_cores, seen.idle_watts
    if records and wall_s:  # of a likelihood nothing is counted
        line.pcu = sum(record.flops for record in records) / (wall_s * seen.peak_flops_per_s)


def compression(column: Column, base: Column | None, nats: bool) -> float | None:
    """Model compression rate: 1 of the baseline itself; less of a way that keeps a second model at work.

    Args:
        column: a way of answering.
        base: the baseline; None: it is not there.
        nats: whether scores are log-likelihoods, which have no ratio.
    """
    seen = _seen(column)
    if base is None or nats or seen is None:
        return None
    sizes = [_weight_bytes(each, seen.weight_bytes) for each in (base, column)]
    known = set(base.scored)
    shared = [prompt for prompt in column.scored if prompt in known]
    if not all(sizes) or not shared:
        return None
    before, after = (float(each.mean("score", shared).mean()) for each in (base, column))
    return sizes[0] / sizes[1] * after / before if before else None


def _weight_bytes(column: Column, weights: Mapping[str, int]) -> int:
    """Of the models that worked for any of the answers; heads that were trained for them are not counted."""
    at_work = {name for record in column.records.values() for name in record.generated}
    return sum(size for name, size in weights.items() if name in at_work)


def _spent(line: Efficiency, column: Column, spec: ExperimentSpec, reference: Reference | None) -> None:
    """Cost = time x accelerators x price, energy = time x power: of what was measured, and of the idealised runtime."""
    watts = spec.accelerators * spec.watts if spec.watts is not None else None
    price = None if spec.price_per_hour is None else spec.accelerators * spec.price_per_hour / HOUR_S
    power = line.aec_w if line.aec_w is not None else watts
    if line.answers:
        line.seconds = sum(facts.wall_s for facts in column.facts) / line.answers
    if reference is not None:
        times = [reference.seconds(record) for record in _answered(column)]
        known = [seconds for seconds in times if seconds is not None]
        if known and len(known) == len(times):
            line.idealised_s = float(np.mean(known))
    line.price, line.idealised_price = (_times(s, price, THOUSAND) for s in (line.seconds, line.idealised_s))
    line.joules, line.idealised_joules = (_times(s, power) for s in (line.seconds, line.idealised_s))


def _times(seconds: float | None, rate: float | None, count: int = 1) -> float | None:
    return None if seconds is None or rate is None else count * seconds * rate


def idle_words(lines: Sequence[Efficiency]) -> str:
    """The idle baseline and how the machine was watched, in a sentence; empty: it was not."""
    seen = [line for line in lines if line.period_s is not None]
    if not seen:
        return ""
    middle = {
        name: float(np.median([value for line in seen if (value := getattr(line, name)) is not None] or [np.nan]))
        for name in ("period_s", "idle_amu", "idle_cores", "idle_w")
    }
    watts = "no power meter" if np.isnan(middle["idle_w"]) else f"{middle['idle_w']:.1f} W"
    return (
        f"Memory looked at every {1e3 * middle['period_s']:.0f} ms; idle with all models loaded:"
        f" {middle['idle_amu']:.1%} of the memory, {middle['idle_cores']:.2f} cores at work, {watts}"
    )


def reference_words(references: Mapping[str, Mapping[str, Any]]) -> str:
    """What idealised runtimes were measured on, and how far off they are, in a sentence; empty: there are none.

    Args:
        references: by pool, as `Reference.as_dict` gives them.
    """
    said = []
    for pool, each in references.items():
        errors = {name: error for name, error in each["errors"].items() if error is not None}
        checked = ", ".join(f"{error:.1%} ({name})" for name, error in errors.items()) or "unknown: no request fits"
        said.append(f"{pool} on {each['machine'].get('processor', 'this machine')}, off by at most {checked}")
    return f"Idealised runtimes, at requests they were not fitted to: {'; '.join(said)}" if said else ""
