"""Drafts by a part of the target's own layers: the same text, an intact cache, and the choice of layers."""

from __future__ import annotations

import itertools
from copy import deepcopy
from typing import Any

import pytest
import torch

from decoding.drafters.base import DraftBudget
from decoding.drafters.clasp import ClaspDrafter, ClaspParams, choose_layers
from decoding.drafters.swift import SwiftDrafter, SwiftParams
from decoding.lengths.fixed import FixedLength
from decoding.model import ModelPool, ReadSpec, Request
from decoding.sequence import Sequence
from decoding.skip_search import SkipSearch
from engine.model import EngineModel
from tests.engine.harness import Reference, engine_model, twins
from training.random_models import llama_config, random_model
from turnout.registry import get_method
from turnout.types import SamplingParams

LAYERS = 6
TINY = llama_config(60, hidden_size=32, num_key_value_heads=2, num_hidden_layers=LAYERS, pad_token_id=0, eos_token_id=1)
SURE = {"threshold": 0.0}
PARTS = [{"name": "swift", **SURE, "context": 6}, {"name": "clasp", **SURE, "interval": 8}]


@pytest.fixture(scope="module")
def loaded() -> tuple[EngineModel, Reference]:
    return twins(TINY, seed=4, block_size=4)


async def write(model: EngineModel, method: str, params: dict[str, Any], **sampling: Any) -> Sequence:
    seq = Sequence([2, 3, 4, 5], SamplingParams(max_tokens=40, ignore_eos=True, **sampling), seed=7)
    info = get_method(method)
    models = ModelPool({"m": model}, {"small": "m", "large": "m"}, None)  # type: ignore[arg-type]
    async for _ in info.run(Request("r", seq), models, info.parse(params)):
        pass
    model.release(seq)
    return seq


@pytest.mark.parametrize("drafter", PARTS, ids=lambda part: part["name"])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.8, "presence_penalty": 1}]
)
async def test_the_text_is_that_of_plain_decoding(
    loaded: tuple[EngineModel, Reference], drafter: dict[str, Any], sampling: dict[str, Any]
) -> None:
    model, _ = loaded
    plain = await write(model, "plain", {}, **sampling)
    drafted = await write(model, "speculative", {"drafter": drafter, "length": "fixed"}, **sampling)
    assert drafted.tokens == plain.tokens
    speculation = drafted.meter.speculation
    assert 0 < speculation.accepted_tokens < speculation.draft_tokens
    assert drafted.meter.models["m"].spared_tokens > 0
    assert model.pool.num_held == 0


@pytest.mark.parametrize("drafter", PARTS, ids=lambda part: part["name"])
async def test_drawn_drafts_leave_the_cache_right(
    loaded: tuple[EngineModel, Reference], drafter: dict[str, Any]
) -> None:
    """Rejection sampling keeps no token identity; what the cache says after it is the plain model's."""
    model, plain = loaded
    seq = await write(model, "speculative", {"drafter": drafter, "verifier": "rejection"}, temperature=1.0)
    assert seq.meter.speculation.draft_tokens > seq.meter.speculation.accepted_tokens
    again = Sequence(seq.tokens, SamplingParams(temperature=0.0), seed=0)
    [row] = await model.extend(again, want=ReadSpec(draw=None, logits=True))
    assert seq.meter.models["m"].cached_tokens == 0 or again.meter.models["m"].cached_tokens > 0
    torch.testing.assert_close(row.logits, plain.logits(seq.tokens)[-1], atol=1e-4, rtol=0)
    model.release(again)


def with_idle_layers(idle: set[int]) -> Any:
    model = random_model(deepcopy(TINY), seed=4, spread=0.2)
    for layer in idle:
        torch.nn.init.zeros_(model.model.layers[layer].self_attn.o_proj.weight)
        torch.nn.init.zeros_(model.model.layers[layer].mlp.down_proj.weight)
    return model


async def states_of(model: EngineModel, seq: Sequence) -> dict[int, torch.Tensor]:
    """What the whole model has at the last token but one."""
    twin = Sequence(seq.tokens[:-1], SamplingParams(), 0)
    rows = await model.extend(twin, want=ReadSpec(draw=None, hidden=frozenset(range(LAYERS + 1))))
    model.release(twin)
    return rows[0].hidden


async def test_layers_that_add_nothing_are_the_ones_skipped() -> None:
    model = engine_model(with_idle_layers({1, 4}))
    seq = Sequence([2, 3, 4, 5, 6, 7], SamplingParams(), seed=0)
    states = await states_of(model, seq)
    assert await choose_layers(model, seq, states, 0) == []
    assert await choose_layers(model, seq, states, 2) == [1, 4]
    await model.close()


async def test_choosing_layers_leaves_what_the_sequence_has_read(loaded: tuple[EngineModel, Reference]) -> None:
    """Its last state would have to be read again by all layers, which costs as much as a token of plain decoding."""
    model, _ = loaded
    tokens = [2, 3, 4, 5, 6, 7]
    states = await states_of(model, Sequence(tokens, SamplingParams(), seed=0))
    held, read = model.pool.num_held, []
    for verified in ({}, states):
        seq, drafter = Sequence(tokens, SamplingParams(), seed=0), ClaspDrafter(ClaspParams(skipped=0.5))
        drafter.skipped, drafter._verified = frozenset({2, 3}), verified
        await model.prefill_ahead(seq)
        await drafter.propose(model, seq, DraftBudget(4, 4), FixedLength())
        assert (drafter.skipped != frozenset({2, 3})) == bool(verified)
        meter = seq.meter.of(model.name, model.num_parameters)
        read.append(meter.processed_tokens - meter.draft_tokens)
        model.release(seq)
    assert read[0] == read[1] > 0
    assert model.pool.num_held == held


async def test_dynamic_programming_is_near_the_best_set_and_above_the_average(
    loaded: tuple[EngineModel, Reference],
) -> None:
    model, plain = loaded
    for most in (1, 2, 3):
        found, best, mean = [], [], []
        for start in range(6):
            seq = Sequence([2 + start, 3, 4 * start + 2, 5, 9, 7 + start], SamplingParams(), seed=0)
            states = await states_of(model, seq)
            chosen = tuple(await choose_layers(model, seq, states, most))
            model.release(seq)
            assert len(chosen) == most
            cosines = {
                layers: end_cosine(plain, seq, layers, states) for layers in itertools.combinations(range(LAYERS), most)
            }
            found.append(cosines[chosen])
            best.append(max(cosines.values()))
            mean.append(sum(cosines.values()) / len(cosines))
        assert all(one <= other + 1e-6 for one, other in zip(found, best, strict=True))
        assert sum(found) > sum(mean)


def end_cosine(plain: Reference, seq: Sequence, layers: tuple[int, ...], states: dict[int, torch.Tensor]) -> float:
    """Angle between the last states with and without some layers, the context being the whole model's."""
    from transformers import DynamicCache

    model, place = plain.model, len(seq) - 2
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        if place:
            model(torch.tensor([seq.tokens[:place]]), past_key_values=cache)
        hidden = model.model.embed_tokens(torch.tensor([[seq.tokens[place]]]))
        angles = model.model.rotary_emb(hidden, torch.tensor([[place]]))
        for index, layer in enumerate(model.model.layers):
            if index not in layers:
                hidden = layer(hidden, position_embeddings=angles, past_key_values=cache)
    return float(torch.cosine_similarity(hidden[0, -1], states[LAYERS], dim=0))


async def test_a_set_is_scored_by_what_the_partial_model_predicts(loaded: tuple[EngineModel, Reference]) -> None:
    model, _ = loaded
    seq = Sequence([2, 3, 4], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), seed=0)
    await model.decode(seq)
    drafter = SwiftDrafter(SwiftParams(context=8, skipped=0.0))
    nothing = SkipSearch(LAYERS, 0.0)
    await drafter._try_one(model, seq, nothing)
    assert nothing.score == 1.0, "the whole model predicts what it wrote"
    search = SkipSearch(LAYERS, 0.5)
    scores = []
    for _ in range(30):
        await drafter._try_one(model, seq, search)
        scores.append(search.score)
    assert scores == sorted(scores)
    assert scores[0] < scores[-1] < 1.0
    draft = await drafter.propose(model, seq, room(6, 9), FixedLength())
    assert len(draft) <= 9
    model.release(seq)
    assert model.pool.num_held == 0


def room(depth: int, nodes: int) -> Any:
    from decoding.drafters.base import DraftBudget

    return DraftBudget(depth, nodes)


def test_the_search_finds_a_planted_set_sooner_than_chance() -> None:
    planted = {4, 5, 8, 11, 14, 15, 18, 19}

    def score(chosen: frozenset[int]) -> float:
        return len(planted & chosen) / len(planted)

    found = []
    for seed in range(3):
        search = SkipSearch(12, 0.4, seed=seed, good_enough=2.0, most_without_gain=10_000, most_trials=160)
        while not search.done:
            chosen = search.propose()
            assert len(chosen) == 8
            assert chosen <= set(range(2, 22))
            search.report(chosen, score(chosen))
        advised = [s for trial, s in enumerate(search._scores) if trial and trial % 25 == 0]
        at_random = [s for trial, s in enumerate(search._scores) if trial % 25]
        found.append(sum(advised) / len(advised) - sum(at_random) / len(at_random))
    assert sum(found) > 0
    stuck = SkipSearch(12, 0.4, most_without_gain=5)
    trials = 0
    while not stuck.done:
        stuck.report(stuck.propose(), 0.5)
        trials += 1
    assert trials == 6


def test_requests_of_one_tenant_may_try_their_sets_at_once() -> None:
    """Both have proposed before either has its score, as where they are in one batch."""
    search = SkipSearch(12, 0.4)
    search.report(search.propose(), 0.1)
    one, other = search.propose(), search.propose()
    assert one != other
    search.report(one, 0.5)
    search.report(other, 0.2)
    assert (search.best, search.score) == (one, 0.5)
