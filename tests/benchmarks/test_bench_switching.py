"""The deepened model says what the original says, and the page of switching under load judges what it should."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.bench_switching import BAND, GOAL, LARGE, SMALL, Speed, arms, compare, page, pair_of, verdict
from benchmarks.slow_model import deepen, deepened
from benchmarks.strategies import Arm, run_arm
from experiments.stats.intervals import Interval
from pool.local_pool import LocalPool
from tests.experiments.speculation_models import checkpoint
from tests.near_pair import save_near_pair
from training.data.arithmetic import heldout
from turnout.config import DEMO_METHOD, ModelConfig, PoolConfig, TurnoutConfig, model_path

DEMO_LARGE = model_path(ModelConfig(path="demo:large"))


def loaded(folder: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@torch.inference_mode()
def test_the_deepened_demo_model_has_the_same_logits_and_costs_more(tmp_path: Path) -> None:
    model, deep = loaded(DEMO_LARGE), loaded(deepened(DEMO_LARGE, tmp_path / "deep", 5))
    ids = torch.arange(2, 162).reshape(4, 40)
    assert torch.equal(deep(ids).logits, model(ids).logits)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(deep.generate(ids, **options), model.generate(ids, **options))
    a_layer = sum(each.numel() for each in model.model.layers[0].parameters())
    assert deep.num_parameters() == model.num_parameters() + 5 * a_layer
    for layer in deep.model.layers[len(model.model.layers) :]:
        assert int(layer.self_attn.v_proj.weight.count_nonzero()) > 0
        assert int(layer.mlp.up_proj.weight.count_nonzero()) > 0


def test_a_model_is_not_deepened_by_nothing(tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path))
    with pytest.raises(ValueError, match="extra must be at least 1, got 0"):
        deepen(model, 0)


def near_config(folder: Path, large: str) -> TurnoutConfig:
    paths = {"small": folder / "small", "large": folder / large}
    models = {
        name: ModelConfig(path=str(path), dtype="float32", kv_memory_bytes=4 << 20) for name, path in paths.items()
    }
    config = TurnoutConfig(models=models, pools={"demo": PoolConfig(small="small", large="large")})
    return config.model_copy(update={"engine": config.engine.model_copy(update={"threads": 1})})


def test_switching_answers_the_same_with_the_deepened_model_at_a_higher_price(tmp_path: Path) -> None:
    save_near_pair(tmp_path)
    deepened(tmp_path / "large", tmp_path / "deep", 8)
    switch = Arm("switch", "entropy_adaptive", {"threshold": 2.0, "window": 1, "min_stay": 2, "effect": "current"})

    async def answers(large: str) -> list[tuple[list[str], float, float]]:
        pool = LocalPool.load("demo", near_config(tmp_path, large))
        try:
            ran = [await run_arm(pool, heldout(1, 4, seed=0), arm, 4, 24) for arm in (LARGE, SMALL, switch)]
        finally:
            await pool.close()
        return [([each.text for each in one.outcomes], one.large_share, one.flops) for one in ran]

    (plain, _, cost), (small, _, same), (mixed, share, _) = asyncio.run(answers("large"))
    (deep, _, dearer), (deep_small, _, again), (deep_mixed, deep_share, _) = asyncio.run(answers("deep"))
    assert (deep, deep_small, deep_mixed, deep_share) == (plain, small, mixed, share)
    assert 0.0 < share < 1.0
    assert plain != small
    assert dearer > 2 * cost
    assert again == same


def test_all_ways_take_turns_and_each_is_compared_with_the_large_model_of_its_round(tmp_path: Path) -> None:
    save_near_pair(tmp_path)

    async def ran() -> list[Speed]:
        pool = LocalPool.load("demo", near_config(tmp_path, "large"))
        try:
            chosen = await arms(pool, 2)
            return await compare("near", pool, [chosen[0], chosen[1], chosen[3]], heldout(1, 3, seed=0), 2, 2)
        finally:
            await pool.close()

    large, small, switched = asyncio.run(ran())
    assert (large.name, small.name) == (LARGE.name, SMALL.name)
    assert (large.ratio.low, large.ratio.high) == (1.0, 1.0)
    assert (large.switches, small.switches, switched.switches) == (False, False, True)
    assert (large.large_share, small.large_share) == (1.0, 0.0)
    assert small.per_s.value > 0
    assert switched.name.startswith("window 5, stay 10, next, threshold ")


def test_the_shipped_pair_is_deepened_under_its_own_name(tmp_path: Path) -> None:
    shipped, deep = pair_of(0, tmp_path, "bfloat16"), pair_of(2, tmp_path, "float32")
    assert shipped.config == TurnoutConfig.demo()
    assert deep.title == "large model deepened by 2 layers, float32"
    assert {model.dtype for model in deep.config.models.values()} == {"float32"}
    large = deep.config.models[deep.config.pools["demo"].large]
    assert model_path(large).parent == tmp_path
    assert loaded(model_path(large)).config.num_hidden_layers == loaded(DEMO_LARGE).config.num_hidden_layers + 2
    assert deep.config.pools["demo"].default == DEMO_METHOD


def speed(
    name: str, ratio: float, share: float, spread: float = 0.01, switches: bool = True, kept: float = 0.95
) -> Speed:
    ends, good = Interval(ratio, ratio - spread, ratio + spread), Interval(kept, kept - 0.02, kept + 0.02)
    return Speed("pair", 8, name, switches, Interval(10.0 * ratio, 9.0, 11.0), ends, share, good, 40.0)


def rows(cost: float, *ways: Speed) -> list[Speed]:
    return [speed(LARGE.name, 1.0, 1.0, switches=False), speed(SMALL.name, cost, 0.0, switches=False), *ways]


def test_only_ways_with_the_share_of_the_goal_are_judged() -> None:
    cheap = speed("too cheap", 3.0, BAND[0] - 0.05)
    slow = verdict(rows(12.0, cheap, speed("a", 0.9, 0.3), speed("b", 1.1, 0.4)))
    assert " 1.10 [1.09, 1.11] times, by b with 40.0% large tokens and 95.0% [93.0%, 97.0%] of the accuracy; " in slow
    assert slow.endswith("; goal at least 1.3: missed.")
    assert slow.startswith("- pair, 8 at once, cost 12.0 [")
    assert verdict(rows(12.0, cheap, speed("a", 1.4, 0.3))).endswith(f"goal at least {GOAL:g}: met.")
    unsure = verdict(rows(12.0, speed("a", 1.32, 0.3, spread=0.1)))
    assert unsure.endswith("met, but the interval holds the goal.")
    assert verdict(rows(12.0, cheap)) == "- pair, 8 at once: not measured: the shares of large tokens were 20.0%."


def test_a_fast_way_to_worse_answers_is_not_what_is_judged() -> None:
    fast, good = speed("fast", 2.0, 0.3, kept=0.8), speed("good", 1.2, 0.3)
    assert " by good with" in verdict(rows(12.0, fast, good))
    worse = verdict(rows(12.0, fast, speed("bad", 1.4, 0.3, kept=0.85)))
    assert " by fast with" in worse
    assert worse.endswith(": missed, for none of them keeps 92.9% of the accuracy.")


def test_a_large_model_that_is_not_dear_enough_is_said_to_be() -> None:
    found = verdict(rows(4.0, speed("a", 1.4, 0.3)))
    assert found.endswith(": met, though the goal is for a large model of at least 10 times the small one's cost.")


def test_the_page_has_a_verdict_for_each_pair_and_concurrency_and_a_row_for_each_way() -> None:
    text = page(rows(12.0, speed("a", 1.4, 0.3)), 7, 128).markdown()
    assert text.count("\n- pair, 8 at once") == 1
    head = next(line for line in text.splitlines() if line.startswith("| pair | at once"))
    body = [line for line in text.splitlines() if line.startswith("| pair | 8 |")]
    assert len(body) == 3
    assert {line.count("|") for line in body} == {head.count("|")}
