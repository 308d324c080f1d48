"""Every drafter with every length policy and verifier that fit: the text of plain decoding, on the real engine."""

from __future__ import annotations

import asyncio
import random
from copy import deepcopy
from typing import Any

import pytest

from decoding.artifacts import Artifacts
from decoding.fakes import ListText
from decoding.model import ModelPool, Request
from decoding.sequence import Sequence
from engine.device import Device
from engine.loading import prepare
from engine.model import EngineModel
from tests.conformance.parts import (
    ALL_DRAFTERS,
    ALL_LENGTHS,
    ALL_SELECTORS,
    ALL_VERIFIERS,
    EVERY,
    LAYERS,
    LOSSLESS,
    LOSSY,
    VOCAB,
    WIDTH,
    drafter_choice,
    example_of,
    fitting,
    make_artifacts,
)
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig, ModelConfig
from turnout.registry import get_method
from turnout.types import SamplingParams

# The models' locks belong to one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS, FEWER = 100, 16  # where every combination is tried, and in the default suite
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3}
# What keeps a policy drafting that would rather not, by what it knows of this machine's times.
KEEN = {"abstains": False, "probe": 1, "allowance": 1.0}
TIMED = {"smartspec"}
FITTING = fitting(LOSSLESS)
GREEDY_ONLY = fitting(LOSSY)
ARMS = ("model_chain", "model_tree", "medusa")  # that every verifier is tried with in the default suite
Plain = dict[tuple[bool, int], list[list[int]]]
# What the default suite runs: every drafter with every verifier, every policy and every selector with something, and
# every drafter that asks at each token with a policy that answers by what it sees.
FEW = [
    (d, length, v)
    for d, length, v in FITTING
    if length == "fixed" or (length, v) == ("svip", "rejection") or (d, v) == ("model_chain", "match")
]
FEW_GREEDY = [(d, length, v) for d, length, v in GREEDY_ONLY if length == "fixed" and (v == "typical" or d in ARMS)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> ModelPool:
    """A small and a large model that often agree: the same weights, a little shaken, and a layer more."""
    device, engine = Device("cpu"), EngineConfig(block_size=8, max_batch=128)
    models: dict[str, Any] = {}
    for name, layers, seed in (("small", LAYERS - 1, 1), ("large", LAYERS, 1)):
        config = llama_config(
            VOCAB,
            hidden_size=WIDTH,
            num_hidden_layers=layers,
            pad_token_id=0,
            eos_token_id=1,
            max_position_embeddings=128,
        )
        checkpoint = prepare(random_model(deepcopy(config), seed, spread=0.3), "auto")
        models[name] = EngineModel(name, checkpoint, ModelConfig(path="-", kv_memory_bytes=16 << 20), engine, device)
    texts = ListText([str(token) for token in range(VOCAB)])
    folder = tmp_path_factory.mktemp("artifacts")
    make_artifacts(folder, {name: model.digest for name, model in models.items()})
    return ModelPool(models, {"small": "small", "large": "large"}, texts, Artifacts(folder))


def prompts(count: int) -> list[list[int]]:
    """Half of them repeat themselves, so that there is something to copy."""
    draw = random.Random(5)
    made = []
    for index in range(count):
        phrase = [draw.randrange(2, VOCAB) for _ in range(4 + index % 7)]
        made.append(phrase * 3 if index % 2 else phrase)
    return made


async def answer(
    pool: ModelPool, index: int, prompt: list[int], params: dict[str, Any], sampling: dict[str, Any]
) -> Sequence:
    info = get_method("speculative" if "drafter" in params else "plain")
    seq = Sequence(prompt, SamplingParams(max_tokens=14, **sampling), seed=index, eos_ids=(1,))
    async for _ in info.run(Request(f"r{index}", seq), pool, info.parse(params)):
        pass
    for model in pool.models.values():
        model.release(seq)
    return seq


async def answers(
    pool: ModelPool, choices: list[dict[str, Any]], sampling: dict[str, Any], count: int
) -> list[Sequence]:
    """One request for every prompt, all at once; choices in turn."""
    for model in pool.models.values():
        model.stores.forget("default")
    made = await asyncio.gather(
        *(answer(pool, i, prompt, choices[i % len(choices)], sampling) for i, prompt in enumerate(prompts(count)))
    )
    for model in pool.models.values():
        assert isinstance(model, EngineModel)
        assert model.pool.num_held == 0
    return made


@pytest.fixture(scope="module")
def plain() -> Plain:
    """Filled on first use: tokens of plain decoding, by sampling and number of prompts."""
    return {}


async def check(pool: ModelPool, plain: Plain, choices: list[dict[str, Any]], greedy: bool, count: int = FEWER) -> int:
    """Compare with plain decoding; returns how many draft tokens were accepted.

    Of a policy that goes by this machine's times, how many were drafted: it may draft next to none.
    """
    sampling, key = GREEDY if greedy else SAMPLED, (greedy, count)
    if key not in plain:
        plain[key] = [seq.tokens for seq in await answers(pool, [{}], sampling, count)]
    drafted = await answers(pool, choices, sampling, count)
    wrong = [i for i, (seq, tokens) in enumerate(zip(drafted, plain[key], strict=True)) if seq.tokens != tokens]
    assert wrong == []
    timed = any(isinstance(each.get("length"), dict) and each["length"]["name"] in TIMED for each in choices)
    spent = [seq.meter.speculation for seq in drafted]
    return sum(each.draft_tokens if timed else each.accepted_tokens for each in spent)


def choice(drafter: str, length: str, verifier: str) -> dict[str, Any]:
    """These parts; a policy that would rather not draft is told to, a lossy verifier to be greedy where all is."""
    keen = {name: value for name, value in KEEN.items() if name in ALL_LENGTHS[length].Params.model_fields}
    judge = {"name": verifier, **ALL_VERIFIERS[verifier].as_greedy}
    return {"drafter": drafter_choice(drafter), "length": {"name": length, **keen}, "verifier": judge}


@pytest.mark.parametrize(("drafter", "length", "verifier"), [*FEW, *FEW_GREEDY], ids=str)
async def test_greedy_text(pool: ModelPool, plain: Any, drafter: str, length: str, verifier: str) -> None:
    assert await check(pool, plain, [choice(drafter, length, verifier)], greedy=True) > 0


@pytest.mark.parametrize(("drafter", "length"), [(d, length) for d, length, v in FEW if v == "match"], ids=str)
async def test_seeded_text(pool: ModelPool, plain: Any, drafter: str, length: str) -> None:
    assert await check(pool, plain, [choice(drafter, length, "match")], greedy=False) > 0


@pytest.mark.parametrize("greedy", [True, False])
async def test_all_drafters_in_one_batch(pool: ModelPool, plain: Any, greedy: bool) -> None:
    assert await check(pool, plain, [choice(name, "fixed", "match") for name in ALL_DRAFTERS], greedy) > 0


@pytest.mark.parametrize("seed", [0, 1])
async def test_any_parts_mixed_in_one_batch(pool: ModelPool, plain: Any, seed: int) -> None:
    """Drafters, policies and verifiers drawn from everything that fits, and plain decoding among them."""
    draw = random.Random(seed)
    mixed = [*draw.sample([*FITTING], 28), *draw.sample([*GREEDY_ONLY], 4)]
    assert min(len({parts[place] for parts in mixed}) for place in range(3)) >= 3
    assert await check(pool, plain, [{}, *(choice(*parts) for parts in mixed)], greedy=True, count=66) > 0
    seeded = [choice(drafter, length, "match") for drafter, length, verifier in mixed if verifier == "match"]
    assert await check(pool, plain, [{}, *seeded], greedy=False, count=66) > 0


@pytest.mark.parametrize("selector", list(ALL_SELECTORS))
async def test_selectors_among_drafters(pool: ModelPool, plain: Any, selector: str) -> None:
    arms = [
        {"drafter": "copyspec"},
        {"drafter": "model_chain", "length": {"name": "fixed", "most": 2}},
        "token_recycling",
    ]
    for greedy in (True, False):
        assert await check(pool, plain, [{"drafter": arms, "length": "fixed", "select": selector}], greedy) > 0


@pytest.mark.parametrize("greedy", [True, False])
async def test_drafters_and_lengths_that_are_chosen(pool: ModelPool, plain: Any, greedy: bool) -> None:
    """Copies, the small model and heads, by what this machine's times say, alone and next to others."""
    await check(pool, plain, [{"drafter": None}], greedy)
    mixed = [{"drafter": None}, {}, choice("model_chain", "fixed", "match"), {"drafter": "token_recycling"}]
    assert await check(pool, plain, mixed, greedy) > 0


@pytest.mark.exactness
@pytest.mark.parametrize(("drafter", "length", "verifier"), [*FITTING, *GREEDY_ONLY], ids=str)
async def test_greedy_text_of_every_combination(
    pool: ModelPool, plain: Any, drafter: str, length: str, verifier: str
) -> None:
    assert await check(pool, plain, [choice(drafter, length, verifier)], greedy=True, count=PROMPTS) > 0


@pytest.mark.exactness
@pytest.mark.parametrize(("drafter", "length"), [(d, length) for d, length, v in FITTING if v == "match"], ids=str)
async def test_seeded_text_of_every_combination(pool: ModelPool, plain: Any, drafter: str, length: str) -> None:
    assert await check(pool, plain, [choice(drafter, length, "match")], greedy=False, count=PROMPTS) > 0


@pytest.mark.parametrize("verifier", [name for name, part in LOSSY.items() if part.as_greedy])
async def test_greedy_text_is_another_one_where_a_verifier_keeps_other_tokens(
    pool: ModelPool, plain: Plain, verifier: str
) -> None:
    await check(pool, plain, [choice("model_chain", "fixed", verifier)], greedy=True)
    kept = [
        seq.tokens
        for seq in await answers(
            pool, [{"drafter": "model_chain", "length": "fixed", "verifier": verifier}], GREEDY, FEWER
        )
    ]
    assert kept != plain[True, FEWER]


async def test_nothing_is_left_out() -> None:
    tried = [*FEW, *FEW_GREEDY]
    assert {drafter for drafter, _, _ in FEW} == set(ALL_DRAFTERS)
    assert {length for _, length, _ in FEW} == set(ALL_LENGTHS)
    assert {verifier for _, _, verifier in tried} == set(ALL_VERIFIERS)


@pytest.mark.parametrize(("slot", "name"), list(EVERY), ids=str)
async def test_a_component_that_reads_an_artifact_says_what_is_in_it(slot: str, name: str) -> None:
    part = EVERY[slot, name]
    example = example_of(part)
    assert bool(example.kind) == ("artifact" in part.Params.model_fields)
    assert example.kind == part.Params(**example.params).model_dump().get("artifact", "")
