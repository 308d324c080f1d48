"""The deployment planner against hand-computed numbers, and the shapes it is driven by against real models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.costs.limits import cache_size, predict_memory
from engine.costs.machine import available_bytes, measure_machine, memory_bytes
from engine.costs.resources import Machine, ModelShape, Planner, Request, Session
from engine.costs.weight_sizes import weight_sizes
from tests.engine.architectures import CONFIGS, config_of
from tests.engine.harness import CPU
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig, ModelConfig
from turnout.errors import Code, TurnoutError

GIB = 1 << 30
# The running example of seed 220: 34 B parameters, 60 layers, 8 KV heads of 128, bfloat16, one A100 of 80 GB.
YI_34B = ModelShape(60, 7168, 56, 8, 128, 64000, 34_400_000_000, False, 2)
A100 = Machine(80 * GIB, 2e12, 20e9, 312e12)
PLANNER = Planner(YI_34B, A100)


def test_kv_cache_of_the_running_example() -> None:
    assert YI_34B.kv_bytes_per_token == 245_760
    assert PLANNER.kv_bytes(4096) / GIB == pytest.approx(0.94, abs=0.005)
    assert PLANNER.kv_bytes(50_000) / GIB == pytest.approx(11.44, abs=0.005)
    assert PLANNER.kv_bytes(100_000) / GIB == pytest.approx(22.9, abs=0.02)


def test_the_four_terms_of_the_running_example() -> None:
    # 80 GiB - 68.8 GB of weights = 17.1 GB: one cache of 12.3 GB, or 16 of 1.007 GB.
    assert PLANNER.users(50_000) == 1
    assert PLANNER.users(4096) == 16
    assert PLANNER.users(100_000) == 0
    body = 34.4e9 - 2 * 64000 * 7168
    flops = 2 * body * 50_000 + 2 * 64000 * 7168 + 4 * 60 * 56 * 128 * 50_000 * 50_001 / 2
    assert PLANNER.prefill_s(50_000) == pytest.approx(flops / 312e12)
    read = 2 * (34.4e9 - 64000 * 7168)
    assert PLANNER.decode_s(50_000) == pytest.approx((read + 12.288e9) / 2e12)
    assert PLANNER.decode_s(4096, users=10) == pytest.approx((read + 10 * 245_760 * 4096) / 2e12)
    assert PLANNER.switch_s(50_000) == pytest.approx(12.288e9 / 20e9)


def test_every_term_grows_with_the_context() -> None:
    for shorter, longer in ((1, 2), (4096, 8192), (50_000, 50_001)):
        assert PLANNER.kv_bytes(shorter) < PLANNER.kv_bytes(longer)
        assert PLANNER.users(shorter) >= PLANNER.users(longer)
        assert PLANNER.prefill_s(shorter) < PLANNER.prefill_s(longer)
        assert PLANNER.decode_s(shorter) < PLANNER.decode_s(longer)
        assert PLANNER.switch_s(shorter) < PLANNER.switch_s(longer)


def test_compression_of_the_cache_cuts_three_terms_of_four() -> None:
    half = Planner(YI_34B, A100, kv_fraction=0.5)
    assert half.users(4096) in (32, 33)
    assert half.switch_s(50_000) == PLANNER.switch_s(50_000) / 2
    assert PLANNER.decode_s(50_000) - half.decode_s(50_000) == pytest.approx(12.288e9 / 2 / 2e12)
    assert half.prefill_s(50_000) == PLANNER.prefill_s(50_000)
    # Fewer KV heads are such a compression.
    grouped = Planner(replace(YI_34B, kv_heads=4), A100)
    assert grouped.switch_s(50_000) == half.switch_s(50_000)


def test_sessions_of_users_who_fit_need_no_switching() -> None:
    session = Session(turns=3, prompt=100, output=200, think_s=0.0)
    longest = 4096 + 3 * 300
    fitting = PLANNER.users(longest)
    extend = YI_34B.flops(100, 100 * longest, 1) / A100.flops_per_s
    turn = fitting * extend + 200 * PLANNER.decode_s(longest, fitting)
    expected = fitting * PLANNER.prefill_s(4096) + 3 * turn
    assert PLANNER.sessions_s(fitting, 4096, session) == pytest.approx(expected)
    switching = 3 * 2 * 2 * fitting * PLANNER.switch_s(longest)
    doubled = PLANNER.sessions_s(2 * fitting, 4096, session)
    assert doubled == pytest.approx(2 * expected + switching)


def test_thinking_users_wait_for_nobody_when_all_fit() -> None:
    busy, idle = (Session(turns=3, prompt=100, output=200, think_s=think) for think in (0.0, 60.0))
    # Two pauses between three turns.
    assert PLANNER.sessions_s(2, 4096, idle) - PLANNER.sessions_s(2, 4096, busy) == pytest.approx(120.0)


def test_sessions_that_never_fit_are_refused() -> None:
    with pytest.raises(TurnoutError, match="100300 tokens does not fit") as refusal:
        PLANNER.sessions_s(1, 100_000, Session(1, 100, 200, 0.0))
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED


def test_flops_and_bytes_of_a_request_are_those_of_its_steps() -> None:
    shape = ModelShape(2, 8, 2, 1, 4, 10, 300, True, 4)
    request = Request(prompt=5, output=4)
    # Prefill of 5, then 3 single tokens; rows are read after the prompt and after each.
    steps = [(5, 15, 0)] + [(1, length, length - 1) for length in (6, 7, 8)]
    assert request.flops(shape) == sum(shape.flops(fed, seen, 1) for fed, seen, _ in steps)
    assert request.bytes_moved(shape) == sum(shape.bytes_moved(fed, read) for fed, _, read in steps)
    # By hand: body 300 - 80, head 80; one token that sees 6 positions.
    assert shape.flops(1, 6, 1) == 2 * 220 + 2 * 80 + 4 * 2 * 2 * 4 * 6
    assert shape.bytes_moved(1, 5) == 4 * 300 + (5 + 1) * 2 * 2 * 1 * 4 * 4


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_shape_of_every_architecture_is_that_of_its_weights(name: str) -> None:
    config = config_of(name)
    model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.of(model.config, model.num_parameters(), 4)
    embeddings = {id(w): w.numel() for w in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    assert shape.body_parameters == model.num_parameters() - sum(embeddings.values())
    cache = model(torch.tensor([[1, 2, 3]])).past_key_values
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert 3 * shape.kv_bytes_per_token == stored


def test_flops_agree_with_those_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = random_model(llama_config(), seed=0)
    model.config._attn_implementation = "eager"
    length = 24
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.arange(length)[None], use_cache=False)
    shape = ModelShape.of(model.config, model.num_parameters(), 4)
    # The plain forward computes the whole square of scores; norms and rotations are no matrix products.
    assert counter.get_total_flops() == pytest.approx(shape.flops(length, length * length, length), rel=0.01)


def test_the_machine_is_measured() -> None:
    machine = measure_machine(torch.float32, CPU)
    assert machine.memory_bytes == memory_bytes(CPU)
    assert min(machine.read_bytes_per_s, machine.copy_bytes_per_s, machine.flops_per_s) > 0.0


def test_what_torch_keeps_of_a_gpu_for_reuse_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert available_bytes(torch.device("cuda")) == 70


def test_a_share_of_a_split_model_is_cast_and_not_packed(pair_folder: Path) -> None:
    """What is cast is then what is kept."""
    models = {"m": ModelConfig(path=str(pair_folder / "large"))}  # bfloat16 of float32
    loading = [predict_memory(models, EngineConfig(kernels="auto"), ranks)["cpu"][0].loading for ranks in (1, 2)]
    sizes = weight_sizes(pair_folder / "large", torch.bfloat16)
    assert loading == [sizes.loading_bytes + sizes.cast_bytes, sizes.loading_bytes]


def test_a_model_without_layers_or_heads_is_refused() -> None:
    with pytest.raises(TurnoutError, match=r"^models\.m\.path: config\.json: numbers of layers and heads"):
        cache_size("m", 0, 512, ModelConfig(path="-"), EngineConfig())
