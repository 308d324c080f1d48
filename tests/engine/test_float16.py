"""Models in float16: as close to float32 as its rounding, over torch's operations, in one process or a pair."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine.backends.base import choose_backend
from engine.forward_check import CHECK_TOLERANCE
from engine.loading import prepare
from pool.local_pool import LocalPool
from tests.engine.architectures import config_of
from tests.engine.harness import CPU, Reference, ask, engine_model, pair_config, random_prompts
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

SAYS = "they do not compute in float16, but in bfloat16 and float32"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
async def test_logits_of_a_ragged_batch_are_those_of_float32_within_rounding(name: str) -> None:
    plain = Reference(random_model(config_of(name), 3, 0.2))
    model = engine_model(random_model(config_of(name), 3, 0.2).half(), block_size=4, token_budget=7)
    assert model.store.dtype is torch.float16

    async def compare(prompt: list[int]) -> None:
        seq = Sequence(prompt, SamplingParams(), seed=0)
        [row] = await model.extend(seq, want=ReadSpec(draw=None, logits=True))
        expected = plain.logits(prompt)[-1]
        assert row.logits is not None
        assert float((row.logits - expected).abs().max() / expected.std()) < 2 * CHECK_TOLERANCE[torch.float16]
        model.release(seq)

    await asyncio.gather(*(compare(prompt) for prompt in random_prompts(6, 24, seed=1, vocab_size=97)))
    await model.close()


async def test_a_pair_in_float16_answers(tmp_path: Path) -> None:
    for name, layers in (("large", 4), ("small", 2)):
        random_model(llama_config(num_hidden_layers=layers), seed=4, spread=0.2).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    config = pair_config(tmp_path, block_size=4)
    config = config.model_copy(
        update={"models": {name: each.model_copy(update={"dtype": "float16"}) for name, each in config.models.items()}}
    )
    pool = LocalPool.load("pair", config)
    assert {model.dtype for model in pool.engines.values()} == {torch.float16}
    assert any(SAYS in note for note in pool.notes)
    for method in ("plain", "speculative"):
        assert len((await ask(pool, [7, 8, 9], method, ignore_eos=True)).ids) == 16
    await pool.close()


def test_compiled_kernels_are_refused_by_name() -> None:
    with pytest.raises(TurnoutError, match=SAYS) as caught:
        choose_backend("native", CPU, dtype=torch.float16)
    assert caught.value.field == "engine.kernels"


def test_a_model_that_exceeds_the_range_is_refused() -> None:
    model = random_model(config_of("llama"), 3, 0.2)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e5)
    with pytest.raises(TurnoutError, match="float16: the model's own numbers exceed its range") as caught:
        prepare(model.half())
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "dtype")
