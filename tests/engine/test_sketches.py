"""Partial forwards: early exits that verification resumes, skipped sub-layers, single layers on given states."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from decoding.model import ReadSpec
from decoding.partial_forward import LayerSelection, Sketch
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.match import MatchVerifier
from engine.backends.base import Kernels
from engine.model import EngineModel
from engine.runner import Feed
from tests.engine.harness import Reference, twins
from training.random_models import llama_config
from turnout.types import SamplingParams

LAYERS = 5
TINY = llama_config(60, hidden_size=32, num_key_value_heads=2, num_hidden_layers=LAYERS, pad_token_id=0, eos_token_id=1)
LOGITS = ReadSpec(draw=None, logits=True, hidden=frozenset(range(LAYERS + 1)))


def sequence(*tokens: int) -> Sequence:
    return Sequence(tokens, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), seed=0)


@pytest.fixture(params=["native", "torch", "plain"])
def loaded(request: Any) -> tuple[EngineModel, Reference]:
    kernels: Kernels = request.param
    try:
        return twins(TINY, seed=4, kernels=kernels, block_size=4)
    except Exception as error:
        if kernels == "native" and "engine.kernels" in str(error):
            pytest.skip(str(error))
        raise


def without(plain: Reference, skipped: set[int], last: int = LAYERS) -> Reference:
    """The plain model with layers cut off and sub-layers made to add nothing."""
    model = deepcopy(plain.model)
    model.model.layers = model.model.layers[:last]
    model.config.num_hidden_layers = last
    for index, layer in enumerate(model.model.layers):
        if 2 * index in skipped:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        if 2 * index + 1 in skipped:
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return Reference(model)


@torch.inference_mode()
def after_whole_prefix(plain: Reference, part: Reference, prefix: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), vocab] of a part of a model whose cache of the prefix is the whole model's."""
    cache = DynamicCache(config=plain.model.config)
    plain.model(torch.tensor([prefix]), past_key_values=cache)
    return part.model(torch.tensor([tokens]), past_key_values=cache).logits[0].float()


def fed_rows(model: EngineModel) -> list[tuple[LayerSelection, int]]:
    """Collects (layers, rows) of every feed from now on."""
    seen: list[tuple[LayerSelection, int]] = []
    original = model.batcher.runner.run

    def run(feeds: list[Feed]) -> Any:
        seen.extend((feed.depth, len(feed.tokens)) for feed in feeds)
        return original(feeds)

    model.batcher.runner.run = run  # type: ignore[method-assign, assignment]
    return seen


@pytest.mark.parametrize("skipped", [frozenset({4, 5}), frozenset({2, 3, 6, 7}), frozenset({2, 7, 8})])
async def test_skipped_sub_layers_add_nothing(loaded: tuple[EngineModel, Reference], skipped: frozenset[int]) -> None:
    model, plain = loaded
    if len(skipped) == 3 and model.batcher.runner.plan.backend.name == "plain":
        with pytest.raises(ValueError, match="whole layers"):
            await model.partial_forward(
                sequence(2, 3), Sketch.chain(1, (3,), 0, LayerSelection(skipped=skipped)), LOGITS
            )
        return
    part, depth = without(plain, set(skipped)), LayerSelection(skipped=skipped)

    async def draft(seq: Sequence) -> None:
        base, tokens = len(seq) - 1, [seq.tokens[-1]]
        for step in range(4):
            [row] = await model.partial_forward(seq, Sketch.chain(base, tuple(tokens), step, depth), LOGITS)
            expected = after_whole_prefix(plain, part, seq.tokens[:base], tokens)[-1]
            assert row.logits is not None
            torch.testing.assert_close(row.logits, expected, atol=1e-4, rtol=0)
            tokens.append(int(expected.argmax()))
        verdict = await model.verify(seq, DraftTree.chain(tokens[1:], "m"), MatchVerifier(), LOGITS)
        own = plain.logits([*seq.tokens, *tokens[1:]])
        for row, logits in zip(verdict.rows, own[base:], strict=True):
            torch.testing.assert_close(row.logits, logits, atol=1e-4, rtol=0)

    await asyncio.gather(*(draft(sequence(2, *range(3, 3 + 4 * n + 2))) for n in range(3)))
    await finish(model, plain)


@pytest.mark.parametrize("exit_layer", [1, 3])
async def test_verification_resumes_behind_an_early_exit(
    loaded: tuple[EngineModel, Reference], exit_layer: int
) -> None:
    model, plain = loaded
    part, depth = without(plain, set(), exit_layer), LayerSelection(last=exit_layer)
    seq = sequence(2, 3, 4, 5, 6)
    seen = fed_rows(model)
    tokens = [6]
    for step in range(4):
        [row] = await model.partial_forward(seq, Sketch.chain(4, tuple(tokens), step, depth), LOGITS)
        torch.testing.assert_close(row.logits, part.logits([2, 3, 4, 5, *tokens])[-1], atol=1e-4, rtol=0)
        tokens.append(int(row.logits.argmax()))  # type: ignore[union-attr]
    draft = DraftTree.chain(tokens[1:4], "m")
    verdict = await model.verify(seq, draft, MatchVerifier(), LOGITS)
    assert seen == [(LayerSelection(), 4), *[(depth, 1)] * 4, (LayerSelection(first=exit_layer), 4)]
    own = plain.logits([2, 3, 4, 5, *tokens[:4]])[4:]
    for row, logits in zip(verdict.rows, own, strict=True):
        torch.testing.assert_close(row.logits, logits, atol=1e-4, rtol=0)
        assert set(row.hidden) == set(range(exit_layer, LAYERS + 1))
    meter = seq.meter.models["m"]
    whole, parts = 4, 4 * exit_layer / LAYERS + 4 * (LAYERS - exit_layer) / LAYERS
    assert meter.processed_tokens - meter.spared_tokens == pytest.approx(whole + parts)
    seq.extend(verdict.tokens, {"m": 1})
    await finish(model, plain)


async def test_another_draft_than_the_one_run_is_verified_whole(loaded: tuple[EngineModel, Reference]) -> None:
    model, plain = loaded
    seq = sequence(2, 3, 4)
    await model.partial_forward(seq, Sketch.chain(2, (4, 7, 8), 0, LayerSelection(last=2)), LOGITS)
    seen = fed_rows(model)
    for draft in (DraftTree.chain([7, 9], "m"), DraftTree((7, 8), (ROOT, ROOT), "m")):
        verdict = await model.verify(seq, draft, MatchVerifier(), LOGITS)
        for node in range(len(draft)):
            path = [draft.tokens[each] for each in draft.path(node)]
            logits = plain.logits([*seq.tokens, *path])[-1]
            torch.testing.assert_close(verdict.rows[node + 1].logits, logits, atol=1e-4, rtol=0)
    assert {depth for depth, _ in seen} == {LayerSelection()}
    await finish(model, plain)


async def test_one_layer_on_given_states_sees_the_cache_and_itself(loaded: tuple[EngineModel, Reference]) -> None:
    """Layer after layer on its own output is the model; alternatives for one place do not see each other."""
    model, plain = loaded
    seq = sequence(2, 3, 4, 5)
    [row] = await model.extend(seq, want=LOGITS)
    states = row.hidden[0].repeat(2, 1)
    states[1] *= 2
    for layer in range(LAYERS):
        depth = LayerSelection(first=layer, last=layer + 1)
        if layer == 0:
            rows = await model.partial_forward(seq, Sketch((3), (5,), (ROOT,), 0, depth), LOGITS)
            states = torch.stack([rows[0].hidden[1], 2 * rows[0].hidden[1]])
        else:
            sketch = Sketch(3, (5, 5), (ROOT, ROOT), 0, depth, states)
            rows = await model.partial_forward(seq, sketch, LOGITS)
            states = torch.stack([each.hidden[layer + 1] for each in rows])
        torch.testing.assert_close(states[0], row.hidden[layer + 1], atol=1e-4, rtol=0)
    [read] = await model.read(seq, states[:1], [()], LOGITS)
    torch.testing.assert_close(read.logits, plain.logits(seq.tokens)[-1], atol=1e-4, rtol=0)
    await finish(model, plain)


async def finish(model: EngineModel, plain: Reference) -> None:
    """Every sequence goes on as if nothing had happened, and nothing is left."""
    for seq in list(model.batcher.tables):
        before = list(seq.tokens)
        answer = (await model.decode(seq)).tokens
        for index, token in enumerate(answer[:6]):
            logits = plain.logits([*before, *(each.id for each in answer[:index])])[-1]
            assert token.id == int(logits.argmax())
        model.release(seq)
    assert model.pool.num_held == 0
    await model.close()
