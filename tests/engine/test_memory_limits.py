"""Models that do not fit are refused before loading, sequences that do not fit before serving."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
from safetensors.torch import load_file, save_file

import pool.local_pool
from engine.backends.base import Kernels
from engine.backends.native import library as native
from engine.backends.native.stack import NativeStack
from engine.costs import limits
from engine.costs.limits import (
    MemoryNeed,
    available_memory,
    cache_size,
    check_memory,
    count_parameters,
    peak_bytes,
    staging_bytes,
)
from engine.costs.machine import available_bytes, memory_bytes
from engine.costs.weight_sizes import weight_sizes
from engine.device import Device
from engine.loading import prepare
from engine.model import EngineModel
from pool import member_loading
from pool.local_pool import LocalPool
from pool.member_loading import Ranks
from tests.engine.harness import CPU, pair_config
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.config import EngineConfig, ModelConfig, PoolConfig, TurnoutConfig
from turnout.errors import Code, TurnoutError

MIB = 1 << 20
ENGINE = EngineConfig(block_size=16, max_batch=4)


def changed(config: TurnoutConfig, name: str, **fields: object) -> TurnoutConfig:
    model = config.models[name].model_copy(update=fields)
    return config.model_copy(update={"models": {**config.models, name: model}})


def test_parameters_are_counted_from_the_headers(pair_folder: Path) -> None:
    expected = random_model(llama_config(num_hidden_layers=3), seed=0).num_parameters()
    assert count_parameters(pair_folder / "large") == expected


def test_parameters_of_a_sharded_checkpoint_add_up(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.zeros(2, 2, 2, dtype=torch.bfloat16)}, tmp_path / "model-00002-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards | {"b": shards["a"]}}))
    assert count_parameters(tmp_path) == 15 + 7 + 8
    # Mistral's own form of the same weights, which transformers does not read.
    save_file({"a": torch.zeros(3, 5)}, tmp_path / "consolidated.safetensors")
    assert count_parameters(tmp_path) == 15 + 7 + 8


@pytest.mark.parametrize("content", [b"no header at all", b"\x04\0\0\0\0\0\0\0nope"])
def test_a_file_that_is_no_checkpoint_is_said_plainly(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(TurnoutError, match=r"model\.safetensors is not a safetensors file"):
        count_parameters(tmp_path)


ANGLES = 1025 * 2 * 16 * 4  # cosine and sine of every position, and of 1,024 at least; frequencies


def needed(folder: Path, name: str) -> int:
    """Weights, KV and angles of a member of `pair_config`, by hand: float32; 64 sequences of 512 tokens at most."""
    layers = {"small": 2, "large": 3}[name]
    slot = 2 * layers * 2 * 16 * 4
    cache = min(8 * MIB // (16 * slot), 64 * 32) * 16 * slot
    # Of the 261 columns of the head, which is the embedding too, panels of 32 are made; norms are held once more.
    packed = 4 * 9 * 32 * 64 + 4 * (2 * layers * (64 + 16) + 64)
    return 4 * count_parameters(folder / name) + packed + cache + ANGLES


def test_a_model_beyond_its_limit_is_refused_before_loading(pair_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pair_config(pair_folder)
    exact = needed(pair_folder, "large")
    check_memory(changed(config, "large", memory_limit_bytes=exact).models, config.engine)
    monkeypatch.setattr(pool.local_pool, "load_checkpoint", lambda *_: pytest.fail("loaded before the check"))
    with pytest.raises(TurnoutError) as refusal:
        LocalPool.load("pair", changed(config, "large", memory_limit_bytes=exact - 1))
    assert refusal.value.code is Code.INVALID_ARGUMENT
    assert refusal.value.field == "models.large.memory_limit_bytes"
    for part in ("large: ", "of weights", "8.0 MiB of KV cache", "kv_memory_bytes", "dtype bfloat16", "smaller model"):
        assert part in refusal.value.message


def test_members_must_fit_into_the_machine_together(pair_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pair_config(pair_folder)
    both = needed(pair_folder, "small") + needed(pair_folder, "large")
    monkeypatch.setattr(limits, "_claims", WeakKeyDictionary())  # pools of other tests
    monkeypatch.setattr(limits, "memory_bytes", lambda device: both)
    check_memory(config.models, config.engine)
    monkeypatch.setattr(limits, "memory_bytes", lambda device: both - 1)
    with pytest.raises(TurnoutError, match=r"small: .* of weights.*large: .* of weights"):
        check_memory(config.models, config.engine)


def test_the_pool_takes_no_more_than_was_checked(pair_folder: Path) -> None:
    config = pair_config(pair_folder)
    pool = LocalPool.load("pair", config)
    for name, model in pool.engines.items():
        cache = sum(layer.nbytes for layer in model.store.layers)
        assert 0 <= needed(pair_folder, name) - (cache + 4 * model.num_parameters + ANGLES) < 80_000


@pytest.fixture(scope="module", autouse=True)
def kept_checkpoints() -> None:
    """Here no checkpoint stays in memory."""


@pytest.fixture(scope="module", autouse=True)
def given_step_times() -> None:
    """Here models are measured, as where they serve: what a forward keeps counts."""


def held_bytes() -> int:
    """Memory of all tensors there are, each storage once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) not in (torch.Tensor, torch.nn.Parameter) or each.device.type != "cpu":
            continue
        if each.is_mkldnn:  # packed by torch
            storages[id(each)] = each.nelement() * each.element_size()
        elif each.layout is torch.strided:  # others are not a model's
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_what_is_counted_bounds_what_loading_takes(tmp_path: Path, tied: bool, dtype: str, kernels: Kernels) -> None:
    config = llama_config(2000, hidden_size=128, intermediate_size=256, pad_token_id=0, tie_word_embeddings=tied)
    random_model(config, seed=0).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), dtype=dtype, kv_memory_bytes=1 << 20)
    engine = EngineConfig(block_size=16, max_batch=4, kernels=kernels)
    whole = TurnoutConfig(models={"m": settings}, pools={"p": PoolConfig(small="m", large="m")}, engine=engine)
    counted = check_memory(whole.models, engine)["cpu"]
    before = held_bytes()
    pool = LocalPool.load("p", whole)
    stack = pool.engines["m"].batcher.runner.plan.stack
    if isinstance(stack, NativeStack):
        stack._space._buffers.clear()  # what a forward needs is not counted
    taken = held_bytes() - before
    assert 0.8 * counted < taken <= counted
    asyncio.run(pool.close())


def test_what_the_process_has_loaded_counts_until_it_is_closed(
    pair_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pair_config(pair_folder)
    both = needed(pair_folder, "small") + needed(pair_folder, "large")
    monkeypatch.setattr(limits, "_claims", WeakKeyDictionary())
    monkeypatch.setattr(limits, "memory_bytes", lambda device: 2 * both - 1)
    first = LocalPool.load("pair", config)
    with pytest.raises(TurnoutError, match=r"of memory, of which this process holds 17\.\d MiB"):
        LocalPool.load("pair", config)
    asyncio.run(first.close())
    asyncio.run(LocalPool.load("pair", config).close())


def test_a_share_of_a_split_model_is_checked_too(pair_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pair_config(pair_folder)
    whole = check_memory({"large": config.models["large"]}, config.engine)["cpu"]
    share = check_memory({"large": config.models["large"]}, config.engine, ranks=2)["cpu"]
    assert whole == needed(pair_folder, "large")
    monkeypatch.setattr(member_loading, "_set_threads", lambda *_: None)
    limited = changed(config, "large", memory_limit_bytes=share - 1)
    leader, follower = (Ranks(rank, 2, "127.0.0.1", 1, 1.0) for rank in (0, 1))
    with pytest.raises(TurnoutError, match=r"models\.large\.memory_limit_bytes"):
        member_loading.load_member("large", "pair", limited, ranks=leader)
    with pytest.raises(TurnoutError, match=r"models\.large\.memory_limit_bytes"):
        member_loading.follow_leader("large", limited, follower)


def test_weights_that_torch_has_pickled_count_as_well(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = random_model(llama_config(), seed=0)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(model.state_dict(), tmp_path / "training_args.bin")
    assert count_parameters(tmp_path) == model.num_parameters()
    tied = {"embed": torch.zeros(4, 5)}
    torch.save({**tied, "head": tied["embed"]}, tmp_path / "pytorch_model.bin")
    assert count_parameters(tmp_path) == 20


def test_a_folder_without_weights_that_can_be_counted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TurnoutError, match="has no weights: neither"):
        count_parameters(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing of the kind")
    with pytest.raises(TurnoutError, match=r"pytorch_model\.bin is not a whole weight file of torch"):
        count_parameters(tmp_path)


def test_what_is_found_while_loading_is_noted(pair_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pair_config(pair_folder)
    pool = LocalPool.load("pair", config)
    assert pool.notes == []
    asyncio.run(pool.close())
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    native._find.cache_clear()
    try:
        for _ in range(2):  # the log says it once, every pool has it
            pool = LocalPool.load("pair", changed(config, "large", kv_memory_bytes=1 << 18))
            slow, short = pool.notes
            assert "no C++ compiler found" in slow
            assert "install g++" in slow
            assert short.startswith("large: sequences are limited to 336 of the 512 tokens")
            asyncio.run(pool.close())
    finally:
        native._find.cache_clear()


# One token of the model below takes 2 x 2 layers x 2 heads x 16 x 4 bytes = 512 bytes, a block of 16 8 KiB.
SLOT = 512


def settings(kv: int, max_length: int | None = None) -> ModelConfig:
    return ModelConfig(path="-", kv_memory_bytes=kv, max_length=max_length)


def test_a_cache_too_small_for_the_configured_length_is_refused() -> None:
    assert cache_size("m", SLOT, 8192, settings(2 * MIB, 4096), ENGINE).max_length == 4096
    with pytest.raises(TurnoutError) as refusal:
        cache_size("m", SLOT, 8192, settings(2 * MIB, 4097), ENGINE)
    assert refusal.value.field == "models.m.kv_memory_bytes"
    assert "hold 4096 tokens" in refusal.value.message
    assert f"at least {257 * 16 * SLOT}" in refusal.value.message


def test_a_length_beyond_the_checkpoints_positions_is_refused() -> None:
    with pytest.raises(TurnoutError, match="4096 is beyond the checkpoint's 2048 positions") as refusal:
        cache_size("m", SLOT, 2048, settings(64 * MIB, 4096), ENGINE)
    assert refusal.value.field == "models.m.max_length"


def test_a_cache_without_a_single_block_is_refused() -> None:
    with pytest.raises(TurnoutError, match=r"one sequence of 16 tokens needs at least 33554432$"):
        cache_size("m", 2 * MIB, 2048, settings(1 * MIB), ENGINE)


def test_the_pool_is_no_larger_than_a_full_batch_needs() -> None:
    size = cache_size("m", SLOT, 1000, settings(64 * MIB), ENGINE)
    assert (size.num_blocks, size.max_length) == (4 * 63, 1000)


@pytest.mark.parametrize(("positions", "warned"), [(16384, False), (16400, True)])
def test_positions_beyond_the_cache_are_cut_with_a_warning(
    caplog: pytest.LogCaptureFixture, positions: int, warned: bool
) -> None:
    checkpoint = prepare(random_model(llama_config(max_position_embeddings=positions), seed=0))
    with caplog.at_level(logging.WARNING):
        model = EngineModel("m", checkpoint, settings(8 * MIB), ENGINE, Device("cpu"))
    assert model.max_length == 16384
    said = [record.getMessage() for record in caplog.records if "kv_memory_bytes" in record.getMessage()]
    assert bool(said) is warned
    if warned:
        assert "16384 of the 16400" in said[0]
        assert str(16400 * SLOT) in said[0]


def test_memory_is_what_the_control_group_leaves(tmp_path: Path) -> None:
    whole = memory_bytes(CPU, tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    here = tmp_path / "sys/fs/cgroup/jobs/mine"
    here.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    (here / "memory.max").write_text("max\n")
    assert memory_bytes(CPU, tmp_path) == whole
    (here.parent / "memory.max").write_text(f"{300 * MIB}\n")
    assert memory_bytes(CPU, tmp_path) == 300 * MIB, "a group above limits too"
    (here / "memory.max").write_text(f"{200 * MIB}\n")
    assert memory_bytes(CPU, tmp_path) == 200 * MIB


def test_memory_is_what_an_old_control_group_leaves(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    here = tmp_path / "sys/fs/cgroup/memory/job"
    here.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    (here / "memory.limit_in_bytes").write_text(f"{100 * MIB}\n")
    assert memory_bytes(CPU, tmp_path) == 100 * MIB


def test_available_memory_is_what_the_control_group_has_left(tmp_path: Path) -> None:
    """A group's limit less its usage, of which files that can be read again do not count."""
    whole = available_bytes(CPU, tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    here = tmp_path / "sys/fs/cgroup/mine"
    here.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/mine\n")
    (here / "memory.max").write_text("max\n")
    assert available_bytes(CPU, tmp_path) >= whole / 2
    (here / "memory.max").write_text(f"{100 * MIB}\n")
    (here / "memory.current").write_text(f"{90 * MIB}\n")
    assert available_bytes(CPU, tmp_path) == 10 * MIB
    (here / "memory.stat").write_text(f"anon 5\nshmem 7\ninactive_file {20 * MIB}\nactive_file {MIB}\n")
    assert available_bytes(CPU, tmp_path) == 31 * MIB
    old = tmp_path / "sys/fs/cgroup/memory"
    old.mkdir()
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/\n")
    (old / "memory.limit_in_bytes").write_text(f"{50 * MIB}\n")
    (old / "memory.usage_in_bytes").write_text(f"{60 * MIB}\n")
    (old / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {15 * MIB}\n")
    assert available_bytes(CPU, tmp_path) == 5 * MIB


def test_more_than_is_available_now_is_refused_before_loading(
    pair_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pair_config(pair_folder)
    both = needed(pair_folder, "small") + needed(pair_folder, "large")
    monkeypatch.setattr(limits, "_claims", WeakKeyDictionary())
    monkeypatch.setattr(limits, "available_bytes", lambda device: both)
    check_memory(config.models, config.engine)
    monkeypatch.setattr(limits, "available_bytes", lambda device: both - 1)
    monkeypatch.setattr(pool.local_pool, "load_checkpoint", lambda *_: pytest.fail("loaded before the check"))
    with pytest.raises(TurnoutError) as refusal:
        LocalPool.load("pair", config)
    assert (refusal.value.code, refusal.value.field) == (Code.INVALID_ARGUMENT, "models.large")
    sizes = f"loading takes up to {both / MIB:,.1f} MiB, and {(both - 1) / MIB:,.1f} MiB of memory are available now"
    for part in (
        sizes,
        "8.0 MiB of KV cache",
        "0.0 MiB while weights are read",
        "less kv_memory_bytes, dtype bfloat16",
    ):
        assert part in refusal.value.message
    assert "\n" not in refusal.value.message


def test_what_was_promised_and_not_touched_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = limits.psutil.Process().memory_info().rss
    monkeypatch.setattr(limits, "_claims", WeakKeyDictionary())
    monkeypatch.setattr(limits, "available_bytes", lambda device: 1 << 50)
    owner = EngineConfig
    limits.claim(owner, {"cpu": resident + (1 << 40)})
    assert available_memory("cpu") == pytest.approx((1 << 50) - (1 << 40), abs=1 << 30)
    assert available_memory("cuda") == 1 << 50


def test_the_peak_is_while_loading_or_afterwards() -> None:
    first = MemoryNeed("a", "float32", weights=100, cache=10, angles=1, loading=50, on_cpu=True)
    second = replace(first, name="b", weights=200, loading=5)
    assert peak_bytes([first]) == 150, "its weights and the making of them"
    assert peak_bytes([first, second]) == 322, "all of both, afterwards"
    assert peak_bytes([first, replace(second, loading=30)]) == 330, "caches are made when all are loaded"
    assert peak_bytes([replace(first, on_cpu=False)]) == 111
    assert staging_bytes([first, second]) == 205


def test_loading_onto_a_gpu_takes_memory_of_the_machine(pair_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed(pair_config(pair_folder), "large", device="cuda")
    monkeypatch.setattr(limits, "memory_bytes", lambda device: 1 << 40)
    weights = 4 * count_parameters(pair_folder / "large")
    monkeypatch.setattr(limits, "available_bytes", lambda device: 1 << 40 if device.type == "cuda" else weights)
    check_memory({"large": config.models["large"]}, config.engine)
    monkeypatch.setattr(limits, "available_bytes", lambda device: 1 << 40 if device.type == "cuda" else weights - 1)
    with pytest.raises(TurnoutError, match="of memory of the machine, through which it is loaded, are available now"):
        check_memory({"large": config.models["large"]}, config.engine)


def test_weights_that_are_cast_count_twice_until_they_are_packed(pair_folder: Path) -> None:
    """The pair is stored in float32: four tensors at once, and what is cast of all of them."""
    sizes = weight_sizes(pair_folder / "large", torch.bfloat16)
    counts = [tensor.numel() for tensor in load_file(pair_folder / "large" / "model.safetensors").values()]
    assert sizes.num_parameters == sum(counts)
    assert sizes.cast_bytes == 2 * sum(counts)
    assert sizes.loading_bytes == 4 * sum(sorted(counts)[-4:])
    assert weight_sizes(pair_folder / "large", torch.float32) == replace(sizes, cast_bytes=0, loading_bytes=0)


def test_the_header_format_is_the_one_on_disk(pair_folder: Path) -> None:
    raw = (pair_folder / "small" / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    stored = sum(end - start for start, end in (v["data_offsets"] for k, v in header.items() if k != "__metadata__"))
    assert stored == 4 * count_parameters(pair_folder / "small")
