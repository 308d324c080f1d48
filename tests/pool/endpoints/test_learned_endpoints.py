"""Learned routing between endpoints: by the prompt's text, from answers that were judged."""

import json
from functools import partial

import numpy as np
import pytest

from decoding.artifacts import Artifact
from pool.endpoints.text_pool import load_text_pool
from router.difficulty.text_features import MOST_CHARS, NUM_BUCKETS, TEXT_FEATURES, read_text
from tests.pool.endpoints.scripted import answer, ask, no_model, text_of, words
from training.router_outcomes import Asked, Outcome, Outcomes
from training.router_runs import Question, run_outcomes
from training.router_targets import WhoIsRight
from training.router_training import Recipe, read_texts, train_probe
from turnout.config import parse_config
from turnout.errors import TurnoutError
from turnout.types import RouteLimits, SamplingParams

QUICK = Recipe(16, epochs=40, learning_rate=1e-2)
THINGS = ("sets", "sums", "trees", "rings", "maps")


def prompts(num=100):
    """Every other one is to be proven, which is beyond the small model."""
    return [f"{'prove that' if n % 2 else 'list all'} {THINGS[n % 5]} {n}" for n in range(num)]


def judged():
    rows = [Outcome(prompt=text, correct_small="prove" not in text, correct_large=True) for text in prompts()]
    return Outcomes.of(rows)


def config_of(small, large, folder, policy=None, model="weak-1", price=0.1, dialect="openai", **more):
    routing = {} if policy is None else {"routing": {"policy": policy, **more}}
    return parse_config(
        {
            "models": {
                "little": {
                    "endpoint": {"url": small, "model": model, "dialect": dialect},
                    "price": {"output_usd_per_mtok": price},
                },
                "big": {"endpoint": {"url": large, "model": "strong-1"}, "price": {"output_usd_per_mtok": 1.0}},
            },
            "pools": {"p": {"small": "little", "large": "big", "artifacts": str(folder), **routing}},
        }
    )


def learned(**params):
    return {"name": "learned", "params": params}


@pytest.fixture
async def opened(site, tmp_path):
    """Opens pools over two servers, with a router trained for them in their folder of artifacts."""
    small, large = await site.server(words("s")), await site.server(words("l"))

    def make(policy=None, **values):
        folder = tmp_path / "artifacts"
        pool = load_text_pool("p", config_of(small.url, large.url, folder, policy, **values), no_model)
        site.stack.push_async_callback(pool.close)
        return pool

    plain = make()
    inputs = read_texts([row.question for row in judged().rows])
    trained = train_probe(plain.model_pool, judged(), inputs, WhoIsRight(), QUICK, reads="text")
    trained.artifact.save(tmp_path / "artifacts" / "router.safetensors")
    make.folder, make.servers, make.trained = tmp_path / "artifacts", (small, large), trained
    return make


async def test_the_endpoint_follows_the_routers_score_and_the_answer_says_why(opened, tmp_path):
    log = tmp_path / "routes.jsonl"
    pool = opened(learned(threshold=0.5), log={"path": str(log)})
    for text, role in (("prove that groups 7", "large"), ("list all groups 8", "small")):
        chunks, usage = await answer(pool, ask(text, explain=True))
        route = usage.route
        assert route["policy"] == "learned"
        assert route["version"].startswith(opened.trained.artifact.version)
        assert route["params"]["model"] == role
        assert (route["scores"]["gain"] >= 0.5) == (role == "large")
        assert route["features"] == read_text(text)[1]
        assert text_of(chunks) == role[0]
        assert list(usage.models) == [pool.model_pool.roles[role]]
    assert [len(server.bodies) for server in opened.servers] == [1, 1]
    explained = await pool.explain(ask("list all groups 8"))
    assert explained.as_json() == route
    assert [len(server.bodies) for server in opened.servers] == [1, 1]
    await pool.close()
    [written] = tmp_path.glob("routes*.jsonl")  # its process is in the name
    kept = [json.loads(line)["decision"]["params"]["model"] for line in written.read_text().splitlines()]
    assert kept == ["large", "small"]


async def test_a_callers_limits_hold_between_endpoints(opened):
    pool = opened(learned(large_share=0.5))
    _, usage = await answer(pool, ask("prove that groups 7", limits=RouteLimits(max_cost=0.2)))
    assert usage.route["params"]["model"] == "small"
    with pytest.raises(TurnoutError, match=r"max_cost: 0\.05; the small model alone costs 0\.100 of the large one"):
        await answer(pool, ask("prove it", limits=RouteLimits(max_cost=0.05)))


async def test_samples_at_an_endpoint_are_as_many_as_the_probe_finds_worth_it(opened):
    shared = {"artifact": "router", "model": "small", "average": 2.0, "most": 4, "rerank": "majority"}
    pool = opened({"name": "adaptive_best_of", "params": shared}, dialect="llama.cpp")  # a request for each sample
    _, usage = await answer(pool, ask("prove that groups 7", explain=True))
    assert usage.route["method"] == "best_of"
    assert usage.route["params"]["k"] == usage.route["scores"]["samples"]
    assert len(opened.servers[0].bodies) == usage.route["params"]["k"]
    assert usage.route["scores"]["p_small"] < 0.5


async def test_what_the_pool_cannot_read_or_was_trained_for_others_is_refused_at_start(opened):
    found = opened.trained.artifact
    settings = {**found.settings, "features": ["log_prompt_tokens", "entropy_bits", "margin_nats", "top_logprob"]}
    del settings["reads"]
    Artifact(found.kind, found.trainer, settings, found.models, found.tensors).save(
        opened.folder / "states.safetensors"
    )
    with pytest.raises(TurnoutError, match="hidden state of the small model, and 'little' is an endpoint") as refused:
        opened(learned(artifact="states"))
    assert refused.value.field == "pools.p.routing.policy.params.artifact"
    with pytest.raises(TurnoutError, match="made for the small model with digest endpoint:weak-1; 'little' has"):
        opened(learned(), model="weak-2")


async def test_without_prices_or_sizes_nothing_is_trained(opened):
    inputs = read_texts([row.question for row in judged().rows])
    with pytest.raises(TurnoutError, match="what answers cost is not known"):
        train_probe(opened(price=0.0).model_pool, judged(), inputs, WhoIsRight(), QUICK, reads="text")


async def test_outcomes_are_collected_from_endpoints_and_judged(opened):
    pool = opened()
    asked = [
        Question("a", Asked(prompt="one"), partial(str.__eq__, "s")),
        Question("b", Asked(messages=[{"role": "user", "content": "two"}]), partial(str.__eq__, "l")),
    ]
    found = await run_outcomes(pool, asked, SamplingParams(temperature=0.5, max_tokens=4), 2, 0, lambda *_: None)
    assert [(row.reward("small"), row.reward("large")) for row in found.rows] == [(1.0, 0.0), (0.0, 1.0)]
    assert found.models == {"small": "endpoint:weak-1", "large": "endpoint:strong-1"}
    assert found.rows[0].mean("small", "tokens") == 3.0
    one, other = ([body["seed"] for body in server.bodies] for server in opened.servers)
    assert sorted(one) == sorted(other)
    assert (len(one), len(set(one)) > 2) == (4, True)
    with pytest.raises(TurnoutError, match="'little', an endpoint"):
        await run_outcomes(pool, [Question("log", Asked(prompt="x"), None)], SamplingParams(), 1, 0, lambda *_: None)


def test_texts_are_read_alike_each_time_and_a_long_one_by_its_ends():
    vector, numbers = read_text("Prove 12 + 3 = 15!\nGrüezi")
    assert vector.shape == (NUM_BUCKETS,)
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)
    assert tuple(numbers) == TEXT_FEATURES
    assert numbers["digit_share"] == 5 / 25
    assert numbers["symbol_share"] == 3 / 25
    assert numbers["foreign_share"] == 1 / 25
    assert np.array_equal(vector, read_text("Prove 12 + 3 = 15!\nGrüezi")[0])
    long = "a " * MOST_CHARS
    assert np.array_equal(read_text(long)[0], read_text(f"{long[:MOST_CHARS]}b{long[MOST_CHARS:]}")[0])
    [place] = np.nonzero(read_text("a")[0])[0]  # CRC-32 of "a" is 0xe8b7be43, in every process
    assert (place, read_text("a")[0][place]) == (0xE8B7BE43 % NUM_BUCKETS, 1.0)
    assert np.array_equal(read_text("")[0], np.zeros(NUM_BUCKETS, dtype=np.float32))
