"""The standing comparison leaves nothing out that it does not name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from decoding.drafters.base import PACKAGE as DRAFTERS
from decoding.lengths.base import PACKAGE as LENGTHS
from decoding.selectors.base import PACKAGE as SELECTORS
from decoding.verifiers.base import PACKAGE as VERIFIERS
from experiments.grid.contenders import NO_DRAFT, contenders
from experiments.grid.planning import count_cells, ways
from experiments.grid.spec import ExperimentSpec, config_of, read_spec
from experiments.stats.power import ALPHA, UNSEEN_SPREAD, detectable
from training.calibration_data import DEMO
from turnout.config import artifacts_path
from turnout.part_choice import PartChoice
from turnout.registry import all_methods, load
from turnout.sources import ROOT

SLOTS = {"drafter": DRAFTERS, "verifier": VERIFIERS, "length": LENGTHS, "select": SELECTORS}
STANDING = ROOT / "ops" / "experiments" / "standing.yaml"


def lacking(spec: ExperimentSpec) -> set[str]:
    """Registered methods and speculative parts that are neither run nor left out with a reason."""
    run = ways(spec)
    parts = {
        each.name for each in contenders().values() if each.params and not (spec.sampling.greedy and each.sampled_only)
    }
    methods = {info.name for info in all_methods()} - {way.method for way in run}
    return {*methods, *(parts - {way.label.removeprefix("speculative ") for way in run})} - {
        label.removeprefix("speculative ") for label in spec.left_out
    }


def lacks(name: str, folder: Path) -> set[str]:
    """Trained parts that a contender needs, and that are not in a folder of artifacts."""
    found = set[str]()
    for slot, package in SLOTS.items():
        given = (contenders()[name].params or {}).get(slot, [])
        for each in given if isinstance(given, list) else [given]:
            choice = PartChoice.model_validate(each)
            if choice.name != NO_DRAFT:
                params = load(package, choice.name, slot).PART.Params.model_validate(choice.params)
                found |= {params.artifact} if hasattr(params, "artifact") else set()
    return {artifact for artifact in found if not (folder / f"{artifact}.safetensors").exists()}


def stale(left_out: Iterable[str], folder: Path) -> list[str]:
    """Speculative ways that are left out though nothing that they need is missing."""
    names = (label.removeprefix("speculative ") for label in left_out if label.startswith("speculative "))
    return [name for name in names if not lacks(name, folder)]


def test_what_ships_is_not_left_out_and_what_is_run_ships(tmp_path: Path) -> None:
    spec = read_spec(STANDING)
    shipped = artifacts_path(config_of(spec).pools["demo"])
    assert shipped is not None
    assert stale(spec.left_out, shipped) == []
    run = {way.label.removeprefix("speculative ") for way in ways(spec)} & contenders().keys()
    assert {name for name in run if lacks(name, shipped)} == set()
    # The day after what it needs was trained:
    assert stale(["speculative model_chain+disco"], tmp_path) == []
    (tmp_path / "disco.safetensors").touch()
    assert stale(["speculative model_chain+disco"], tmp_path) == ["model_chain+disco"]


def test_it_holds_every_registered_method_on_every_demo_task() -> None:
    spec = read_spec(STANDING)
    assert lacking(spec) == set()
    assert [each.demo for each in spec.datasets] == sorted(DEMO)
    assert spec.baseline == "plain"
    assert "plain model=small" in [way.label for way in ways(spec)]
    assert list(spec.pools) == list(config_of(spec).pools)
    asked = sum(len(way.seeds or spec.seeds) for way in ways(spec)) + len(spec.left_out)
    assert count_cells(spec) == asked * len(DEMO)


def test_the_grid_of_samplings_draws_every_setting_several_times_and_ends_answers_alike() -> None:
    spec = read_spec(STANDING.with_name("sampling.yaml"))
    drawn = [(way, way.sampling) for way in ways(spec) if way.sampling is not None]
    assert len(drawn) == 15
    assert all(len(way.seeds or ()) >= 3 for way, _ in drawn)
    assert not any(sampling.greedy for _, sampling in drawn)
    assert {(sampling.max_tokens, sampling.stop) for _, sampling in drawn} == {(spec.sampling.max_tokens, ())}
    assert spec.sampling.greedy


def test_ways_that_draw_who_writes_are_drawn_several_times() -> None:
    drawn = [way for way in ways(read_spec(STANDING)) if way.method == "random_switch" and way.params]
    assert drawn
    assert all(len(way.seeds or ()) >= 3 for way in drawn)


@pytest.mark.parametrize("group", ["registered", "speculation"])
def test_one_that_is_missing_is_found_unless_a_reason_is_given(group: str, tmp_path: Path) -> None:
    values = yaml.safe_load(STANDING.read_text(encoding="utf-8"))
    values["methods"] = [entry for entry in values["methods"] if entry != group]
    if group == "speculation":
        values["methods"].append({"name": "plain", "params": {"model": "small"}, "label": "another"})
        values["left_out"] = {}
    else:
        values["methods"].append({"name": "plain"})
        values["left_out"] = {
            label: why for label, why in values["left_out"].items() if label.startswith("speculative")
        }
    path = tmp_path / "standing.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert lacking(read_spec(path)) >= ({"best_of", "pearl"} if group == "registered" else {"medusa", "ucb"})
    values["methods"].append(group)
    values["methods"].remove({"name": "plain"}) if group == "registered" else None
    values["left_out"] = {"best_of" if group == "registered" else "speculative medusa": "for this test"}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert lacking(read_spec(path)) == set()


def test_what_it_says_of_its_power_is_so() -> None:
    """The number of prompts, and the difference that they tell apart, stand in the file."""
    spec, said = read_spec(STANDING), STANDING.read_text(encoding="utf-8")
    counts = {each.demo: each.count for each in spec.datasets}
    compared = (len(ways(spec)) - 1) * len(spec.datasets)
    found = re.findall(r"(\w+): (\d+) prompts tell about (\d+) points apart", said)
    assert [task for task, _, _ in found] == ["arithmetic", "lists", "passages"]
    for task, count, points in found:
        assert counts[task] == int(count)
        told = 100 * detectable(int(count), UNSEEN_SPREAD, ALPHA / compared)
        assert float(points) == pytest.approx(told, abs=0.6)
