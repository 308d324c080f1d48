"""LongRoPE and dynamic NTK: rotary frequencies fixed for each sequence, by the greatest length it can reach."""

from __future__ import annotations

import asyncio
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decoding.model import Readout, ReadSpec
from decoding.partial_forward import WHOLE
from decoding.sequence import Sequence
from engine.architectures import architecture_of
from engine.attention.layout import lay_out, select
from engine.backends.base import Kernels
from engine.kv_transfer import export_kv, import_kv
from engine.loaded_model import check_supported
from engine.loading import prepare
from engine.model import EngineModel
from engine.parallel.framing import pack_step, unpack_step
from engine.reuse.rotation import Rotation
from engine.rope import context_length
from engine.twin import check_twin
from kvstore.keys import Chain, Keyring
from pool.call_migration import HandOver, unpack
from pool.local_pool import LocalPool
from router.base import Reading
from router.first_token_cache import PrimedModel
from tests.engine.architectures import TOLERANCE, assert_rows_are, config_of
from tests.engine.harness import (
    Reference,
    answer,
    ask_all,
    call_of,
    engine_model,
    pair_config,
    random_prompts,
    reference,
    twins,
)
from tests.engine.margin import assert_best
from training.random_models import BYTE_VOCAB, byte_tokenizer, random_model
from turnout.calls import Delivered, ScoreCall
from turnout.errors import TurnoutError
from turnout.types import SamplingParams, Sharing, Token

ORIGINAL = 16  # length that the models were trained with
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 6.0]}
_CONFIGS = {
    "longrope": config_of(
        "phi3",
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={**LONGROPE, "rope_theta": 100.0},
        sliding_window=None,
    ),
    "dynamic": config_of(
        "llama",
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 8.0},
    ),
}
KINDS = tuple(_CONFIGS)
LOGITS = ReadSpec(logits=True)


def rope_config(kind: str) -> Any:
    return deepcopy(_CONFIGS[kind])


def sequence(prompt: list[int], max_tokens: int, tenant: str = "default") -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Sequence(prompt, sampling, seed=0, sharing=Sharing.private(tenant))


def expected(plain: Reference, seq: Sequence) -> torch.Tensor:
    """Logits after its tokens from the prompt's last one on, by Hugging Face over as many as the sequence may reach."""
    plain.logits([1])  # dynamic scaling only returns to a smaller length by way of a short sequence
    tokens = [*seq.tokens, *[1] * seq.sampling.max_tokens][: seq.greatest_length]
    return plain.logits(tokens)[seq.num_prompt_tokens - 1 : len(seq) if not seq.finished else len(seq) - 1]


async def write(model: EngineModel, plain: Reference, seq: Sequence) -> None:
    """Write a whole answer; all of its logits are compared."""
    rows = []
    while not seq.finished:
        rows += await model.extend(seq, want=LOGITS)
        seq.append(Token(rows[-1].token, "m"))
    assert_rows_are(rows, expected(plain, seq), "rope")


def longrope_pool(folder: Path) -> LocalPool:
    for name, layers in (("large", 2), ("small", 1)):
        config = rope_config("longrope")
        config.num_hidden_layers, config.vocab_size = layers, BYTE_VOCAB
        random_model(config, seed=4, spread=0.2).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return LocalPool.load("pair", pair_config(folder, block_size=4, token_budget=24))


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
async def test_each_sequence_of_a_batch_has_the_factors_of_its_own_greatest_length(kind: str, kernels: Kernels) -> None:
    """Below, across and beyond the boundary, in ragged batches and chunks."""
    model, plain = twins(rope_config(kind), seed=3, kernels=kernels, block_size=4, token_budget=7)
    prompts = random_prompts(4, 30, seed=1, vocab_size=97)
    sequences = [sequence(prompt, most) for prompt in prompts for most in (2, 8)]
    assert {seq.greatest_length > ORIGINAL for seq in sequences} == {False, True}
    await asyncio.gather(*(write(model, plain, seq) for seq in sequences))
    for seq in sequences:
        model.release(seq)
    model.pool.check_integrity()
    assert model.pool.num_held == 0
    await model.close()


@pytest.mark.parametrize(
    ("kind", "tokens", "most"),
    [("longrope", 9, ORIGINAL - 9), ("longrope", ORIGINAL + 1, 9), ("dynamic", 5, ORIGINAL - 5)],
)
async def test_answers_on_one_side_of_the_boundary_are_those_of_generate(kind: str, tokens: int, most: int) -> None:
    model, plain = twins(rope_config(kind), seed=3, block_size=4)
    prompt = [(7 * i) % 90 + 3 for i in range(tokens)]
    generated = plain.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=most, eos_token_id=None)
    seq = sequence(prompt, most)
    await write(model, plain, seq)
    assert seq.tokens == generated[0].tolist()
    await model.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_blocks_are_shared_by_sequences_of_the_same_factors_only(kind: str) -> None:
    model, plain = twins(rope_config(kind), seed=3, block_size=4)
    prompt = [(5 * i) % 90 + 3 for i in range(12)]
    for most, found in ((3, 0), (9, 0), (4, 8), (9, 8), (10, 8 if kind == "longrope" else 0)):
        seq = sequence(prompt, most)
        await write(model, plain, seq)
        table = model.batcher.tables[seq]
        assert table.cached_on_arrival == found
        if most == 9:  # the factors are the sequence's, so preempted it computes the same
            twin = model.fork(seq)
            assert model.batcher.tables[twin].block_array.tolist() == table.block_array.tolist()
            model.release(twin)
        model.release(seq)
    await model.close()


async def test_keys_that_move_to_another_pool_are_found_by_the_same_length_only() -> None:
    giver, plain = twins(rope_config("dynamic"), seed=3, block_size=4)
    taker = engine_model(random_model(rope_config("dynamic"), 3, 0.2), block_size=4)
    seq = sequence([(5 * i) % 90 + 3 for i in range(12)], 8)
    await write(giver, plain, seq)
    kv = await export_kv(giver, seq)
    there = sequence(seq.tokens[:12], 8)
    assert await import_kv(taker, there, 0, kv[:, :12]) == 8
    await write(taker, plain, there)
    assert taker.batcher.tables[there].cached_on_arrival == 8
    other = sequence(seq.tokens[:12], 3)
    await write(taker, plain, other)
    assert taker.batcher.tables[other].cached_on_arrival == 0
    for model in (giver, taker):
        await model.close()


async def test_keys_of_another_length_are_not_taken_over() -> None:
    """A router may decide otherwise where a call is continued, and its context may be a shorter one."""
    giver = engine_model(random_model(rope_config("dynamic"), 3, 0.2), block_size=4)
    taker = engine_model(random_model(rope_config("dynamic"), 3, 0.2), block_size=4, max_length=2 * ORIGINAL)
    prompt = [(5 * i) % 90 + 3 for i in range(12)]
    for there, here, found in ((8, 9, 0), (100, 100, 0), (8, 8, 8), (3, 4, 8)):
        seq = sequence(prompt, there, f"{there} {here}")
        await giver.extend(seq)
        kv = await export_kv(giver, seq)
        moved = sequence(prompt, here, f"{there} {here}")
        assert await import_kv(taker, moved, 0, kv, min(seq.greatest_length, giver.max_length)) == found
        giver.release(seq)
    for model in (giver, taker):
        await model.close()


async def test_a_move_of_a_call_says_the_length() -> None:
    model = engine_model(random_model(rope_config("dynamic"), 3, 0.2), block_size=4)
    prompt = [(5 * i) % 90 + 3 for i in range(12)]
    for there, here, found in ((8, 3, 0), (8, 8, 8), (10**6, 10**6, 8)):
        seq = sequence(prompt, there, f"{there} {here}")
        await model.extend(seq)
        packing = HandOver({"m": model})
        await packing.pack(0, seq, whole=False)
        model.release(seq)
        assert await unpack(packing.moved([]), {"m": model}, [sequence(prompt, here, f"{there} {here} there")]) == found
    await model.close()


async def test_scores_are_those_of_the_texts_own_length(tmp_path: Path) -> None:
    """A call that only scores has no answer, whose room would count."""
    pool = longrope_pool(tmp_path)
    plain = reference(tmp_path / "large")
    prompt, completion = (7, 8, 9), (5, 6, 7, 8)
    [scored] = await pool.score(ScoreCall("", "pair", prompt, (completion,)))
    rows = plain.logits([*prompt, *completion])[len(prompt) - 1 : -1].log_softmax(dim=-1)
    got = torch.tensor([each.logprob for each in scored.tokens])
    torch.testing.assert_close(got, rows[range(4), list(completion)], atol=TOLERANCE, rtol=0)
    await pool.close()


async def test_an_operator_is_told_what_requests_without_a_limit_get() -> None:
    says = f"m: requests without max_tokens get .* models.m.max_length to {ORIGINAL} or less$"
    for most, told in ((None, 1), (ORIGINAL, 0)):
        model = engine_model(random_model(rope_config("longrope"), 3, 0.2), block_size=4, max_length=most)
        assert sum(bool(re.match(says, note)) for note in model.notes) == told
        await model.close()


async def test_an_answer_that_a_router_made_shorter_is_computed_anew_with_its_factors() -> None:
    model, plain = twins(rope_config("longrope"), seed=3, block_size=4)
    seq = sequence([5] * 9, 30)
    [row] = await model.extend(seq, want=LOGITS)
    assert row.logits is not None
    torch.testing.assert_close(row.logits, expected(plain, seq)[-1], atol=TOLERANCE, rtol=0)
    seq.sampling = seq.sampling.model_copy(update={"max_tokens": 4})
    await write(model, plain, seq)
    model.release(seq)
    assert model.pool.num_held == 0
    await model.close()


async def test_a_reading_before_a_router_made_the_answer_shorter_is_not_its_first_token() -> None:
    model = engine_model(random_model(rope_config("longrope"), 3, 0.2), block_size=4)
    whole = sequence([5] * 9, 4)
    await model.decode(whole)
    planted = Reading(Readout(token=(whole.answer[0] + 1) % 97), ReadSpec(), sequence([5], 30).sampling)
    for most, same in ((30, False), (4, True)):
        seq = sequence([5] * 9, most)
        await PrimedModel(model, seq, planted).decode(seq)
        assert (seq.answer[:4] == whole.answer) is same
        model.release(seq)
    await model.close()


async def test_every_method_and_a_repeated_call_write_the_same_across_the_boundary(tmp_path: Path) -> None:
    pool = longrope_pool(tmp_path)
    prompt = [7, 8, 9] * 3
    call = call_of(prompt, "plain", max_tokens=ORIGINAL, ignore_eos=True)
    told = replace(call, delivered=(Delivered(tuple((await answer(pool, call)).ids[:9])),))
    drafters = ("model_chain", "token_recycling", "lookahead")
    others = [replace(call, method="speculative", params={"drafter": drafter}) for drafter in drafters]
    first, again, *replies = await ask_all(pool, [call, told, *others])
    plain = reference(tmp_path / "large")
    whole = plain.logits([*prompt, *first.ids])[len(prompt) - 1 : -1]
    for place, (token, scores) in enumerate(zip(first.ids, whole, strict=True)):
        assert_best(token, scores, f"token {place}")
    assert again.ids == first.ids[9:]
    assert all(reply.ids == first.ids for reply in replies)
    await pool.close()


def test_chunks_of_a_shared_store_are_named_by_the_length_too() -> None:
    tokens, ring = list(range(8)), Keyring(bytes(32))
    digests = {
        length: [link.digest for link in Chain(ring, bytes(32), 4, Sharing(), length).links(tokens, 2)]
        for length in (0, 17, 18)
    }
    assert len({digest for chain in digests.values() for digest in chain}) == 6
    assert digests[0] == [link.digest for link in Chain(ring, bytes(32), 4, Sharing()).links(tokens, 2)]


def test_ranks_and_parts_of_a_batch_get_each_rows_length() -> None:
    blocks = [np.zeros(1, dtype=np.int32)] * 3
    layout = lay_out([1] * 6, [1, 2, 3], [0, 0, 0], blocks, 4, {}, None, [0, 17, 40])
    assert layout.row_rope_lengths is not None
    assert layout.row_rope_lengths.tolist() == [0, 17, 17, 40, 40, 40]
    part, _ = select(layout, np.array([2, 0]))
    followed, _, _ = unpack_step(pack_step(part, WHOLE, None))
    assert followed.row_rope_lengths is not None
    assert followed.row_rope_lengths.tolist() == [40, 40, 40, 0]
    plain, _, _ = unpack_step(pack_step(lay_out([1], [1], [0], blocks[:1], 4, {}, None, [0]), WHOLE, None))
    assert plain.row_rope_lengths is None


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers_for_that_length(kind: str) -> None:
    config = rope_config(kind)
    rotary = prepare(random_model(config, 3, 0.2)).plan.rotary
    positions = torch.arange(40)[None]
    for longest in (3, ORIGINAL, ORIGINAL + 1, 40):
        lengths = np.full(40, rotary.length_of(longest))
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=torch.tensor(longest))
        angles = (positions[..., None] * frequencies).repeat(1, 1, 2)
        for got, wanted in zip(rotary(torch.zeros(1), positions, lengths), (angles.cos(), angles.sin()), strict=True):
            torch.testing.assert_close(got, wanted * factor, atol=1e-6, rtol=0)
    assert rotary.length_of(10**6) == (10**6 if kind == "dynamic" else ORIGINAL + 1)


async def test_the_greatest_length_is_within_the_context() -> None:
    model = engine_model(random_model(rope_config("dynamic"), 3, 0.2), block_size=4)
    assert model.max_length == 8 * ORIGINAL
    assert [model.pool.rope_length(sequence([5], most)) for most in (16, 17, 10**6)] == [0, 17, 8 * ORIGINAL]
    await model.close()


def test_dynamic_scaling_extends_the_context_and_says_that_fused_layers_do_not_run() -> None:
    checkpoint = prepare(random_model(rope_config("dynamic"), 3, 0.2))
    assert checkpoint.max_length == context_length(rope_config("dynamic")) == 8 * ORIGINAL
    assert any("rotary scaling by length runs the model's own modules" in note for note in checkpoint.notes)


def test_keys_of_several_lengths_cannot_be_moved_to_other_positions() -> None:
    with pytest.raises(TurnoutError, match="its rotary embedding has no fixed frequencies"):
        Rotation.of(prepare(random_model(rope_config("dynamic"), 3, 0.2)).plan)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + i / 8 for i in range(48)],
            "long_factor": [1.0 + i for i in range(48)],
            "factor": 4.0,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_every_kind_is_proven_where_an_architecture_has_no_file(rope: dict[str, Any]) -> None:
    """By a twin, on both sides of the length that its RoPE is scaled from."""
    config = AutoConfig.for_model("arcee", rope_parameters={**rope, "rope_theta": 1e4})
    assert not architecture_of(config).listed
    check_supported(config)
    check_twin(config)
