"""Moving cached keys (seed 230) against the model's own rotary embedding and against encoding anew."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from decoding.partial_forward import WHOLE
from engine.attention.layout import lay_out
from engine.backends.base import Kernels
from engine.backends.stacks import rotated
from engine.cache.paged_kv import PagedKV
from engine.loaded_model import LoadedModel
from engine.loading import prepare
from engine.reuse.rotation import Rotation
from tests.engine.architectures import CONFIGS, config_of, turns
from training.random_models import random_model
from turnout.errors import TurnoutError

SIZE = 64


def plan_of(name: str, kernels: Kernels = "auto", dtype: torch.dtype = torch.float32) -> LoadedModel:
    return prepare(random_model(deepcopy(config_of(name)), seed=3, spread=0.2).to(dtype), kernels).plan


@torch.inference_mode()
def encoded(plan: LoadedModel, tokens: list[int]) -> PagedKV:
    """Keys and values of a prompt: slot i holds token i."""
    store = PagedKV(plan.num_layers, SIZE, plan.kv_heads, plan.head_dim, plan.dtype, torch.device("cpu"))
    layout = lay_out(tokens, [len(tokens)], [0], [np.zeros(1, dtype=np.int32)], SIZE, {})
    plan.stack.hidden(layout, plan.backend.step(layout, store), frozenset(), WHOLE)
    return store


def moved(plan: LoadedModel, store: PagedKV, start: int, count: int, shift: int) -> PagedKV:
    """A copy of a cache with some tokens' keys and values put `shift` slots on, and turned."""
    copy = deepcopy(store)
    sources = torch.arange(start, start + count)
    Rotation.of(plan).move(copy, sources, sources + shift, torch.full((count,), shift))
    return copy


@pytest.mark.parametrize("name", sorted(filter(turns, CONFIGS)))
@pytest.mark.parametrize("shift", [9, -5])
def test_the_first_layer_after_a_move_is_that_of_a_full_encoding(name: str, shift: int) -> None:
    plan = plan_of(name)
    run = [(7 * i) % 90 + 3 for i in range(14)]
    before, after = [5] * 12, [8] * (12 + shift)
    store = moved(plan, encoded(plan, before + run), 12, len(run), shift)
    expected = encoded(plan, after + run)
    places = slice(12 + shift, 12 + shift + len(run))
    torch.testing.assert_close(store.layers[0][places], expected.layers[0][places], atol=2e-5, rtol=0)
    # Left where it was turned to nothing, a key is another one.
    unmoved = encoded(plan, before + run).layers[0][12 : 12 + len(run), 0]
    assert float((unmoved - expected.layers[0][places, 0]).abs().max()) > 0.01


@pytest.mark.parametrize("name", sorted(filter(turns, CONFIGS)))
def test_keys_of_one_token_are_turned_by_its_position_in_every_layer(name: str) -> None:
    """All tokens being the same one, what goes into a layer is the same everywhere."""
    plan = plan_of(name)
    rotation, store = Rotation.of(plan), encoded(plan, [7] * 20)
    for layer in range(plan.num_layers):
        keys = store.layers[layer][:20, 0]
        moved = keys[:1].repeat(20, 1, 1)
        rotation.turn(moved, layer, torch.arange(20))
        torch.testing.assert_close(moved, keys, atol=1e-4, rtol=0)


def angles(plan: LoadedModel, layer: int, positions: torch.Tensor) -> Any:
    kind = [plan.layer_types[layer]] if plan.layer_types else []
    cos, sin = plan.rotary(torch.zeros(1), positions[None], *kind)
    if not plan.rotates[layer]:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    return cos[0, :, None], sin[0, :, None]


@pytest.mark.parametrize("name", sorted(filter(turns, CONFIGS)))
def test_every_layer_turns_by_its_own_angles(name: str) -> None:
    plan = plan_of(name)
    rotation = Rotation.of(plan)
    keys = torch.randn(6, plan.kv_heads, plan.head_dim, generator=torch.Generator().manual_seed(1))
    places = torch.tensor([0, 1, 17, 40, 63, 100])
    for layer in range(plan.num_layers):
        for shift in (1, 23, -100):
            got = rotated(keys, *angles(plan, layer, places + 100))
            rotation.turn(got, layer, torch.full((6,), shift))
            expected = rotated(keys, *angles(plan, layer, places + 100 + shift))
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["cohere2", "glm4", "gpt2"])
def test_keys_that_do_not_turn_by_halves_are_not_moved(name: str) -> None:
    assert not turns(name)
    with pytest.raises(TurnoutError, match="cannot be moved to other positions"):
        Rotation.of(plan_of(name))


def test_kinds_of_layers_with_angles_of_their_own_are_told_apart() -> None:
    plan = plan_of("gemma3_text")
    plan.rotary.full_attention_inv_freq.mul_(0.5)
    rotation = Rotation.of(plan)
    keys = torch.ones(1, plan.kv_heads, plan.head_dim)
    ways = [keys.clone() for _ in range(2)]
    for layer, way in enumerate(ways):
        rotation.turn(way, layer, torch.tensor([3]))
    assert float((ways[0] - ways[1]).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_is_nothing_and_no_shift_changes_nothing(dtype: torch.dtype) -> None:
    plan = plan_of("llama", dtype=dtype)
    store = encoded(plan, list(range(3, 23)))
    before = [layer.clone() for layer in store.layers]
    rotation, slots = Rotation.of(plan), torch.arange(20)
    rotation.move(store, slots, slots, torch.zeros(20, dtype=torch.int64))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(store.layers, before, strict=True))
    for shift in (1000, -1000):
        rotation.move(store, slots, slots, torch.full((20,), shift))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for mine, theirs in zip(store.layers, before, strict=True):
        torch.testing.assert_close(mine[:, 0], theirs[:, 0], atol=tolerance, rtol=0)
        assert torch.equal(mine[:, 1], theirs[:, 1])


def test_slots_may_overlap_and_every_token_has_a_shift_of_its_own() -> None:
    plan = plan_of("qwen3")
    store = encoded(plan, list(range(3, 43)))
    before = store.layers[1].clone()
    sources, targets = torch.arange(10, 30), torch.arange(13, 33)
    shifts = torch.arange(20) % 7
    rotation = Rotation.of(plan)
    rotation.move(store, sources, targets, shifts)
    for place in range(20):
        expected = before[10 + place : 11 + place].clone()
        rotation.turn(expected[:, 0], 1, shifts[place : place + 1])
        torch.testing.assert_close(store.layers[1][13 + place], expected[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kernels", ["plain", "torch", "auto"])
def test_backends_keep_keys_in_the_same_form(kernels: Kernels) -> None:
    plan = plan_of("qwen2", kernels)
    store = moved(plan, encoded(plan, [9] * 5 + [11, 12, 13]), 5, 3, 20)
    expected = encoded(plan, [9] * 25 + [11, 12, 13])
    torch.testing.assert_close(store.layers[0][25:28], expected.layers[0][25:28], atol=2e-5, rtol=0)


def test_keys_that_are_not_plainly_rotated_are_refused() -> None:
    plan = plan_of("llama")
    plan.rotary.inv_freq[0] *= 1.01
    with pytest.raises(TurnoutError, match="a moved key differs"):
        Rotation.of(plan)
    del plan.rotary.inv_freq
    with pytest.raises(TurnoutError, match="no fixed frequencies"):
        Rotation.of(plan)
