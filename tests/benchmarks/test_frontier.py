"""Quality against cost: areas by hand, an oracle that is one, coins that gain nothing, and who is left out."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.frontier.figures import figures, kept_at
from benchmarks.frontier.page import page
from benchmarks.frontier.prompts import LARGE, METERS, SMALL, Answers, Prompts, gather
from benchmarks.frontier.run import measure, parser, refused, shortened
from benchmarks.harness import run
from benchmarks.retention import RETENTIONS, Retention
from experiments.grid.planning import make_plan
from experiments.grid.spec import read_spec
from experiments.grid.store import Store
from tests.experiments.grid_runs import dataset, pair_config, spec
from training.router_measures import recovered
from turnout.errors import TurnoutError

COUNT = 400
RNG = np.random.default_rng(5)
RIGHT = {SMALL: (RNG.random(COUNT) < 0.5).astype(float), LARGE: (RNG.random(COUNT) < 0.9).astype(float)}


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.frontier.figures.ROUNDS", 200)


def answers(scores: np.ndarray, cost: np.ndarray, by_large: np.ndarray) -> Answers:
    return Answers(scores, dict.fromkeys(METERS, cost), 10.0 * by_large, np.full(len(scores), 10.0))


def routed(to_large: np.ndarray) -> Answers:
    """Each prompt answered by one of the two; the small one costs 1, the large one 10."""
    scores = np.where(to_large, RIGHT[LARGE], RIGHT[SMALL])
    return answers(scores, np.where(to_large, 10.0, 1.0), to_large.astype(float))


def prompts(**more: tuple[str, Answers]) -> Prompts:
    """The two models and these ways: (family, answers) by label."""
    ways = {SMALL: routed(np.zeros(COUNT, bool)), LARGE: routed(np.ones(COUNT, bool))}
    families = {SMALL: "plain", LARGE: "plain"}
    for label, (family, given) in more.items():
        ways[label], families[label] = given, family
    kinds = ["sums" if n % 2 else "lists" for n in range(COUNT)]
    return Prompts(kinds, ways, families)


def sent(order: np.ndarray, share: float) -> Answers:
    """The first of an order go to the large model."""
    to_large = np.zeros(COUNT, bool)
    to_large[order[: round(share * COUNT)]] = True
    return routed(to_large)


def test_the_oracle_has_all_of_itself_and_coins_have_nothing() -> None:
    best = np.argsort(-(RIGHT[LARGE] - RIGHT[SMALL]), kind="stable")
    coins = RNG.permutation(COUNT)
    shares = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    found = figures(
        prompts(
            **{f"best {share}": ("best", sent(best, share)) for share in shares},
            **{f"coins {share}": ("coins", sent(coins, share)) for share in shares},
        )
    )
    by_name = {family.name: family for family in found.families}
    assert by_name["best"].of_oracle["paper"].value == pytest.approx(1.0, abs=0.05)
    assert by_name["coins"].of_oracle["paper"].low < 0.15
    assert by_name["best"].area["paper"].low > 0.05
    above = {point.label: point.above["paper"] for point in found.points}
    assert above[SMALL].value == above[LARGE].value == 0.0
    assert above["best 0.4"].low > 0.1
    assert above["coins 0.4"].low < 0.05


def test_a_setting_that_costs_more_than_the_large_model_takes_nothing_from_those_that_cost_less() -> None:
    """It is left out before quality is made non-decreasing in cost, or it would be averaged with better ones."""
    small, large = np.array([1.0, 1.0, 1.0, 0.0] * 100), np.ones(400)
    ways = {
        SMALL: answers(small, np.full(400, 1.0), np.zeros(400)),
        LARGE: answers(large, np.full(400, 5.0), np.ones(400)),
        "a": answers(large, np.full(400, 2.0), np.ones(400)),
        "b": answers(large, np.full(400, 3.0), np.ones(400)),
        "dear": answers(np.zeros(400), np.full(400, 7.0), np.ones(400)),
    }

    def area(*labels: str) -> float:
        mine = {label: ways[label] for label in (SMALL, LARGE, *labels)}
        families = {label: "plain" if label in (SMALL, LARGE) else "f" for label in mine}
        [family] = figures(Prompts(["x"] * 400, mine, families)).families
        return family.area["paper"].value

    assert area("a", "b", "dear") == area("a", "b") > 0.05


def test_an_area_by_hand() -> None:
    """One prompt of four gains; the setting that sends it alone is a quarter of the way up in cost."""
    small, large = np.array([1.0, 1.0, 1.0, 0.0] * 100), np.ones(400)
    gains = large > small
    ways = {
        SMALL: answers(small, np.full(400, 1.0), np.zeros(400)),
        LARGE: answers(large, np.full(400, 5.0), np.ones(400)),
        "a": answers(np.where(gains, large, small), np.where(gains, 5.0, 1.0), gains.astype(float)),
        "b": answers(large, np.full(400, 4.0), np.ones(400)),
    }
    made = Prompts(["x"] * 400, ways, {SMALL: "plain", LARGE: "plain", "a": "f", "b": "f"})
    [family] = figures(made).families
    # Quality 0.75 at cost 1, 1 from cost 2 on: above the line by a triangle of base 1 and height 3/16.
    assert family.area["paper"].value == pytest.approx(0.5 * 3 / 16, abs=2e-3)
    assert family.of_oracle["paper"].value == pytest.approx(1.0, abs=0.02)
    point = next(each for each in figures(made).points if each.label == "a")
    assert point.above["paper"].value == pytest.approx(3 / 16)
    assert (point.share, point.costs["paper"].value) == (0.25, pytest.approx(0.4))
    assert kept_at(made, "f", 0.25).value == pytest.approx(1.0)
    assert kept_at(made, "f", 0.125).value == pytest.approx(0.875)


def test_the_oracle_knows_where_the_large_model_is_the_cheaper_one() -> None:
    """By time a rambling small model can cost more: choices that weigh its cost have all of the oracle, and no more."""
    cheap, dear = np.where(np.arange(COUNT) % 4 == 0, 9.0, 1.0), np.full(COUNT, 6.0)
    gain, extra = RIGHT[LARGE] - RIGHT[SMALL], dear - cheap

    def chosen(to_large: np.ndarray) -> Answers:
        scores = np.where(to_large, RIGHT[LARGE], RIGHT[SMALL])
        return answers(scores, np.where(to_large, dear, cheap), to_large.astype(float))

    ways = {SMALL: chosen(np.zeros(COUNT, bool)), LARGE: chosen(np.ones(COUNT, bool))}
    for price in (0.01, 0.15, 0.3, 0.5):  # the least gain that is worth a cost of 1
        ways[f"best {price}"] = chosen(gain > price * extra)
    made = Prompts(["x"] * COUNT, ways, {label: "plain" if label in (SMALL, LARGE) else "best" for label in ways})
    found = figures(made)
    [family] = found.families
    costs, qualities = found.oracle["wall_s"]
    for label, way in ways.items():
        most = np.interp(way.costs["wall_s"].mean() / 6.0, costs, qualities)
        assert way.scores.mean() <= most + 1e-9
        if label not in (SMALL, LARGE):
            assert way.scores.mean() == pytest.approx(most)
    assert 0.8 < family.of_oracle["wall_s"].value <= 1.0


def test_a_setting_that_costs_less_than_the_small_model_counts_from_there_on() -> None:
    made = prompts(
        a=("f", answers(RIGHT[LARGE], np.full(COUNT, 0.5), np.zeros(COUNT))),
        b=("f", answers(RIGHT[LARGE], np.full(COUNT, 20.0), np.ones(COUNT))),
    )
    [family] = figures(made).families
    gap = RIGHT[LARGE].mean() - RIGHT[SMALL].mean()
    assert family.area["wall_s"].value == pytest.approx(gap / 2)  # the large model's quality at every cost


def test_what_no_setting_reaches_is_said() -> None:
    few = prompts(a=("f", sent(np.arange(COUNT), 0.1)), b=("f", sent(np.arange(COUNT), 0.2)))
    assert np.isnan(kept_at(few, "f", 0.5).value)


def test_the_oracle_is_the_routers() -> None:
    from benchmarks.frontier.figures import _routed

    here = _routed(prompts(), "flops")
    assert recovered(here) == pytest.approx(0.0, abs=0.3)  # no predictions: the order of the prompts
    x, added = here.oracle
    assert (x[0], added[0]) == (0.0, 0.0)
    assert x[-1] == pytest.approx(1.0)
    assert max(added) > here.gain.mean()


def test_a_page_and_a_picture(tmp_path: Path) -> None:
    made = prompts(**{f"s{share}": ("route x", sent(np.arange(COUNT), share)) for share in (0.3, 0.6)})
    found = figures(made)
    report = page(found, made, {})
    text = report.markdown()
    assert "| route x | 2 | " in text
    assert "| lists | 200 |" in text
    assert f" are not equally good at {int((RIGHT[SMALL] != RIGHT[LARGE]).sum())} of them" in text
    assert "left out" not in text
    assert "Not in it" not in text
    report.save(tmp_path / "frontier.md")
    assert (tmp_path / "frontier.png").stat().st_size > 10_000


def test_each_goal_is_judged_or_said_not_to_be_measured() -> None:
    best, worst = np.argsort(RIGHT[SMALL] - RIGHT[LARGE], kind="stable"), np.argsort(RIGHT[LARGE] - RIGHT[SMALL])
    ways = {f"e{share}": ("entropy_adaptive", sent(best, share)) for share in (0.2, 0.3, 0.5)}
    ways |= {f"r{share}": ("route learned", sent(worst, share)) for share in (0.2, 0.6)}
    made = prompts(**ways)
    kept = {each: kept_at(made, "entropy_adaptive", each.share) for each in RETENTIONS}
    text = page(figures(made), made, kept).markdown()
    at = {
        each.share: next(line for line in text.splitlines() if f"at {each.share:.0%} large" in line)
        for each in RETENTIONS
    }
    assert at[0.25].endswith("; goal at least 92.9%: missed.")
    assert "; goal at least 96.7%: met" in at[0.43]
    assert "of what the oracle gains over random choices: -" in text
    assert "; goal at least 60%: missed." in text
    alone = prompts(**{f"x{share}": ("route x", sent(best, share)) for share in (0.2, 0.3)})
    none = page(figures(alone), alone, {Retention(0.5, 0.9): kept_at(alone, "route x", 0.5)}).markdown()
    assert "no two settings with that share between them; goal at least 90.0%: not measured." in none
    assert "it has not been run at two settings; goal at least 60%: not measured." in none


def saved_run(folder: Path, methods: list[dict[str, Any]]) -> tuple[Path, Path]:
    """The file of an experiment on a tiny pair, and a place for results."""
    dataset(folder, [{"id": f"p{n}", "prompt": f"prompt {n}", "answer": "e"} for n in range(40)])
    spec(pair_config(folder / "pair"), folder, methods=[{"name": "plain"}, *methods], chunk=40)
    return folder / "experiment.yaml", folder / "store"


PLAIN_SMALL = {"name": "plain", "params": {"model": "small"}}
RANDOM = {"name": "random_switch", "params": {"mean_run": 2, "min_stay": 1}, "grid": {"share": [0.3, 0.6]}}


def test_ways_for_which_nothing_was_trained_are_named_first_and_are_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They do not fail cell by cell, and the others are worth what they are worth."""
    lacking = [
        {"policy": "learned", "grid": {"large_share": [0.2, 0.5]}},
        {"name": "step_speculation", "params": {"scorer": "reward_model"}, "label": "steps"},
        {"name": "speculative", "params": {"drafter": "model_chain", "verifier": "judge"}, "label": "judged"},
    ]
    asked, store = saved_run(tmp_path, [PLAIN_SMALL, RANDOM, *lacking])
    out = tmp_path / "frontier"
    run(parser(), measure, ["--spec", str(asked), "--store", str(store), "--out", str(out)])
    said = capsys.readouterr().err
    assert said.index("left out: steps") < said.index("cells, near / plain")
    text = out.with_suffix(".md").read_text()
    assert text.count("\n- `route learned large_share=") == 2
    assert "- `judged`: " in text
    assert "| random_switch | 2 | " in text
    values = json.loads(out.with_suffix(".json").read_text())
    assert set(values["left_out"]) == {
        "route learned large_share=0.2",
        "route learned large_share=0.5",
        "steps",
        "judged",
    }
    assert (values["asked"], values["num_prompts"], values["failed"]) == (40, 40, {})


def test_a_trial_finds_exactly_those_that_lack_something(tmp_path: Path) -> None:
    asked, store = saved_run(tmp_path, [PLAIN_SMALL, RANDOM, {"policy": "strategies", "label": "routed"}])
    plan = make_plan(read_spec(asked), Store(store))
    found = asyncio.run(refused(plan))
    assert list(found) == ["routed"]
    assert "strategies" in found["routed"]


def test_prompts_at_which_a_way_fails_are_left_out_for_all_and_counted(tmp_path: Path) -> None:
    """A failed answer counts as wrong and costs nothing: it would pull its way down and to the left."""
    asked, root = saved_run(tmp_path, [PLAIN_SMALL, RANDOM])
    run(parser(), measure, ["--spec", str(asked), "--store", str(root), "--no-write"])
    store = Store(root)
    saved = store.load("small")
    label = next(cell.label for cell in saved.cells if cell.method == "random_switch")
    spoil(store, saved, label, 2)
    made = gather(saved, store)
    assert (made.size, made.num_asked, made.failed, made.left_out) == (38, 40, {label: 2}, {})
    assert {len(way.scores) for way in made.ways.values()} == {38}
    text = page(figures(made), made, {}).markdown()
    assert (
        f"Of 40 prompts 2 are left out for all ways, because one gave no answer or it has no score: `{label}` at 2."
        in text
    )
    spoil(store, saved, label, 20)
    dropped = gather(saved, store)
    assert (dropped.size, dropped.left_out) == (40, {label: "failed at 20 of 40 prompts"})
    assert label not in dropped.ways
    spoil(store, saved, SMALL, 20)  # without it there is no comparison
    assert gather(saved, store).size == 20


def spoil(store: Store, saved: Any, label: str, count: int) -> None:
    """The first answers of a way failed."""
    [cell] = [each for each in saved.cells if each.label == label]
    [records] = store.chunks(cell).values()
    for place in range(count):
        records[place] = replace(records[place], error="no room", score=0.0, tokens=0, by_large=0, paper=0.0, flops=0.0)
    facts = store.facts(cell)
    assert facts is not None
    store.save_chunk(cell, 0, records, facts)
    store.finish(cell, facts)


def test_settings_of_one_entry_are_a_curve_and_those_of_another_are_another(tmp_path: Path) -> None:
    again = {**RANDOM, "label": "other", "grid": {"share": [0.4, 0.5]}}
    asked, root = saved_run(tmp_path, [PLAIN_SMALL, RANDOM, again])
    run(parser(), measure, ["--spec", str(asked), "--store", str(root), "--no-write"])
    made = gather(Store(root).load("small"), Store(root))
    families = [name for label, name in made.families.items() if label not in (SMALL, LARGE)]
    assert families == ["random_switch"] * 2 + ["other"] * 2


def test_without_the_models_alone_nothing_can_be_said(tmp_path: Path) -> None:
    asked, root = saved_run(tmp_path, [RANDOM])
    with pytest.raises(TurnoutError, match="plain model=small"):
        run(parser(), measure, ["--spec", str(asked), "--store", str(root), "--no-write"])


@pytest.mark.drivers
def test_the_shipped_experiment_can_be_planned(tmp_path: Path) -> None:
    asked = read_spec(Path("ops/experiments/frontier.yaml"))
    plan = make_plan(asked, Store(tmp_path))
    labels = {cell.label for cell in plan.cells}
    assert {SMALL, LARGE} <= labels
    assert {cell.policy for cell in plan.cells} == {"", "learned", "strategies", "adaptive_best_of"}
    adaptive = {"entropy_adaptive", "sentence_lead", "cascade", "step_speculation", "monitored", "speculative"}
    assert adaptive <= {cell.method for cell in plan.cells}
    # Each way has the settings that make it a curve.
    tried = [{**axis.grid, **axis.sampling_grid} for axis in asked.methods if axis.grid or axis.sampling_grid]
    assert len(tried) >= 14
    assert all(math.prod(map(len, values.values())) >= 2 for values in tried)
    # More than are wanted: some may be left out.
    assert sum(choice.count or 0 for choice in asked.datasets) >= 1050


def test_a_quick_run_asks_little_and_overwrites_nothing() -> None:
    asked = read_spec(Path("ops/experiments/frontier.yaml"))
    quick = shortened(asked)
    assert {choice.count for choice in quick.datasets} == {8}
    assert quick.name != asked.name


def test_the_file_says_what_is_to_be_trained() -> None:
    """Every artifact that its ways may lack has a command in it."""
    text = Path("ops/experiments/frontier.yaml").read_text(encoding="utf-8")
    policies = {entry["policy"] for entry in yaml.safe_load(text)["methods"] if "policy" in entry}
    head = text[: text.index("\nname:")]
    assert all(any(line.startswith("#   ") and policy in line for line in head.splitlines()) for policy in policies)


def test_samples_are_given_by_the_chance_of_a_sample_and_not_by_that_of_a_greedy_answer() -> None:
    """What `make train-routers` trains on samples is what `adaptive_best_of` reads."""
    asked = yaml.safe_load(Path("ops/experiments/frontier.yaml").read_text(encoding="utf-8"))
    read = {entry["params"]["artifact"] for entry in asked["methods"] if entry.get("policy") == "adaptive_best_of"}
    assert read == {"samples"}
    recipe = Path("Makefile").read_text(encoding="utf-8").partition("\ntrain-routers:")[2].partition("\n\n")[0]
    drawn = next(line for line in recipe.splitlines() if "samples.jsonl" in line and "train outcomes" in line)
    assert "--samples 10 --temperature 0.8" in drawn
    assert "train router --outcomes .runs/routers/samples.jsonl --out .runs/routers/samples.safetensors" in recipe
    assert "for name in router samples strategies;" in recipe
