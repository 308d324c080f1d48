"""Keys and values as bytes: what is kept, how much fits, and that answers are still those of plain decoding."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.cache.paged_kv
from benchmarks.engines import demo
from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine import forward_check
from engine.cache.kv_formats import LEAST_SCALE, SCALE_BYTES, dequantize, head_bytes, quantize
from engine.cache.paged_kv import PagedKV
from engine.costs.limits import cache_size, predict_memory, read_shape
from engine.device import Device
from engine.fingerprint import numerics_class
from engine.forward_check import CHECK_CHUNKS, our_logits, typical_difference
from engine.kv_transfer import export_kv, import_kv, token_bytes
from engine.loading import prepare, round_kv
from engine.model import EngineModel
from engine.reuse.settings import ReuseSettings
from kvstore.encodings import Encodings
from kvstore.keys import Keyring
from pool.local_pool import LocalPool
from tests.engine.architectures import config_of, kernels_of
from tests.engine.harness import ask, ask_all, call_of, pair_config, random_prompts, shrink
from training.kv_profiles import make_profiles
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig, ModelConfig, TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams, Sharing, Token

CPU = torch.device("cpu")
STEP = 2.0**-4
READ = ReadSpec(logits=True)
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("speculative", {"length": "fixed", "draft_length": 3}),
    ("speculative", {"drafter": "model_tree"}),
]


def bytes_config(folder: Path, **engine: int) -> TurnoutConfig:
    """The pair with keys and values as bytes."""
    config = pair_config(folder, **engine)
    models = {name: model.model_copy(update={"kv_dtype": "int8"}) for name, model in config.models.items()}
    return config.model_copy(update={"models": models})


def engine_of(kv_dtype: Any = "int8", kernels: Any = "auto", **engine: int) -> EngineModel:
    """A small model of random weights."""
    checkpoint = prepare(random_model(llama_config(), 3, 0.2), kernels)
    round_kv(checkpoint, kv_dtype)
    settings = EngineConfig(**{"block_size": 4, "token_budget": 16, **engine})
    return EngineModel("m", checkpoint, ModelConfig(path="-", kv_memory_bytes=8 << 20), settings, Device("cpu"))


def of(tokens: list[int], **options: Any) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return Sequence(tokens, sampling, 1, sharing=Sharing.private("a"), **options)


class TestFormat:
    def test_by_hand(self) -> None:
        head = torch.tensor([127.0, -63.5, 0.5, 1.5, -2.4, 0.0]) * STEP
        kept = quantize(head)
        assert kept[:-SCALE_BYTES].tolist() == [127, -64, 0, 2, -2, 0]  # halves go to the even integer
        assert kept[-SCALE_BYTES:].clone().view(torch.float32).item() == STEP
        assert dequantize(kept, torch.float32).tolist() == [127 * STEP, -64 * STEP, 0.0, 2 * STEP, -2 * STEP, 0.0]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_every_head_has_a_scale_of_its_own_and_errs_by_half_a_step(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        pairs = (torch.randn(50, 2, 3, 20) * torch.logspace(-3, 2, 300).view(50, 2, 3, 1)).to(dtype)
        kept = quantize(pairs)
        assert kept.shape == (50, 2, 3, 20 + SCALE_BYTES)
        step = pairs.float().abs().amax(-1, keepdim=True) / 127
        error = (dequantize(kept, torch.float32) - pairs.float()).abs()
        assert (error <= step * 0.5001).all()
        assert torch.equal(quantize(pairs[7]), kept[7]), "a token's bytes do not depend on other tokens"

    def test_zeros_and_numbers_next_to_zero_are_zeros(self) -> None:
        for head in (torch.zeros(8), torch.full((8,), LEAST_SCALE / 4)):
            assert dequantize(quantize(head), torch.float32).tolist() == [0.0] * 8

    @pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
    def test_of_a_head_that_is_not_finite_nothing_is_a_number(self, broken: float) -> None:
        head = torch.ones(2, 8)
        head[0, 5] = broken
        read = dequantize(quantize(head), torch.float32)
        assert read[0].isnan().all()
        assert torch.equal(read[1], head[1])

    def test_auto_keeps_every_bit_and_copies_nothing(self) -> None:
        store = PagedKV(1, 8, 2, 4, torch.bfloat16, CPU)
        pairs = torch.randn(3, 2, 2, 4).bfloat16()
        store.write(0, torch.tensor([5, 1, 2]), pairs)
        assert torch.equal(store.layers[0][[5, 1, 2]], pairs)
        assert store.span(0, 1, 2).data_ptr() == store.layers[0][1].data_ptr()
        assert (store.dtype, store.head_dim, store.kv_dtype) == (torch.bfloat16, 4, "auto")

    def test_copies_of_blocks_and_slots_carry_scales(self) -> None:
        store = PagedKV(2, 16, 2, 4, torch.float32, CPU, "int8")
        pairs = torch.randn(4, 2, 2, 4) * torch.tensor([1.0, 10.0, 100.0, 0.1]).view(4, 1, 1, 1)
        for layer in range(2):
            store.write(layer, torch.arange(4), pairs)
        expected = store.span(0, 0, 4).clone()
        store.copy_block(0, 2, 4)
        store.write_blocks([1], 4, store.read_blocks([2], 4))
        store.move([4, 5, 6, 7], [12, 13, 14, 15])
        for layer in range(2):
            assert torch.equal(store.span(layer, 12, 4), expected)
            assert torch.equal(store.gather(layer, torch.tensor([3, 1]), 4), torch.cat([expected, expected]))


class TestMemory:
    def test_a_gigabyte_holds_about_twice_the_tokens(self) -> None:
        assert head_bytes("int8", 64, 2) == 68
        bf16, rounded = (PagedKV.slot_bytes(30, 3, 64, torch.bfloat16, kept) for kept in ("auto", "int8"))
        settings, limits = ModelConfig(path="-", kv_memory_bytes=1 << 30, max_length=16), EngineConfig(max_batch=9999)
        limits = limits.model_copy(update={"max_batch": 1 << 30})
        blocks = [cache_size("m", size, 1 << 20, settings, limits).num_blocks for size in (bf16, rounded)]
        assert blocks[1] / blocks[0] == pytest.approx(2 * 64 / 68, rel=1e-3)

    def test_what_is_predicted_is_what_is_taken_and_says_the_format(self, pair_folder: Path) -> None:
        config = bytes_config(pair_folder)
        _, shape = read_shape("large", config.models["large"])
        loaded = LocalPool.load("pair", config)
        for name, model in loaded.engines.items():
            store = model.store
            taken = sum(layer.nbytes for layer in store.layers)
            [needs] = predict_memory({name: config.models[name]}, config.engine).values()
            assert needs[0].cache == taken
            assert "of KV cache in int8" in str(needs[0])
        assert token_bytes(loaded.engines["large"]) == shape.kv_bytes_per_token
        asyncio.run(loaded.close())


class TestAnswers:
    @pytest.mark.parametrize("num_blocks", [None, 16])
    async def test_speculative_preempted_and_shared_answers_are_plain_ones(
        self, pair_folder: Path, num_blocks: int | None
    ) -> None:
        prompts = [[9, 8, 7, 6] * 3 + prompt for prompt in random_prompts(6, 14, seed=3)]
        alone = LocalPool.load("pair", bytes_config(pair_folder, block_size=4, token_budget=16))
        expected = [(await ask(alone, prompt)).ids for prompt in prompts]
        rounded = {model.store.kv_dtype for model in alone.engines.values()}
        await alone.close()
        assert rounded == {"int8"}
        loaded = LocalPool.load("pair", bytes_config(pair_folder, block_size=4, token_budget=16))
        for model in loaded.engines.values() if num_blocks else ():
            shrink(model, num_blocks)
        for method, params in [("plain", {}), *METHODS, *METHODS]:
            replies = await ask_all(loaded, [call_of(prompt, method, params) for prompt in prompts])
            assert [reply.ids for reply in replies] == expected, method
        for model in loaded.engines.values():
            model.pool.check_integrity()
        await loaded.close()

    async def test_cutting_a_prompt_changes_nothing_beyond_rounding(self) -> None:
        tokens = random_prompts(1, 40, seed=8)[0] + [1, 2, 3] * 9
        rows, kept = [], []
        for budget in (4, 16, 256):
            model = engine_of(token_budget=budget)
            seq = of(tokens)
            [read] = await model.extend(seq, want=READ)
            blocks = model.batcher.tables[seq].blocks
            assert read.logits is not None
            rows.append(read.logits)
            kept.append(model.store.read_blocks(blocks, 4)[:, : len(tokens)])
            model.release(seq)
            await model.close()
        for row, stored in zip(rows[1:], kept[1:], strict=True):
            # Sums in another order may take a number over the border between two integers.
            off = (stored[0, ..., :-SCALE_BYTES].int() - kept[0][0, ..., :-SCALE_BYTES].int()).abs()
            assert off.max() <= 1
            assert off.float().mean() < 1e-3
            torch.testing.assert_close(row, rows[0], atol=2e-3, rtol=0)

    @pytest.mark.parametrize("kernels", ["native", "plain"])
    async def test_a_prompt_in_one_piece_reads_what_is_kept_of_it(self, kernels: str) -> None:
        tokens, rows = random_prompts(1, 40, seed=8)[0] + [1, 2, 3] * 9, []
        for kv_dtype in ("auto", "int8"):
            model = engine_of(kv_dtype, kernels, token_budget=256)
            [row] = await model.extend(seq := of(tokens), want=READ)
            assert row.logits is not None
            rows.append(row.logits)
            model.release(seq)
            await model.close()
        assert (rows[0] - rows[1]).abs().max() > 0.01, "more than the 0.002 that cutting a prompt may change"

    async def test_a_fork_writes_to_its_own_blocks(self) -> None:
        model = engine_of()
        seq = of([5, 6, 7, 8, 9, 10])
        await model.extend(seq, want=READ)
        twin = model.fork(seq)
        for each, token in ((seq, 11), (twin, 12)):
            each.append(Token(token, "m"))
        ours, theirs = [(await model.extend(each, want=READ))[0].logits for each in (seq, twin)]
        for each, row in ((seq, ours), (twin, theirs)):
            fresh = engine_of()
            [again] = await fresh.extend(alone := of(list(each.tokens)), want=READ)
            assert again.logits is not None
            assert row is not None
            torch.testing.assert_close(row, again.logits, atol=2e-3, rtol=0)
            fresh.release(alone)
            model.release(each)
            await fresh.close()
        await model.close()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["gemma2", "qwen2_window", "llama_biased"])
    def test_models_with_windows_caps_and_narrow_heads_read_the_same_by_all_kernels(
        self, name: str, dtype: torch.dtype
    ) -> None:
        rows = []
        for kernels in kernels_of(name):
            checkpoint = prepare(random_model(config_of(name), 3, 0.2).to(dtype), kernels)
            round_kv(checkpoint, "int8")
            rows.append(our_logits(checkpoint.plan, CHECK_CHUNKS, checkpoint.vocab_size, CPU))
        for row in rows[1:]:
            assert typical_difference(row, rows[0], CHECK_CHUNKS) < (1e-3 if dtype == torch.float32 else 0.03)

    def test_text_becomes_hardly_less_likely(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "Question: 12 + 30 = ? Answer: 42. The quick brown fox jumps over the lazy dog, and then again. " * 2
        ids = torch.tensor(list(text.encode())[:160])
        monkeypatch.setattr(forward_check, "_check_ids", lambda vocab_size, count: ids[:count])
        losses = []
        for kv_dtype in ("auto", "int8"):
            checkpoint = prepare(demo("small").float())
            round_kv(checkpoint, kv_dtype)
            logits = forward_check.our_logits(checkpoint.plan, (64, 1, 95), checkpoint.vocab_size, CPU)
            losses.append(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).item())
        assert losses[0] != losses[1]
        assert abs(losses[1] - losses[0]) < 0.01


class TestExchange:
    async def test_what_is_moved_is_moved_with_its_scales_and_only_to_its_like(self) -> None:
        giver, taker, other = engine_of(), engine_of(), engine_of("auto")
        seq = of(random_prompts(1, 40, seed=5)[0] + [3] * 9)
        [before] = await giver.extend(seq, want=READ)
        kv = await export_kv(giver, seq)
        assert kv.dtype == torch.int8
        assert kv[0].nbytes * 2 == len(seq) * token_bytes(giver)
        moved = of(list(seq.tokens))
        assert await import_kv(taker, moved, 0, kv) == (len(seq) - 1) // 4 * 4
        [after] = await taker.extend(moved, want=READ)
        assert before.logits is not None
        assert after.logits is not None
        torch.testing.assert_close(after.logits, before.logits, atol=2e-3, rtol=0)
        with pytest.raises(ValueError, match=r"moved KV is torch\.int8"):
            await import_kv(other, of(list(seq.tokens)), 0, kv)
        for model, each in ((giver, seq), (taker, moved)):
            model.release(each)
        for model in (giver, taker, other):
            await model.close()

    def test_stores_know_them_apart_and_write_no_lossy_codec(self) -> None:
        layouts = [engine_of(kept).layout({"weights": "w"}) for kept in ("auto", "int8")]
        assert layouts[0].fingerprint_parts != layouts[1].fingerprint_parts
        assert layouts[1].dtype == torch.int8
        assert layouts[1].token_bytes < layouts[0].token_bytes / 2
        keyring = Keyring(bytes(32))
        encodings = [Encodings(keyring, layout, ["raw"]) for layout in layouts]
        assert encodings[0].fingerprint != encodings[1].fingerprint
        with pytest.raises(TurnoutError, match="fp8: a model with kv_dtype int8 is stored exactly") as caught:
            Encodings(keyring, layouts[1], ["raw", "fp8"])
        assert caught.value.field == "kvstore.codecs"

    def test_processes_that_read_other_numbers_are_of_another_class(self) -> None:
        plain = numerics_class("native", CPU)
        assert numerics_class("native", CPU, "auto") == plain
        assert numerics_class("native", CPU, "int8") == f"{plain} kv-int8"


class TestRefusals:
    def test_a_backend_without_kernels_is_named(self) -> None:
        checkpoint = prepare(random_model(llama_config(), 3))
        checkpoint.plan.backend.kv_dtypes = ("auto",)  # type: ignore[misc]
        with pytest.raises(TurnoutError, match=r"'int8' needs engine\.kernels native, torch or plain") as caught:
            round_kv(checkpoint, "int8", "models.m.kv_dtype")
        assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "models.m.kv_dtype")
        assert checkpoint.plan.kv_dtype == "auto"

    def test_spans_of_other_prompts_are_not_taken_over(self) -> None:
        with pytest.raises(TurnoutError, match="needs kv_dtype auto"):
            engine_of().reuse(ReuseSettings())

    def test_a_model_over_several_processes_keeps_its_numbers(self) -> None:
        with pytest.raises(ValueError, match="'int8' needs tensor_parallel 1; allowed here: auto"):
            ModelConfig(path="-", kv_dtype="int8", tensor_parallel=2)

    async def test_codecs_are_not_fitted_to_bytes(self, pair_folder: Path) -> None:
        loaded = LocalPool.load("pair", bytes_config(pair_folder))
        with pytest.raises(TurnoutError, match="'int8': profiles are of a model's own numbers") as caught:
            await make_profiles(loaded, ["?"] * 8, SamplingParams(max_tokens=1), 0)
        await loaded.close()
        assert caught.value.field in {"models.small.kv_dtype", "models.large.kv_dtype"}

    def test_wrong_scales_are_found_at_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return dequantize(stored, dtype) * 2

        checkpoint = prepare(random_model(llama_config(), 3, 0.2), "plain")
        monkeypatch.setattr(engine.cache.paged_kv, "dequantize", wrong)
        with pytest.raises(TurnoutError, match="over keys and values in int8 differs by"):
            round_kv(checkpoint, "int8")
