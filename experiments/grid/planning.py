"""From an experiment's file to its cells: which are there, and which are missing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.grid.bench import Job
from experiments.grid.cells import LIKELIHOOD, Cell
from experiments.grid.contenders import PLAIN, contenders
from experiments.grid.datasets import open_dataset
from experiments.grid.depends import depends, reference_key
from experiments.grid.spec import ExperimentSpec, MethodAxis, PolicyAxis, StopRule, config_of
from experiments.grid.store import Store
from router.base import policy_class
from turnout.calls import AUTO
from turnout.config import TurnoutConfig
from turnout.errors import invalid, not_found
from turnout.registry import all_methods, get_method, validated
from turnout.types import SamplingParams

# Cells of a grid that is planned before anybody is asked.
LARGE = 5000


@dataclass(frozen=True, slots=True)
class Way:
    """A way of answering; sampling and seeds are None where they are the experiment's."""

    label: str
    method: str
    params: dict[str, Any] = field(hash=False)
    policy: str = ""
    sampling: SamplingParams | None = field(default=None, hash=False)
    seeds: tuple[int, ...] | None = None

    def check(self, field: str) -> None:
        """Refuse what cannot be.

        Raises:
            TurnoutError: no such method or policy, or a wrong parameter; names it.
        """
        if self.policy:
            policy_class(self.policy, f"{field}.policy").parse_params(self.params, f"{field}.params")
        else:
            get_method(self.method, f"{field}.name").parse(self.params, f"{field}.params")


@dataclass(slots=True)
class Plan:
    """Cells of an experiment, and what is missing.

    Attributes:
        cells: all.
        refused: by a cell's name, why it makes no sense.
        todo: what is to be run, baselines first.
        prompts: answers that are missing.
        queued: addresses of `todo`.
        stop: the rule of a cell: the experiment's, its chance of a wrong stop shared out among all that may stop.
        references: by pool whose single requests are to be measured, the key of what they depend on.
    """

    spec: ExperimentSpec
    config: TurnoutConfig
    cells: list[Cell]
    refused: dict[str, str]
    todo: list[Job]
    prompts: int
    queued: set[str] = field(default_factory=set)
    stop: StopRule | None = None
    references: dict[str, str] = field(default_factory=dict)


def ways(spec: ExperimentSpec) -> list[Way]:
    """Every way of answering, labels once each.

    Raises:
        TurnoutError: an unknown method, a wrong parameter, or two ways with one label; names it.
    """
    found: dict[str, Way] = {}
    grouped: set[str] = set()
    for index, entry in enumerate(spec.methods):
        if isinstance(entry, str):
            made = list(_registered() if entry == "registered" else _speculation(spec.sampling.greedy))
            grouped |= {way.label for way in made}
            made = [way for way in made if way.label not in spec.left_out]
        else:
            made = list(_of_axis(spec, entry, f"methods.{index}"))
        for way in made:
            way.check(f"methods.{index}")
            if way.label in found and found[way.label] != way:
                raise invalid(f"methods.{index}.label", f"{way.label!r} is there already")
            found[way.label] = way
    unknown = next((label for label in spec.left_out if label not in grouped), None)
    if unknown is not None:
        raise not_found("left_out", unknown, sorted(grouped))
    if spec.baseline not in found:
        raise not_found("baseline", spec.baseline, list(found))
    return list(found.values())


def _of_axis(spec: ExperimentSpec, axis: MethodAxis | PolicyAxis, where: str) -> Iterator[Way]:
    method, policy = (AUTO, axis.policy) if isinstance(axis, PolicyAxis) else (axis.name, "")
    for label, params, own in axis.arms():
        sampling = None
        if own:
            sampling = validated(SamplingParams, {**spec.sampling.model_dump(), **own}, f"{where}.sampling")
        yield Way(label, method, params, policy, sampling, axis.seeds)


def _registered() -> Iterator[Way]:
    for info in all_methods():
        yield Way(info.name, info.name, {})
    yield Way("plain model=small", "plain", {"model": "small"})


def _speculation(greedy: bool) -> Iterator[Way]:
    for contender in contenders().values():
        if contender.name != PLAIN and contender.params is not None and not (greedy and contender.sampled_only):
            yield Way(f"speculative {contender.name}", contender.method, contender.params)


def count_cells(spec: ExperimentSpec) -> int:
    """How many cells a file asks for, without making them."""
    registered = len(list(_registered())) if "registered" in spec.methods else 0
    speculation = len(list(_speculation(spec.sampling.greedy))) if "speculation" in spec.methods else 0
    groups = {"registered": registered, "speculation": speculation}
    drawn = sum(
        groups[entry] * len(spec.seeds) if isinstance(entry, str) else entry.size * len(entry.seeds or spec.seeds)
        for entry in spec.methods
    )
    pools = len(spec.pools) or len(config_of(spec).pools)
    return pools * drawn * len(spec.datasets) * len(spec.loads)


def make_plan(spec: ExperimentSpec, store: Store, again: bool = False) -> Plan:
    """All cells of an experiment, and which of them are still to be run.

    Args:
        spec: the experiment.
        store: where results are.
        again: whether cells that were refused are tried once more.

    Raises:
        TurnoutError: the file, a dataset or the configuration is at fault.
    """
    config = config_of(spec)
    pools = spec.pools or list(config.pools)
    unknown = next((name for name in pools if name not in config.pools), None)
    if unknown is not None:
        raise not_found("pools", unknown, list(config.pools))
    datasets = {choice.label: open_dataset(choice) for choice in spec.datasets}
    arms = ways(spec)
    plan = Plan(spec, config, [], dict(spec.left_out), [], 0, stop=_shared_out(spec, len(pools), arms))
    arms.sort(key=lambda way: way.label != spec.baseline)  # stable: others keep their order
    for pool, choice, load in itertools.product(pools, spec.datasets, spec.loads):
        dataset = datasets[choice.label]
        bases: dict[int, Cell] = {}
        for way, seed in ((each, seed) for each in arms for seed in each.seeds or spec.seeds):
            sampling = way.sampling or spec.sampling
            cell = Cell(
                *(pool, way.label, way.method, way.params, choice, load, seed, sampling, spec.chunk), policy=way.policy
            )
            cell = replace(cell, depends=depends(config, cell, dataset))
            if why := _senseless(cell):
                plan.refused[cell.name] = why
                continue
            is_base = way.label == spec.baseline
            # A seed that the baseline has not: any of its answers to the same prompts will do.
            base = None if is_base else bases.get(seed) or next(iter(bases.values()), None)
            _add(plan, store, cell, base, again, len(dataset.items))
            if is_base:
                bases[seed] = cell
    plan.todo.sort(key=lambda job: (job.baseline is not None, job.cell.pool))
    plan.references = _unmeasured(plan, store, pools) if spec.idealised else {}
    return plan


def _unmeasured(plan: Plan, store: Store, pools: Sequence[str]) -> dict[str, str]:
    """By pool without a reference of how it is now, the key of one."""
    known = store.kept(plan.spec.name, "references")
    keys = {pool: reference_key(plan.config, pool) for pool in pools}
    return {pool: key for pool, key in keys.items() if known.get(pool, {}).get("key") != key}


def _shared_out(spec: ExperimentSpec, num_pools: int, arms: list[Way]) -> StopRule | None:
    """The stop rule, so strict that the chance of any wrong stop of the whole grid is at most what was asked for."""
    datasets = sum(choice.scorer is None or choice.scorer.kind != LIKELIHOOD for choice in spec.datasets)
    loads = sum(load.rate is None for load in spec.loads)
    drawn = sum(len(way.seeds or spec.seeds) for way in arms if way.label != spec.baseline)
    cells = num_pools * datasets * loads * drawn
    return spec.stop.model_copy(update={"alpha": spec.stop.alpha / cells}) if spec.stop and cells else None


def _add(plan: Plan, store: Store, cell: Cell, base: Cell | None, again: bool, prompts: int) -> None:
    # The rule knows bounds of the differences it follows; likelihoods have none.
    stop = plan.stop if base is not None and cell.load.rate is None and not cell.likelihood else None
    if stop is not None and base is not None:
        rule = {"stop": stop.model_dump_json(), "baseline": base.address, "order": "by chance"}
        cell = replace(cell, depends={**cell.depends, **rule})
    plan.cells.append(cell)
    state = store.state(cell)
    if state == "done" or (state == "refused" and not again):
        return
    if (address := cell.address) in plan.queued:
        return  # the same under another label
    plan.queued.add(address)
    plan.todo.append(Job(cell, base if stop is not None else None, stop))
    if state == "unscored":
        return  # it has its answers
    done = sum(map(len, store.chunks(cell).values())) if state == "partial" else 0
    plan.prompts += prompts - done if cell.load.rate is None else math.ceil(cell.load.rate * cell.load.duration_s)


def _senseless(cell: Cell) -> str:
    if cell.likelihood:
        if cell.method != "plain":
            return "a likelihood is a model's own: only the method plain has one"
        if cell.load.rate is not None:
            return "a likelihood generates nothing: there is no load"
    return ""
