"""What goes into the last feed-forward block: read of every architecture, without a change of anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decoding.model import ReadSpec
from decoding.partial_forward import WHOLE, LayerSelection
from decoding.read_spec import FEED_FORWARD
from decoding.sequence import Sequence
from engine.attention.layout import lay_out
from engine.backends import stacks
from engine.backends.base import Kernels
from engine.loading import prepare
from tests.engine.architectures import CONFIGS, TOLERANCE, config_of, kernels_of
from tests.engine.harness import Reference, random_prompts, twins
from training.random_models import random_model
from turnout.types import SamplingParams

READ = ReadSpec(draw=None, logits=True, hidden=frozenset({FEED_FORWARD, -1, 1}))
PROMPT = random_prompts(1, 12, seed=1, vocab_size=97)[0]


def seen_by(plain: Reference, name: str, tokens: list[int]) -> torch.Tensor:
    """What a module of Hugging Face's last layer is called with, [tokens, hidden]."""
    given: list[torch.Tensor] = []
    body = plain.model.base_model
    last = next(getattr(body, each) for each in ("layers", "h") if hasattr(body, each))[-1]
    hook = getattr(last, name).register_forward_pre_hook(lambda module, args: given.append(args[0]))
    plain.logits(tokens)
    hook.remove()
    return given[0].reshape(len(tokens), -1).float().cpu()


async def rows_of(model: Any, spec: ReadSpec) -> list[Any]:
    seq = Sequence(PROMPT[:1], SamplingParams(), seed=0)
    rows: list[Any] = await model.extend(seq, tuple(PROMPT[1:]), spec, every=True)
    model.release(seq)
    return rows


@pytest.mark.parametrize(("name", "kernels"), [(name, kernels) for name in CONFIGS for kernels in kernels_of(name)])
async def test_it_is_what_the_plain_forward_gives_the_block(name: str, kernels: Kernels) -> None:
    """Fed in chunks; next to it, everything is what it is without."""
    model, plain = twins(config_of(name), seed=3, kernels=kernels, block_size=4, token_budget=7)
    rows = await rows_of(model, READ)
    got = torch.stack([row.hidden[FEED_FORWARD] for row in rows])
    torch.testing.assert_close(got, seen_by(plain, "mlp", PROMPT), atol=TOLERANCE, rtol=0)
    without = await rows_of(model, ReadSpec(draw=None, logits=True, hidden=frozenset({-1, 1})))
    for row, other in zip(rows, without, strict=True):
        assert torch.equal(row.logits, other.logits)
        assert all(torch.equal(row.hidden[layer], other.hidden[layer]) for layer in (-1, 1))
    assert FEED_FORWARD not in without[0].hidden
    await model.close()


@pytest.mark.parametrize("kernels", ["native", "torch", "plain"])
async def test_of_llama_it_is_the_norm_of_what_the_attention_leaves(kernels: Kernels) -> None:
    model, plain = twins(config_of("llama"), seed=4, kernels=kernels)
    last = plain.model.model.layers[-1]
    between = seen_by(plain, "post_attention_layernorm", PROMPT)
    scale = between.pow(2).mean(-1, keepdim=True).add(plain.model.config.rms_norm_eps).rsqrt()
    rows = await rows_of(model, READ)
    got = torch.stack([row.hidden[FEED_FORWARD] for row in rows])
    expected = between * scale * last.post_attention_layernorm.weight
    torch.testing.assert_close(got, expected.detach(), atol=TOLERANCE, rtol=0)
    await model.close()


def tapped(kernels: Kernels, depth: LayerSelection) -> dict[int, torch.Tensor]:
    """What two layers of Llama give of it, and of the last one's output."""
    plan = prepare(random_model(config_of("llama"), seed=5, spread=0.2), kernels).plan
    layout = lay_out(PROMPT, [len(PROMPT)], [0], [np.zeros(1, dtype=np.int32)], 16, {})
    with torch.inference_mode():
        step = plan.backend.step(layout, plan.cache(16, plan.device))
        return plan.stack.hidden(layout, step, frozenset({FEED_FORWARD, 2}), depth)[1]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(
    ("depth", "layers"),
    [
        (LayerSelection(last=1), set()),
        (LayerSelection(skipped=frozenset({3})), {2}),
        (LayerSelection(skipped=frozenset({0, 1})), {FEED_FORWARD, 2}),
        (LayerSelection(skipped=frozenset({0, 1, 2})), {FEED_FORWARD, 2}),
    ],
)
def test_layers_that_do_not_run_give_none(kernels: Kernels, depth: LayerSelection, layers: set[int]) -> None:
    found = tapped(kernels, depth)
    assert found.keys() == layers
    if FEED_FORWARD in layers:  # the reading changes nothing
        other = tapped("native" if kernels == "torch" else "torch", depth)
        torch.testing.assert_close(found, other, atol=TOLERANCE, rtol=0)


def test_a_layer_that_has_no_block_of_a_known_name_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "FEED_FORWARD_BLOCKS", ("unknown",))
    assert tapped("plain", WHOLE).keys() == {2}
