"""Routing policies as ways of answering in a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.grid.code import code_digest, modules, named, words_of
from experiments.grid.planning import make_plan
from experiments.grid.runner import run_plan
from experiments.grid.store import Store
from experiments.reports.data import make_report
from tests.experiments.grid_runs import PROMPTS, dataset, pair_config, spec
from turnout.errors import Code, TurnoutError

LONG = 6  # tokens from which a prompt is the large model's
RULES = {
    "rules": [{"when": {"prompt_tokens": {"max": LONG - 1}}, "method": {"name": "plain", "model": "small"}}],
    "default": {"method": {"name": "plain", "model": "large"}},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration of a tiny random pair."""
    return pair_config(tmp_path_factory.mktemp("grid-pair"))


def test_a_policy_answers_each_prompt_by_the_method_it_chooses(pair: Path, tmp_path: Path) -> None:
    dataset(tmp_path)
    store = Store(tmp_path / "store")
    methods: list[dict[str, Any]] = [
        {"name": "plain"},
        {"name": "plain", "label": "small", "params": {"model": "small"}},
        {"policy": "static", "params": RULES, "label": "by-length"},
        {"name": "plain", "label": "plain-again"},
    ]
    asked = spec(pair, tmp_path, methods=methods)
    plan = make_plan(asked, store)
    assert run_plan(plan, store).failed == {}
    saved = store.load("small")
    answers = {cell.label: {r.id: r.text for r in store.records(cell)} for cell in saved.cells}
    chosen = {f"p{n}": "small" if len(text) < LONG else "plain" for n, text in enumerate(PROMPTS)}
    assert set(chosen.values()) == {"small", "plain"}
    assert answers["by-length"] == {name: answers[way][name] for name, way in chosen.items()}
    assert answers["by-length"] not in (answers["small"], answers["plain"])
    assert answers["plain-again"] == answers["plain"]
    assert {line.label: line.method for line in make_report(saved, store).lines}["by-length"] == "route static"


def test_an_unknown_policy_or_parameter_is_refused_by_name(pair: Path, tmp_path: Path) -> None:
    dataset(tmp_path)
    store = Store(tmp_path / "store")

    def refusal(**entry: Any) -> TurnoutError:
        with pytest.raises(TurnoutError) as refused:
            make_plan(spec(pair, tmp_path, methods=[{"name": "plain"}, entry]), store)
        return refused.value

    assert refusal(policy="statik").field == "methods.1.policy"
    assert refusal(policy="statik").code is Code.NOT_FOUND
    assert str(refusal(policy="learned", params={"large_share": 2}).field).startswith("methods.1.params.large_share")


def test_what_a_policy_runs_and_opens_is_part_of_what_its_cells_depend_on() -> None:
    learned = code_digest("auto", {}, "exact", "learned")
    assert learned != code_digest("auto", {}, "exact", "strategies")
    assert learned != code_digest("plain", {}, "exact")
    assert "mine" in words_of("auto", {"artifact": "mine"}, "learned")
    # And so is what a policy inside it runs and opens by default.
    inside = {"default": {"policy": {"name": "learned"}}}
    assert "router" in words_of("auto", inside, "static")
    assert "router" not in words_of("auto", {"default": {"method": {"name": "plain"}}}, "static")
    known = modules()
    assert {"router.policies.static", "router.policies.learned"} <= named("auto", inside, known, "static")
    assert "router.policies.learned" not in named("auto", {"default": {"method": {"name": "plain"}}}, known, "static")
    assert "router" in words_of("auto", {}, "learned")
