"""Embeddings and scores of pairs by a pool, compared with plain Hugging Face models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deployments.read_surface import usage_of
from deployments.relevance_http import AFTER_DOCUMENT, BEFORE_DOCUMENT, likelihood
from pool.local_pool import LocalPool
from tests.engine.harness import pair_config, reference, until
from turnout.calls import ScoreCall
from turnout.config import PoolConfig
from turnout.embed_calls import EmbedCall
from turnout.errors import Code, TurnoutError

TEXTS = ("a", "two words", "Grüße, and a longer text that is read in more than one step of the engine" * 2)


@torch.inference_mode()
def unit(folder: Path, ids: Any, pooling: str, dimensions: int | None = None, name: str = "large") -> np.ndarray:
    states = reference(folder / name).model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
    pooled = (states.mean(0) if pooling == "mean" else states[-1])[:dimensions]
    return (pooled / pooled.norm()).float().numpy()


async def vectors(pool: LocalPool, *texts: Any, model: str = "pair", **options: Any) -> np.ndarray:
    made = await pool.embed(EmbedCall("r", model, texts, **options))
    assert len(made.vectors) == len(made.prompt_tokens) == len(texts)
    return np.frombuffer(made.data, "<f4").reshape(len(texts), made.dimensions)


@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_vectors_are_pooled_states_of_a_plain_model(pair_folder: Path, pool: LocalPool, pooling: Any) -> None:
    ids = [pool.tokenizer.encode(text) for text in TEXTS]
    expected = np.stack([unit(pair_folder, each, pooling) for each in ids])
    np.testing.assert_allclose(await vectors(pool, *TEXTS, pooling=pooling), expected, atol=2e-5)
    np.testing.assert_allclose(await vectors(pool, *map(tuple, ids), pooling=pooling), expected, atol=2e-5)
    small = np.stack([unit(pair_folder, each, pooling, 7, "small") for each in ids])
    got = await vectors(pool, *TEXTS, pooling=pooling, dimensions=7, model="small")
    np.testing.assert_allclose(got, small, atol=2e-5)


async def test_a_long_text_is_cut_where_that_is_asked_for_and_refused_elsewhere(
    pair_folder: Path, pool: LocalPool
) -> None:
    most = pool.members["large"].max_length
    ids = tuple(place % 200 for place in range(most + 5))
    with pytest.raises(TurnoutError) as refused:
        await vectors(pool, (1,), ids)
    assert (refused.value.code, refused.value.field) == (Code.OUT_OF_RANGE, "input.1")
    for truncate, kept in ((-1, most), (9, 9), (most + 1, None)):
        if kept is None:
            with pytest.raises(TurnoutError):
                await vectors(pool, ids, truncate=truncate)
            continue
        made = await pool.embed(EmbedCall("r", "pair", (ids,), truncate=truncate))
        assert made.prompt_tokens == (kept,)
        got = np.frombuffer(made.data, "<f4")
        np.testing.assert_allclose(got, unit(pair_folder, ids[:kept], "mean"), atol=2e-5)


async def test_the_pooling_of_a_pool_is_configured(pair_folder: Path) -> None:
    config = pair_config(pair_folder)
    last = PoolConfig(small="small", large="large", embedding_pooling="last")
    pool = LocalPool.load("pair", config.model_copy(update={"pools": {"pair": last}}))
    np.testing.assert_array_equal(await vectors(pool, "text"), await vectors(pool, "text", pooling="last"))
    await pool.close()


@pytest.mark.parametrize(
    ("options", "field"),
    [({"dimensions": 4096}, "dimensions"), ({"most_numbers": 3}, "input"), ({"model": "none"}, "model")],
)
async def test_what_cannot_be_is_refused_by_name(pool: LocalPool, options: dict[str, Any], field: str) -> None:
    with pytest.raises(TurnoutError) as refused:
        await vectors(pool, "a", "b", **options)
    assert refused.value.field == field
    with pytest.raises(TurnoutError) as refused:
        await vectors(pool, "a", (pool.vocab_size,))
    assert (refused.value.code, refused.value.field) == (Code.OUT_OF_RANGE, "input.1")


async def test_a_caller_that_leaves_frees_everything(pool: LocalPool) -> None:
    asked = asyncio.create_task(vectors(pool, *TEXTS * 20))
    await until(lambda: pool.stats().used_blocks > 0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: pool.stats().used_blocks == 0)
    assert (pool.stats().sequences, pool.stats().requests) == (0, 0)


async def test_pairs_are_scored_as_by_hand(pair_folder: Path, pool: LocalPool) -> None:
    documents, queries = ("first", "a second document"), (" what is first?", " and then?")
    cut = len(pool.tokenizer.encode(BEFORE_DOCUMENT + documents[0]))
    call = ScoreCall(
        "r", "pair", (), queries, prompts=tuple(BEFORE_DOCUMENT + each for each in documents), suffix=AFTER_DOCUMENT
    )
    for truncate in (None, cut, -1):
        asked = ScoreCall(**{name: getattr(call, name) for name in call.__slots__} | {"truncate": truncate})
        for scored, document, query in zip(await pool.score(asked), documents, queries, strict=True):
            before = pool.tokenizer.encode(BEFORE_DOCUMENT + document)[: cut if truncate == cut else None]
            before += pool.tokenizer.encode(AFTER_DOCUMENT)
            ids = pool.tokenizer.encode(query)
            logp = reference(pair_folder / "large").logits([*before, *ids])[len(before) - 1 : -1].log_softmax(-1)
            expected = logp.gather(1, torch.tensor(ids)[:, None]).mean().exp()
            assert likelihood(scored) == pytest.approx(float(expected), rel=1e-4)
            assert scored.prompt_tokens == len(before)
    assert usage_of(3) == {"prompt_tokens": 3, "total_tokens": 3}


async def test_what_begins_every_text_begins_no_completion(pool: LocalPool) -> None:
    tokenizer = pool.tokenizer
    plain = await pool.score(ScoreCall("r", "pair", (5, 6), ("word",)))
    tokenizer._prefix, tokenizer.num_prefix = [1], 1
    begun = await pool.score(ScoreCall("r", "pair", (5, 6), ("word",)))
    assert [token.id for token in begun[0].tokens] == [token.id for token in plain[0].tokens]
    made = await pool.embed(EmbedCall("r", "pair", ("word",)))
    assert made.prompt_tokens == (1 + len(plain[0].tokens),)


async def test_reads_of_a_batch_have_places_of_their_own(pair_folder: Path) -> None:
    one = PoolConfig(small="small", large="large", max_ongoing_requests=1)
    pool = LocalPool.load("pair", pair_config(pair_folder).model_copy(update={"pools": {"pair": one}}))
    score = ScoreCall("r", "pair", "a", ("b",), priority="batch")
    async with pool._places.hold("default"):
        with pytest.raises(TurnoutError) as refused:
            await vectors(pool, "text", deadline_s=0.01)
        assert refused.value.code is Code.DEADLINE_EXCEEDED
        batched = await vectors(pool, "text", priority="batch", deadline_s=60.0)
        [scored] = await pool.score(score)
    np.testing.assert_array_equal(batched, await vectors(pool, "text"))
    assert [token.text for token in scored.tokens] == ["b"]
    await pool.close()
