"""A model split over two processes says what the whole model says, whatever a method does with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine.device import Device
from engine.kv_transfer import export_kv, import_kv
from engine.loading import load_checkpoint
from engine.model import EngineModel
from engine.reuse.settings import ReuseSettings
from tests.engine import shared_engines
from tests.engine.harness import CPU, Reply, answer, ask_all, call_of, random_prompts, reference
from tests.engine.margin import assert_same_tokens
from tests.engine.split import RankProcess, idle, pool_with, split, whole_pool
from tests.engine.test_text_side import whole_model
from training.random_models import random_model
from turnout.calls import GenerateCall
from turnout.config import EngineConfig, ModelConfig
from turnout.errors import Interrupted, TurnoutError
from turnout.types import SamplingParams, Token

ENGINE = {"block_size": 8, "token_budget": 48}
METHODS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("plain", {}, {"temperature": 0.0}),
    ("plain", {}, {"temperature": 0.9}),
    ("plain", {}, {"temperature": 0.9, "n": 3}),
    ("best_of", {"k": 3}, {"temperature": 1.0}),
    ("speculative", {"drafter": "model_chain", "length": "fixed"}, {"temperature": 0.7}),
    ("speculative", {"drafter": "model_tree", "length": "fixed"}, {"temperature": 0.0}),
    ("speculative", {"drafter": "rsd_s", "length": "fixed"}, {"temperature": 0.8}),
    ("speculative", {"length": "fixed", "draft_length": 4, "verifier": "rejection"}, {"temperature": 0.8}),
    ("speculative", {"drafter": "sequoia", "length": "fixed"}, {"temperature": 0.8}),
    ("speculative", {"drafter": "swift", "length": "fixed"}, {"temperature": 0.8}),
    ("speculative", {"drafter": "easyspec", "length": "fixed"}, {"temperature": 0.8}),
    ("pearl", {}, {"temperature": 0.8}),
    ("entropy_adaptive", {"window": 2, "min_stay": 3, "threshold": 2.0}, {"temperature": 0.5}),
]


def calls_of(rounds: int, longest: int = 40) -> list[GenerateCall]:
    """Every method, some prompts sharing their beginning."""
    prompts = random_prompts(rounds * len(METHODS), longest, seed=5)
    return [
        call_of([*prompts[i % 3], *prompt], method, params, seed=i, max_tokens=24, **options)
        for i, prompt in enumerate(prompts)
        for method, params, options in [METHODS[i % len(METHODS)]]
    ]


def assert_same_replies(folder: Path, calls: list[GenerateCall], mine: list[Reply], theirs: list[Reply]) -> None:
    """Equal tokens, up to ties, from equal models."""
    for call, one, other in zip(calls, mine, theirs, strict=True):
        if one.answers == other.answers:
            continue
        assert len(one.answers) == 1, f"{call.method} {call.params}: one of several answers differs"
        scores = reference(folder / "large").scores(call.prompt, one.ids, call.sampling, call.sampling.seed)
        assert_same_tokens(one.ids, other.ids, scores.__getitem__, f"{call.method} {call.params}")


@pytest.fixture
def rank() -> Iterator[RankProcess]:
    process = RankProcess()
    yield process
    process.close()


async def test_every_method_gives_the_tokens_of_the_whole_model(pair_folder: Path, rank: RankProcess) -> None:
    calls = calls_of(2)
    whole = whole_pool(pair_folder, **ENGINE)
    expected = [await answer(whole, call) for call in calls]
    await idle(whole)
    with split(rank, pair_folder / "large", "large", **ENGINE) as large:
        pool = pool_with(large, pair_folder, **ENGINE)
        together = await ask_all(pool, calls)
        assert_same_replies(pair_folder, calls, expected, together)
        assert any(reply.usage.speculation.accepted_tokens for reply in together)
        await idle(pool)
    assert rank.outcome() == {"error": None}


# 28 blocks of 4 tokens: one of the largest drafts with its sequence, or two or three answers at a time.
async def test_preempted_sequences_say_what_they_say_alone(pair_folder: Path, rank: RankProcess) -> None:
    calls = [call for call in calls_of(1, longest=16) if call.sampling.n == 1 and call.method != "best_of"]
    options = {"block_size": 4, "token_budget": 16, "num_blocks": 28}
    whole = whole_pool(pair_folder, **{**options, "num_blocks": 400})
    expected = [await answer(whole, call) for call in calls]
    await idle(whole)
    with split(rank, pair_folder / "large", "large", **options) as large:
        pool = pool_with(large, pair_folder, **options)
        crowded = await ask_all(pool, calls)
        assert_same_replies(pair_folder, calls, expected, crowded)
        assert processed(crowded) > processed(expected), "nobody was preempted"
        await idle(pool)
    assert rank.outcome() == {"error": None}


def processed(replies: list[Reply]) -> int:
    return sum(meter.processed_tokens for reply in replies for meter in reply.usage.models.values())


async def test_a_rank_that_forgets_to_move_a_path_is_noticed(pair_folder: Path, rank: RankProcess) -> None:
    """What the tests above compare depends on the KV that followers move when a path of a tree is accepted."""
    calls = [
        call_of(prompt, "speculative", {"drafter": "rsd_s", "length": "fixed"}, seed=i, temperature=0.8, max_tokens=40)
        for i, prompt in enumerate(random_prompts(6, 30, seed=9))
    ]
    whole = whole_pool(pair_folder, **ENGINE)
    expected = await ask_all(whole, calls)
    await idle(whole)
    with split(rank, pair_folder / "large", "large", ignored=("MOVE",), **ENGINE) as large:
        pool = pool_with(large, pair_folder, **ENGINE)
        replies = await ask_all(pool, calls)
        await idle(pool)
    assert rank.outcome() == {"error": None}
    with pytest.raises(AssertionError):
        assert_same_replies(pair_folder, calls, expected, replies)


@pytest.mark.parametrize("ignored", [(), ("COPY_BLOCK",)])
async def test_a_twin_that_writes_into_a_shared_block_gets_its_own(
    pair_folder: Path, rank: RankProcess, ignored: tuple[str, ...]
) -> None:
    plain, error = reference(pair_folder / "large"), 0.0
    with split(rank, pair_folder / "large", ignored=ignored, **ENGINE) as model:
        seq = Sequence(list(range(20)), SamplingParams(max_tokens=40), seed=0)
        await model.extend(seq)
        twin = model.fork(seq, 1)
        for each, token in ((twin, 50), (seq, 60), (twin, 51), (seq, 61)):
            each.append(Token(token, "m"))
            [row] = await model.extend(each, want=ReadSpec(draw=None, logits=True))
            assert row.logits is not None
            error = max(error, float((row.logits - plain.logits(each.tokens)[-1]).abs().max()))
        model.release(seq)
        model.release(twin)
        await model.close()
    assert rank.outcome() == {"error": None}
    assert (error < 1e-4) is not bool(ignored), "followers copy what is shared, and the test sees where they do not"


async def test_a_rank_that_forgets_a_forward_ends_the_group(pair_folder: Path, rank: RankProcess) -> None:
    options = {"step_timeout_s": 2.0, "ignored": ("HIDDEN",), **ENGINE}
    with (
        pytest.raises(Interrupted, match="cannot go on after HIDDEN"),
        split(rank, pair_folder / "large", **options),
    ):
        pass
    assert rank.outcome()["error"] == "Interrupted"


async def test_keys_and_values_are_the_whole_models(pair_folder: Path, rank: RankProcess) -> None:
    tokens = random_prompts(1, 60, seed=3)[0] + list(range(30))
    seq = Sequence(tokens, SamplingParams(), seed=0)
    config, engine = ModelConfig(path="-", kv_memory_bytes=8 << 20), EngineConfig(**ENGINE)
    checkpoint = load_checkpoint(pair_folder / "large", torch.float32, CPU)
    whole = EngineModel("m", checkpoint, config, engine, Device("cpu"))
    await whole.extend(seq)
    expected = await export_kv(whole, seq)
    with split(rank, pair_folder / "large", **ENGINE) as model:
        assert (model.digest, model.num_parameters) == (whole.digest, whole.num_parameters)
        assert model.layout({}).kv_heads == whole.layout({}).kv_heads == 2
        assert model.store.layers[0].shape[2] == 1
        await model.extend(seq)
        got = await export_kv(model, seq)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        model.release(seq)
        model.pool.clear_cached()
        held = await import_kv(model, seq, 0, expected)
        assert held == (len(tokens) - 1) // 8 * 8
        [row] = await model.extend(seq, want=ReadSpec(draw=None, logits=True))
        assert seq.meter.models["m"].cached_tokens == held
        [plain] = await whole.extend(Sequence(tokens, SamplingParams(), seed=0), want=ReadSpec(draw=None, logits=True))
        assert row.logits is not None
        assert plain.logits is not None
        torch.testing.assert_close(row.logits, plain.logits, atol=1e-4, rtol=0)
        with pytest.raises(ValueError, match="keys and values are"):
            model.store.write_blocks([0], 8, expected[:, :8, :, :1])
        model.release(seq)
        await model.close()
    await whole.close()
    assert rank.outcome() == {"error": None}


async def test_what_the_prefix_store_has_is_fetched_for_all_ranks(tmp_path: Path, rank: RankProcess) -> None:
    random_model(shared_engines.TINY, seed=4, spread=0.2).save_pretrained(tmp_path)
    first = shared_engines.Engine()
    seq = shared_engines.sequence(shared_engines.prompt(33))
    await first.right(seq)
    await first.settled()
    with split(rank, tmp_path, block_size=shared_engines.SIZE) as model:
        second = shared_engines.Engine.__new__(shared_engines.Engine)
        second.model, second.plain = model, first.plain
        second.store = type(first.store)(shared_engines.CHUNK, first.store.shelf)
        model.share(second.store)  # type: ignore[arg-type]
        longer = shared_engines.sequence([*shared_engines.prompt(33), *range(2, 30)])
        await second.right(longer)
        assert longer.meter.models["m"].fetched_tokens == 32
        await second.settled()
        assert len(second.store.shelf) == 7  # what the split model computed, offered with all heads
        await second.close()
    third = shared_engines.Engine(first.store.shelf)
    again = shared_engines.sequence([*shared_engines.prompt(33), *range(2, 30)])
    await third.right(again)
    assert again.meter.models["m"].fetched_tokens == 56
    await third.close()
    await first.close()
    assert rank.outcome() == {"error": None}


async def test_the_text_side_of_a_wrapper_is_split_and_its_note_is_kept(tmp_path: Path, rank: RankProcess) -> None:
    whole_model("gemma3").save_pretrained(tmp_path)
    whole = load_checkpoint(tmp_path, torch.float32, CPU)
    with split(rank, tmp_path, **ENGINE) as model:  # whose forward was compared with that of transformers
        assert (model.digest, model.num_parameters) == (whole.digest, whole.num_parameters)
        assert [note for note in model.notes if "text side of 'gemma3' only" in note] == whole.notes[:1]
        await model.close()
    assert rank.outcome() == {"error": None}


async def test_embeddings_and_spans_of_others(pair_folder: Path, rank: RankProcess) -> None:
    with split(rank, pair_folder / "large", **ENGINE) as model:
        rows = reference(pair_folder / "large").model.get_input_embeddings().weight
        torch.testing.assert_close(model.embed([0, 5, 200]), rows[[0, 5, 200]].detach())
        with pytest.raises(TurnoutError, match="several processes"):
            model.reuse(ReuseSettings())
        await model.close()
    assert rank.outcome() == {"error": None}
