"""Beam search on the engine: the answers of transformers, alone and among requests of other methods."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import Any

import pytest
import torch

from decoding.fakes import ListText
from decoding.model import ModelPool, Request
from decoding.sequence import Sequence
from engine.model import EngineModel
from tests.engine.harness import Reference, engine_model, random_prompts, twins
from training.random_models import llama_config
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams

VOCAB, TOKENS = 40, 9
ENDS = (3, 7, 11)

# The models' locks belong to one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def models() -> tuple[EngineModel, Reference]:
    torch.set_num_threads(1)
    config = llama_config(VOCAB, hidden_size=32, num_hidden_layers=2, pad_token_id=0, max_position_embeddings=64)
    return twins(config, seed=3, spread=0.35, block_size=4, token_budget=64)


def expected(reference: Reference, prompt: list[int], n: int, width: int, ends: tuple[int, ...], **options: Any) -> Any:
    """Answers of transformers' own beam search, each up to its end."""
    found = reference.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        num_beams=width,
        num_return_sequences=n,
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        **options,
    )
    answers = []
    for tokens in found[:, len(prompt) :].tolist():
        stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        answers.append(tokens[: stop + 1])
    return answers


async def run(
    engine: EngineModel, prompt: list[int], method: str, n: int, ends: tuple[int, ...], **params: Any
) -> list[list[int]]:
    asked = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=not ends)
    seqs = tuple(Sequence(prompt, asked, seed, ends) for seed in range(n))
    info = get_method(method)
    try:
        async for _ in info.run(Request("r", seqs[0], answers=seqs), pool_of(engine), info.parse(params)):
            pass
    finally:
        for seq in seqs:
            engine.release(seq)
    return [seq.answer for seq in seqs]


def pool_of(model: EngineModel) -> ModelPool:
    return ModelPool({"m": model}, {"small": "m", "large": "m"}, ListText([str(token) for token in range(VOCAB)]))


def beam(width: int, **options: Any) -> dict[str, Any]:
    return {"width": width, "search": {"name": "beam", **options}}


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize(("n", "width"), [(1, 2), (3, 3), (2, 6)])
async def test_answers_are_those_of_transformers(models: Any, n: int, width: int, penalty: float, early: Any) -> None:
    model, reference = models
    options = {"length_penalty": penalty, "early_stopping": early}
    lengths = set()
    for prompt in random_prompts(3, 9, seed=n, vocab_size=VOCAB):
        wanted = expected(reference, prompt, n, width, ENDS, **options)
        assert await run(model, prompt, "search", n, ENDS, **beam(width, **options)) == wanted
        lengths |= set(map(len, wanted))
    assert len(lengths) > 1 or penalty > 0  # some end before they are as long as they may be
    assert model.stats().sequences == 0


async def test_in_a_batch_with_other_methods_and_widths_all_answer_as_alone(models: Any) -> None:
    model, reference = models
    prompts = random_prompts(5, 9, seed=8, vocab_size=VOCAB)
    plain, asked = await run(model, prompts[4], "plain", 1, ENDS), list(zip(prompts, (2, 3, 4, 5), strict=False))
    found = await asyncio.gather(
        *(run(model, prompt, "search", 2, ENDS, **beam(width)) for prompt, width in asked),
        run(model, prompts[4], "plain", 1, ENDS),
    )
    wanted = [expected(reference, prompt, 2, width, ENDS) for prompt, width in asked]
    assert found == [*wanted, plain]


async def test_without_an_end_token_all_are_as_long_as_they_may_be(models: Any) -> None:
    model, reference = models
    [prompt] = random_prompts(1, 9, seed=9, vocab_size=VOCAB)
    assert await run(model, prompt, "search", 3, (), **beam(4)) == expected(reference, prompt, 3, 4, ())


async def test_the_prompt_is_computed_once_and_blocks_are_shared(models: Any) -> None:
    model, _ = models
    prompt = list(range(33))
    asked = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    seq, info = Sequence(prompt, asked, 0), get_method("search")
    async for _ in info.run(Request("r", seq), pool_of(model), info.parse(beam(5))):
        pass
    meter = seq.meter.models["m"]
    assert (meter.prompt_tokens, meter.decode_tokens, meter.catchup_tokens) == (33, 5 * (TOKENS - 1), 0)
    model.release(seq)
    model.pool.check_integrity()


@pytest.mark.parametrize("at_once", [1, 3])
async def test_with_no_more_memory_than_a_width_needs_the_answers_are_the_same(models: Any, at_once: int) -> None:
    """3 blocks of the prompt, and 4 for each hypothesis; of several requests, some wait or are computed again."""
    _, reference = models
    model = engine_model(deepcopy(reference.model), num_blocks=3 + 4 * 5, block_size=4, token_budget=64)
    prompts = [list(range(start, start + 9)) for start in range(20, 20 + at_once)]
    found = await asyncio.gather(*(run(model, prompt, "search", 2, ENDS, **beam(5)) for prompt in prompts))
    assert found == [expected(reference, prompt, 2, 5, ENDS) for prompt in prompts]
    model.pool.check_integrity()
    with pytest.raises(TurnoutError, match="24 hypotheses of 1 tokens do not fit the memory of m"):
        await run(model, prompts[0], "search", 1, ENDS, **beam(24))
    assert model.stats().sequences == 0
