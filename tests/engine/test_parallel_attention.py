"""Layers in groups: what they compute, on every architecture and with all kernels."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from decoding.model import ReadSpec
from decoding.partial_forward import LayerSelection, Sketch
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.match import MatchVerifier
from engine.backends.base import Kernels
from tests.engine.architectures import CONFIGS, config_of, kernels_of
from tests.engine.harness import Reference, twins
from training.random_models import llama_config
from turnout.types import SamplingParams

LAYERS = 6
TINY = llama_config(60, hidden_size=32, num_key_value_heads=2, num_hidden_layers=LAYERS, pad_token_id=0, eos_token_id=1)
LOGITS = ReadSpec(draw=None, logits=True, hidden=frozenset(range(LAYERS + 1)))
PREFIX, TAIL = [2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12]


def sequence(*tokens: int) -> Sequence:
    return Sequence(tokens, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), seed=0)


@torch.inference_mode()
def by_hand(plain: Reference, spans: list[tuple[int, int]]) -> dict[int, torch.Tensor]:
    """States after so many layers at the tail, behind a prefix that was read exactly, and the logits under -1."""
    body, count = plain.model.model, len(PREFIX)
    exact = body(torch.tensor([PREFIX]), output_hidden_states=True).hidden_states
    hidden = body.embed_tokens(torch.tensor([TAIL]))
    length = count + len(TAIL)
    angles = body.rotary_emb(hidden, torch.arange(length)[None])
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    states = {0: hidden[0]}
    for start, stop in spans:
        into = hidden
        for index in range(start, stop):
            layer = body.layers[index]
            seen = layer.input_layernorm(torch.cat([exact[index], into], 1))
            added = layer.self_attn(seen, position_embeddings=angles, attention_mask=mask)[0][:, count:]
            hidden = hidden + added
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            states[index + 1] = hidden[0]
    states[-1] = plain.model.lm_head(body.norm(hidden))[0].float()
    return states


@pytest.mark.parametrize("kernels", ["native", "torch", "plain"])
@pytest.mark.parametrize(
    "groups", [((0, 6),), ((1, 3), (3, 6)), ((2, 4),), ((0, 2), (4, 6))], ids=lambda groups: str(groups)
)
async def test_attentions_of_a_group_take_what_goes_into_it(kernels: Kernels, groups: Any) -> None:
    """Token by token, each seeing the approximate keys and values of those before it."""
    model, plain = twins(TINY, seed=4, kernels=kernels, block_size=4)
    depth = LayerSelection(groups=groups)
    expected = by_hand(plain, depth.spans(LAYERS))
    exact = plain.logits([*PREFIX, *TAIL])[len(PREFIX) :]
    seq = sequence(*PREFIX)
    for place in range(len(TAIL)):
        sketch = Sketch.chain(len(PREFIX), tuple(TAIL[: place + 1]), place, depth)
        [row] = await model.partial_forward(seq, sketch, LOGITS)
        assert row.logits is not None
        torch.testing.assert_close(row.logits, expected[-1][place], atol=1e-4, rtol=0)
        assert (row.logits - exact[place]).abs().max() > 0.05, "groups must matter here"
        for layer in range(LAYERS + 1):
            torch.testing.assert_close(row.hidden[layer], expected[layer][place], atol=1e-4, rtol=0)
    [row] = await model.extend(seq, want=LOGITS)
    assert row.logits is not None
    torch.testing.assert_close(row.logits, plain.logits(PREFIX)[-1], atol=1e-4, rtol=0)
    model.release(seq)
    await model.close()


@pytest.mark.parametrize(("name", "kernels"), [(name, kernels) for name in CONFIGS for kernels in kernels_of(name)])
async def test_groups_of_one_layer_are_the_model(name: str, kernels: Kernels) -> None:
    model, plain = twins(config_of(name), seed=3, spread=0.2, kernels=kernels, block_size=4)
    seq = sequence(*PREFIX)
    want = ReadSpec(draw=None, logits=True)
    rows = await model.partial_forward(
        seq, Sketch.chain(len(PREFIX), tuple(TAIL), 0, LayerSelection(groups=((0, 1), (1, 2)))), want
    )
    got = torch.stack([row.logits for row in rows if row.logits is not None])
    torch.testing.assert_close(got, plain.logits([*PREFIX, *TAIL])[len(PREFIX) :], atol=1e-4, rtol=0)
    model.release(seq)
    await model.close()


async def test_what_grouped_layers_computed_is_never_verified_as_exact() -> None:
    """The draft and the target are one model here: verification must not go on behind approximate layers."""
    model, plain = twins(TINY, seed=4, block_size=4)
    for depth in (LayerSelection(groups=((0, 3),)), LayerSelection(last=4, groups=((0, 3),))):
        seq = sequence(*PREFIX)
        await model.partial_forward(seq, Sketch.chain(len(PREFIX) - 1, (PREFIX[-1], *TAIL), 0, depth), ReadSpec())
        verdict = await model.verify(seq, DraftTree.chain(TAIL, "m"), MatchVerifier(), LOGITS)
        exact = plain.logits([*PREFIX, *TAIL])[len(PREFIX) - 1 :]
        for row, logits in zip(verdict.rows, exact, strict=True):
            torch.testing.assert_close(row.logits, logits, atol=1e-4, rtol=0)
        model.release(seq)
    await model.close()


def test_other_layers_run_by_themselves() -> None:
    assert LayerSelection(groups=((1, 3), (4, 6))).spans(8) == [(0, 1), (1, 3), (3, 4), (4, 6), (6, 7), (7, 8)]
    assert LayerSelection(first=1, last=5, groups=((2, 4),)).spans(8) == [(1, 2), (2, 4), (4, 5)]
    assert LayerSelection().spans(2) == [(0, 1), (1, 2)]
    assert LayerSelection(groups=((0, 8),)).runs(8) == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": ((2, 4), (3, 5))},
        {"groups": ((4, 6), (0, 2))},
        {"first": 2, "groups": ((1, 3),)},
        {"last": 4, "groups": ((3, 5),)},
        {"groups": ((3, 1),)},
        {"skipped": frozenset({2}), "groups": ((4, 6),)},
    ],
    ids=str,
)
def test_groups_that_cannot_be_run_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="groups stand in order"):
        LayerSelection(**deepcopy(wrong))
