"""Probes on real engines: trained, saved, routed by, and what that costs."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from decoding.artifacts import SUFFIX
from deployments.batches.answerer import Answerer, Task
from deployments.batches.best_of import best_of_params, chances_of, looking, looks, shared_out, with_samples
from deployments.batches.inputs import Fault
from deployments.batches.job_directory import JobDirectory
from deployments.batches.lines import Line
from pool.local_pool import LocalPool
from router.difficulty import drift
from tests.engine.harness import Reply, answer, ask, call_of, pair_config, random_prompts
from training.router_outcomes import Outcome, Outcomes, Sample
from training.router_targets import Target, WhichStrategy, WhoIsRight
from training.router_training import Recipe, Trained, read_prompts, train_probe
from turnout.config import ModelConfig, RoutingConfig, TurnoutConfig
from turnout.errors import TurnoutError

PROMPTS = random_prompts(240, 24, seed=5)


def config_of(folder: Path, artifacts: Path, policy: str, **params: Any) -> TurnoutConfig:
    config = pair_config(folder, block_size=8)
    routing = RoutingConfig(policy={"name": policy, "params": params})
    pool = config.pools["pair"].model_copy(update={"routing": routing, "artifacts": str(artifacts)})
    return config.model_copy(update={"pools": {"pair": pool}})


def outcomes_of(seed: int) -> Outcomes:
    """Long prompts are beyond the small model; for another seed, short ones are."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, prompt in enumerate(PROMPTS):
        hard = (len(prompt) > 12) == (seed % 2 == 0)
        drawn = tuple(
            Sample(reward=float(rng.random() < (0.1 if hard else 0.95)), entropy_bits=2.0 if hard else 0.1)
            for _ in range(4)
        )
        rows.append(Outcome(prompt=f"{number}", samples_small=drawn, correct_large=True))
    return Outcomes.of(rows)


async def train(pool: LocalPool, target: Target, seed: int = 0) -> Trained:
    inputs = await read_prompts(pool.model_pool, PROMPTS, lambda *_: None)
    return train_probe(pool.model_pool, outcomes_of(seed), inputs, target, Recipe(32, epochs=60, learning_rate=1e-2))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a router, one that says the opposite (`other`), and strategies."""
    folder = tmp_path_factory.mktemp("trained")
    pool = LocalPool.load("pair", pair_config(pair_folder, block_size=8))
    targets = {"router": (WhoIsRight(), 0), "other": (WhoIsRight(), 1), "strategies": (WhichStrategy(), 0)}
    for name, (target, seed) in targets.items():
        (await train(pool, target, seed)).artifact.save(folder / f"{name}{SUFFIX}")
    assert pool.stats().sequences == 0
    await pool.close()
    return folder


@pytest.fixture
def artifacts(trained: Path, tmp_path: Path) -> Path:
    """Copies that a test may exchange."""
    return Path(shutil.copytree(trained, tmp_path / "artifacts"))


async def ask_auto(pool: LocalPool, prompt: list[int], **options: Any) -> Reply:
    return await answer(pool, replace(call_of(prompt, "auto", **options), explain=True))


async def test_a_probe_routes_and_the_router_adds_no_forward(pair_folder: Path, artifacts: Path):
    pool = LocalPool.load("pair", config_of(pair_folder, artifacts, "learned", threshold=0.5))
    sides, right = set(), 0
    for prompt in PROMPTS[:12]:
        routed = await ask_auto(pool, prompt, tenant="a")
        route = routed.usage.route
        assert route is not None
        side = route["params"]["model"]
        assert side == ("large" if route["scores"]["gain"] >= 0.5 else "small")
        right += side == ("large" if len(prompt) > 12 else "small")
        sides.add(side)
        alone = await ask(pool, prompt, "plain", {"model": side}, tenant="b")
        assert routed.ids == alone.ids
        meters, theirs = routed.usage.models, alone.usage.models
        assert meters[side].forwards == theirs[side].forwards
        assert meters[side].processed_tokens == theirs[side].processed_tokens
        if side == "large":  # the small model read the prompt, once, for the probe
            assert (meters["small"].forwards, meters["small"].generated_tokens) == (1, 0)
    assert sides == {"small", "large"}
    assert right >= 9
    await pool.close()


@pytest.mark.parametrize("dtype", ["float32", ModelConfig.model_fields["dtype"].default])
async def test_a_decision_is_the_same_alone_and_beside_others(pair_folder: Path, artifacts: Path, dtype: str):
    """The probe reads a state that was computed beside others' rows, whose sums may come in another order."""
    config = config_of(pair_folder, artifacts, "learned", large_share=0.5)
    models = {name: each.model_copy(update={"dtype": dtype}) for name, each in config.models.items()}
    pool = LocalPool.load("pair", config.model_copy(update={"models": models}))
    alone = [await ask_auto(pool, prompt, tenant=f"a{n}", max_tokens=4) for n, prompt in enumerate(PROMPTS[:24])]
    beside = await asyncio.gather(
        *(ask_auto(pool, prompt, tenant=f"b{n}", max_tokens=4) for n, prompt in enumerate(PROMPTS[:24]))
    )
    sides = set()
    for one, other in zip(alone, beside, strict=True):
        assert one.usage.route is not None
        assert other.usage.route is not None
        assert one.usage.route["params"] == other.usage.route["params"]
        assert one.usage.route["scores"] == pytest.approx(other.usage.route["scores"], abs=1e-4)
        sides.add(one.usage.route["params"]["model"])
    assert sides == {"small", "large"}
    await pool.close()


async def test_a_swapped_probe_holds_from_then_on_and_every_answer_names_its_own(pair_folder: Path, artifacts: Path):
    pool = LocalPool.load("pair", config_of(pair_folder, artifacts, "learned", threshold=0.5))
    assert pool.routing is not None
    opened = pool.model_pool.artifacts.open
    versions = {name: opened(name, "router_probe", pool.model_pool, "artifact").version for name in ("router", "other")}
    long = max(PROMPTS, key=len)
    first = [asyncio.create_task(ask_auto(pool, long, max_tokens=40, seed=seed, ignore_eos=True)) for seed in range(4)]
    while pool.stats().sequences < 4:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    (artifacts / f"other{SUFFIX}").replace(artifacts / f"router{SUFFIX}")
    after = await ask_auto(pool, long)
    before = await asyncio.gather(*first)
    assert after.usage.route is not None
    assert after.usage.route["version"].split("+")[0] == versions["other"]
    assert after.usage.route["params"] == {"model": "small"}
    for reply in before:
        assert reply.usage.route is not None
        expected = {versions["router"]: "large", versions["other"]: "small"}
        assert reply.usage.route["params"]["model"] == expected[reply.usage.route["version"].split("+")[0]]
        assert len(reply.ids) == 40
    await pool.close()


async def test_drift_reaches_the_answer(pair_folder: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drift.GainDrift.__init__, "__defaults__", (20,))
    pool = LocalPool.load("pair", config_of(pair_folder, artifacts, "learned"))
    long = max(PROMPTS, key=len)
    replies = [await ask_auto(pool, long, max_tokens=1) for _ in range(20)]
    assert [bool(reply.usage.notes) for reply in replies] == [False] * 19 + [True]
    assert "predicted gains have left what router router, version" in replies[-1].usage.notes[0]
    assert [len(reply.usage.router_drift) for reply in replies] == [0] * 19 + [1]
    [reading] = replies[-1].usage.router_drift
    assert (reading.calibration, reading.answers) == ("router", 20)
    assert reading.index > reading.limit
    await pool.close()


async def test_strategies_set_temperature_and_length(pair_folder: Path, artifacts: Path):
    silent = {"easy": "", "normal": "", "hard": ""}
    pool = LocalPool.load("pair", config_of(pair_folder, artifacts, "strategies", suffixes=silent))
    lengths = {"easy": 8, "normal": 20, "hard": 10}
    seen = set()
    for prompt in PROMPTS[:10]:
        reply = await ask_auto(pool, prompt, max_tokens=20, ignore_eos=True)
        route = reply.usage.route
        assert route is not None
        name = max(route["scores"], key=route["scores"].__getitem__)
        seen.add(name)
        assert len(reply.ids) == lengths[name]
        meter = reply.usage.models["small"]
        assert meter.processed_tokens == meter.prompt_tokens + lengths[name] - 1
        assert meter.prompt_tokens + meter.cached_tokens == len(prompt)
    assert len(seen) == 2
    await pool.close()


async def test_best_of_is_routed_to_and_shares_the_prompts_cache(pair_folder: Path, artifacts: Path):
    pool = LocalPool.load("pair", config_of(pair_folder, artifacts, "adaptive_best_of", average=3, most=6))
    counts = set()
    for prompt in PROMPTS[:12]:
        routed = await ask_auto(pool, prompt, temperature=1.0, tenant="a")
        route = routed.usage.route
        assert route is not None
        k = route["params"]["k"]
        counts.add(k)
        params = {"model": "small", "k": k, "rerank": "majority"}
        alone = await ask(pool, prompt, "best_of", params, temperature=1.0, tenant="b")
        assert routed.ids == alone.ids
        meter = alone.usage.models["small"]
        # The prompt once, and its last place again for every fork where there are several.
        assert meter.prompt_tokens + meter.cached_tokens == len(prompt) + (k if k > 1 else 0)
        assert meter.generated_tokens == len(alone.ids)
        assert meter.decode_tokens == meter.generated_tokens + meter.discarded_tokens - k
    assert len(counts) > 1
    for engine in pool.engines.values():
        engine.pool.check_integrity()
    assert (pool.stats().sequences, pool.stats().used_blocks) == (0, 0)
    await pool.close()


def test_a_reward_model_that_is_not_there_is_refused_where_the_pool_is_loaded(pair_folder: Path, artifacts: Path):
    config = config_of(pair_folder, artifacts, "adaptive_best_of", average=3, rerank="reward", reward_model="judge")
    with pytest.raises(TurnoutError, match=r"^pools\.pair\.routing\.policy\.params\.reward_model.*judge"):
        LocalPool.load("pair", config)


async def test_a_cascade_on_engines_is_one_models_answer(pair_folder: Path):
    pool = LocalPool.load("pair", pair_config(pair_folder, block_size=8))
    for prompt in PROMPTS[:8]:
        owners = {}
        for threshold, side in ((-1000.0, "small"), (1.0, "large")):
            found = await ask(pool, prompt, "cascade", {"threshold": threshold, "keep_cut": True}, temperature=0.8)
            owners[side] = found
            assert found.ids == (await ask(pool, prompt, "plain", {"model": side}, temperature=0.8)).ids
        assert owners["large"].usage.models["small"].discarded_tokens == len(owners["small"].ids)
        assert owners["large"].usage.cost.spent.flops > owners["small"].usage.cost.spent.flops
    assert (pool.stats().sequences, pool.stats().used_blocks) == (0, 0)
    await pool.close()


def test_samples_of_a_job_are_shared_out_among_its_lines(pair_folder: Path, artifacts: Path, tmp_path: Path):
    params = best_of_params(2.0, {"most": 5})
    pool = pair_config(pair_folder, block_size=8)
    with_artifacts = pool.pools["pair"].model_copy(update={"artifacts": str(artifacts)})
    config = pool.model_copy(update={"pools": {"pair": with_artifacts}})
    rows = [
        Line(number, f"id-{number}", "/v1/completions", {"prompt": list(prompt), "max_tokens": 4})
        for number, prompt in enumerate(PROMPTS[:16], 1)
    ]

    def answers(name: str, config: TurnoutConfig, rows: Iterable[Line | Fault]) -> list[dict[str, Any]]:
        place = JobDirectory(tmp_path / name)
        place.open({}, fresh=False)
        place.stage(rows, 8, None)
        made = Answerer(Task(place.folder, config, "pair", 0, 8))
        try:
            made({"block": place.blocks()})
        finally:
            made._run(made._service._backends["pair"]._answers._pool.close())  # type: ignore[attr-defined]
            made.close()
        return list(place.records(answered=True))

    chances = chances_of(answers("looked", looking(config, "pair", params), looks(rows)), "small")
    counts = shared_out(chances, params)
    assert len(set(counts.values())) > 1
    assert sum(counts.values()) <= 32
    done = answers("done", config, with_samples(rows, counts, params))
    used = [record["response"]["body"]["usage"]["turnout"] for record in done]
    assert [each["params"]["k"] for each in used] == [counts[number] for number in range(1, 17)]
