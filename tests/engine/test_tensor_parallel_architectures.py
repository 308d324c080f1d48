"""Every architecture that can be split, split over two processes, against plain Hugging Face forwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine.architectures import architecture_named
from engine.parallel import check_split
from tests.engine.architectures import CONFIGS, TOLERANCE, assert_rows_are, config_of
from tests.engine.harness import Reference, random_prompts
from tests.engine.split import RankProcess, split
from training.random_models import llama_config, random_model
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams, Token

VOCAB = 97  # odd: the last rank has fewer rows of the output matrix


@pytest.fixture(scope="module")
def rank() -> Iterator[RankProcess]:
    process = RankProcess()
    yield process
    process.close()


@pytest.mark.parametrize("name", sorted(name for name, (kind, _) in CONFIGS.items() if architecture_named(kind).splits))
async def test_logits_and_greedy_tokens_are_those_of_a_plain_forward(
    name: str, tmp_path: Path, rank: RankProcess
) -> None:
    random_model(config_of(name), seed=3, spread=0.2).save_pretrained(tmp_path)
    plain = Reference(random_model(config_of(name), seed=3, spread=0.2))
    prompts = random_prompts(4, 24, seed=1, vocab_size=VOCAB)

    with split(rank, tmp_path, block_size=4, token_budget=7) as model:

        async def greedy(prompt: list[int]) -> None:
            seq = Sequence(prompt, SamplingParams(temperature=0.0, max_tokens=5), seed=0)
            rows = []
            while not seq.finished:
                rows += await model.extend(seq, want=ReadSpec(logits=True))
                seq.append(Token(rows[-1].token, "m"))
            assert_rows_are(rows, plain.logits(seq.tokens)[len(prompt) - 1 : -1], name)
            model.release(seq)

        async def every_position(prompt: list[int]) -> None:
            seq = Sequence(prompt[:1], SamplingParams(), seed=0)
            rows = await model.extend(seq, tuple(prompt[1:]), ReadSpec(draw=None, logits=True), every=True)
            got = torch.stack([row.logits for row in rows if row.logits is not None])
            torch.testing.assert_close(got, plain.logits(prompt), atol=TOLERANCE, rtol=0)
            model.release(seq)

        await asyncio.gather(*(greedy(prompt) for prompt in prompts), *(every_position(prompt) for prompt in prompts))
        model.pool.check_integrity()
        assert model.pool.num_held == 0
        await model.close()
    assert rank.outcome() == {"error": None}


@pytest.mark.parametrize("kernels", ["plain", "torch"])
async def test_every_kind_of_kernels(kernels: str, tmp_path: Path, rank: RankProcess) -> None:
    config = llama_config(
        VOCAB, hidden_size=32, intermediate_size=42, num_key_value_heads=4, pad_token_id=0, eos_token_id=1
    )
    random_model(config, seed=3, spread=0.2).save_pretrained(tmp_path)
    plain = Reference(random_model(config, seed=3, spread=0.2))
    with split(rank, tmp_path, kernels, block_size=4) as model:
        seq = Sequence(random_prompts(1, 40, seed=1, vocab_size=VOCAB)[0], SamplingParams(), seed=0)
        [row] = await model.extend(seq, want=ReadSpec(draw=None, logits=True))
        assert row.logits is not None
        torch.testing.assert_close(row.logits, plain.logits(seq.tokens)[-1], atol=TOLERANCE, rtol=0)
        model.release(seq)
        await model.close()
    assert rank.outcome() == {"error": None}


@pytest.mark.parametrize(("name", "dtype"), [("qwen3", torch.float16), ("mixtral", torch.bfloat16)])
async def test_half_precision(name: str, dtype: torch.dtype, tmp_path: Path, rank: RankProcess) -> None:
    """Loading compares a forward with transformers' own; the whole model in bfloat16 is as far off."""
    random_model(config_of(name), seed=3, spread=0.2).save_pretrained(tmp_path)
    plain = Reference(random_model(config_of(name), seed=3, spread=0.2))
    with split(rank, tmp_path, dtype=dtype, block_size=4) as model:
        assert model.store.dtype is dtype
        seq = Sequence(random_prompts(1, 40, seed=1, vocab_size=VOCAB)[0], SamplingParams(), seed=0)
        [row] = await model.extend(seq, want=ReadSpec(draw=None, logits=True))
        assert row.logits is not None
        expected = plain.logits(seq.tokens)[-1]
        assert float((row.logits - expected).abs().max() / expected.std()) < 0.15
        model.release(seq)
        await model.close()
    assert rank.outcome() == {"error": None}


async def test_every_rank_takes_the_rotary_frequencies_of_each_sequence(tmp_path: Path, rank: RankProcess) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 8.0}
    config = config_of("llama", max_position_embeddings=16, rope_parameters=rope)
    random_model(config, seed=3, spread=0.2).save_pretrained(tmp_path)
    plain = Reference(random_model(config, seed=3, spread=0.2))
    with split(rank, tmp_path, block_size=4, token_budget=7) as model:
        assert model.max_length == 128

        async def after_prompt(most: int) -> torch.Tensor | None:
            seq = Sequence([5, 6, 7, 8, 9], SamplingParams(max_tokens=most), seed=0)
            [row] = await model.extend(seq, want=ReadSpec(draw=None, logits=True))
            model.release(seq)
            return row.logits

        found = await asyncio.gather(*map(after_prompt, (4, 20, 40)))
        for most, logits in zip((4, 20, 40), found, strict=True):
            assert logits is not None
            expected = plain.logits([5, 6, 7, 8, 9, *[1] * (most - 1)])[4]
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        await model.close()
    assert rank.outcome() == {"error": None}


def saved(folder: Path, name: str) -> Path:
    config_of(name).save_pretrained(folder)
    return folder


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama", "llama")  # 4 heads, 2 of keys and values
    for ranks in (1, 2):
        check_split("big", folder, ranks)
    cases = [
        (folder, 3, "3 does not divide its 2 key/value heads; allowed: 1, 2"),
        (folder, 4, "4 does not divide its 2 key/value heads; allowed: 1, 2"),
        (saved(tmp_path / "phi3", "phi3"), 2, "must be 1: 'phi3' cannot be split; architectures that can: cohere2, "),
        (saved(tmp_path / "neox", "gpt_neox"), 3, "3 does not divide its 4 key/value heads; allowed: 1, 2, 4"),
        (saved(tmp_path / "moe", "qwen3_moe"), 4, "experts of width 24; allowed: 1, 2"),
    ]
    for path, ranks, message in cases:
        with pytest.raises(TurnoutError) as refused:
            check_split("big", path, ranks)
        assert refused.value.code is Code.INVALID_ARGUMENT
        assert refused.value.field == "models.big.tensor_parallel"
        assert message in refused.value.message
