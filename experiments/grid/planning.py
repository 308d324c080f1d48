"""From an experiment's file to its cells: which are there, which are missing, and what the missing ones would take."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine.fingerprint import content_digests, numerics_class
from engine.prepare import AUTO
from experiments import machine
from experiments.grid.bench import Job
from experiments.grid.cells import LIKELIHOOD, Cell
from experiments.grid.code import code_digest, words_of
from experiments.grid.datasets import Dataset, open_dataset
from experiments.grid.spec import ExperimentSpec, PolicyAxis, StopRule, config_of
from experiments.grid.store import Store
from experiments.speculation.contenders import PLAIN, contenders
from router.base import policy_class
from turnout.config import TurnoutConfig, artifacts_path, model_path
from turnout.errors import invalid, not_found
from turnout.registry import all_methods, get_method

LIBRARIES = ("torch", "transformers", "numpy")
# For a first estimate, before anything was measured: bytes of weights a processor reads in a second.
BYTES_PER_S = 5e9
# Cells of a grid that is planned before anybody is asked.
LARGE = 5000


@dataclass(frozen=True, slots=True)
class Way:
    """A way of answering."""

    label: str
    method: str
    params: dict[str, Any] = field(hash=False)
    policy: str = ""

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
    """What an experiment is made of.

    Attributes:
        cells: all.
        refused: by a cell's name, why it makes no sense.
        todo: what is to be run, baselines first.
        prompts: answers that are missing.
        queued: addresses of `todo`.
        stop: the rule of a cell: the experiment's, its chance of a wrong stop shared out among all that may stop.
    """

    spec: ExperimentSpec
    config: TurnoutConfig
    cells: list[Cell]
    refused: dict[str, str]
    todo: list[Job]
    prompts: int
    queued: set[str] = field(default_factory=set)
    stop: StopRule | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What running so many cells would take.

    Attributes:
        seconds: on the clock, all workers together.
        measured: whether earlier cells were measured on this machine; otherwise it is a rough guess.
        tokens: generated at most.
        price: in the currency of `price_per_hour`; None where that is not given.
    """

    cells: int
    prompts: int
    seconds: float
    measured: bool
    tokens: int
    price: float | None

    def __str__(self) -> str:
        basis = "from what was measured" if self.measured else "a rough guess: nothing was measured yet"
        price = "" if self.price is None else f", price {self.price:.2f}"
        return (
            f"{self.cells} cells, {self.prompts} prompts, at most {self.tokens} tokens,"
            f" about {_hours(self.seconds)} ({basis}){price}"
        )


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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
        elif isinstance(entry, PolicyAxis):
            made = [Way(label, AUTO, params, entry.policy) for label, params in entry.arms()]
        else:
            made = [Way(label, entry.name, params) for label, params in entry.arms()]
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
    arms = sum(groups[entry] if isinstance(entry, str) else entry.size for entry in spec.methods)
    pools = len(spec.pools) or len(config_of(spec).pools)
    return pools * arms * len(spec.datasets) * len(spec.loads) * len(spec.seeds)


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
    arms, sizes = ways(spec), {name: len(each.items) for name, each in datasets.items()}
    plan = Plan(spec, config, [], dict(spec.left_out), [], 0, stop=_shared_out(spec, len(pools), len(arms)))
    arms.sort(key=lambda way: way.label != spec.baseline)  # stable: others keep their order
    for pool in pools:
        for choice in spec.datasets:
            for load in spec.loads:
                for seed in spec.seeds:
                    base: Cell | None = None
                    for way in arms:
                        cell = Cell(
                            *(pool, way.label, way.method, way.params, choice, load, seed, spec.sampling, spec.chunk),
                            policy=way.policy,
                        )
                        cell = replace(cell, depends=_depends(config, cell, datasets[choice.label]))
                        why = _senseless(cell)
                        if why:
                            plan.refused[cell.name] = why
                            continue
                        _add(plan, store, cell, base, again, sizes[choice.label])
                        base = base or (cell if way.label == spec.baseline else None)
    plan.todo.sort(key=lambda job: (job.baseline is not None, job.cell.pool))
    return plan


def _shared_out(spec: ExperimentSpec, num_pools: int, num_arms: int) -> StopRule | None:
    """The stop rule, so strict that the chance of any wrong stop of the whole grid is at most what was asked for."""
    datasets = sum(choice.scorer is None or choice.scorer.kind != LIKELIHOOD for choice in spec.datasets)
    loads = sum(load.rate is None for load in spec.loads)
    cells = num_pools * datasets * loads * len(spec.seeds) * (num_arms - 1)
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
    done = sum(map(len, store.chunks(cell).values())) if state == "partial" else 0
    plan.prompts += prompts - done if cell.load.rate is None else math.ceil(cell.load.rate * cell.load.duration_s)


def _senseless(cell: Cell) -> str:
    if cell.likelihood:
        if cell.method != "plain":
            return "a likelihood is a model's own: only the method plain has one"
        if cell.load.rate is not None:
            return "a likelihood generates nothing: there is no load"
    return ""


def estimate(plan: Plan, store: Store) -> Estimate:
    """What the missing cells would take."""
    return estimated(plan.spec, plan.config, store, len(plan.todo), plan.prompts)


def estimated(spec: ExperimentSpec, config: TurnoutConfig, store: Store, cells: int, prompts: int) -> Estimate:
    """What so many cells and prompts would take."""
    tokens = prompts * spec.sampling.max_tokens
    known = [(facts.wall_s, count) for facts, count in store.every_facts() if facts.load is None and count]
    if known:
        seconds = prompts * sum(wall for wall, _ in known) / sum(count for _, count in known)
    else:
        at_once = max(load.at_once for load in spec.loads)
        seconds = tokens * _weight_bytes(config) / BYTES_PER_S / at_once
    seconds /= max(spec.workers, 1)
    price = None if spec.price_per_hour is None else spec.price_per_hour * max(spec.workers, 1) * seconds / 3600
    return Estimate(cells, prompts, seconds, bool(known), tokens, price)


def _weight_bytes(config: TurnoutConfig) -> int:
    folders = {model_path(model) for model in config.models.values()}
    return max(sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in folders)


def _depends(config: TurnoutConfig, cell: Cell, dataset: Dataset) -> dict[str, str]:
    pool = config.pools[cell.pool]
    members = {role: config.models[getattr(pool, role)] for role in ("small", "large")}
    settings = {
        "models": {role: model.model_dump(mode="json", exclude={"path"}) for role, model in members.items()},
        "engine": config.engine.model_dump(mode="json"),
        "reuse": None if pool.reuse is None else pool.reuse.model_dump(mode="json"),
    }
    folders = [model_path(model) for model in members.values()]
    artifacts = _artifacts(artifacts_path(pool), words_of(cell.method, cell.params, cell.policy))
    device = numerics_class("torch", torch.device(members["large"].device))
    return {
        "config": _digest(settings),
        "code": code_digest(cell.method, cell.params, dataset.scorer.kind, cell.policy),
        "models": _digest([[_model(folder) for folder in folders], artifacts]),
        "dataset": dataset.digest,
        "machine": _digest([device, _machine()]),
        **_versions(),
    }


@cache
def _versions() -> dict[str, str]:
    """Of what computes beside our own code: after an upgrade, old answers and times are not this machine's any more."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


@cache
def _machine() -> dict[str, str]:
    return {name: value for name, value in machine.describe().items() if name in ("processor", "cores")}


@cache
def _model(folder: Path) -> str:
    return _digest(content_digests(folder, folder))


def _artifacts(folder: Path | None, words: frozenset[str]) -> dict[str, str]:
    """Of the files in a pool's folder of artifacts that a way of answering may open, by name."""
    if folder is None or not folder.is_dir():
        return {}
    paths = sorted(path for path in folder.glob("*.safetensors") if path.stem in words)
    return {path.stem: _file(path, path.stat().st_mtime_ns) for path in paths}


@cache
def _file(path: Path, changed: int) -> str:
    del changed  # part of the key: a file that was written again is read again
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
