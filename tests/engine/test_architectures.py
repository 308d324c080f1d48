"""Every supported architecture against the plain Hugging Face forward, in mixed ragged batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine import loading
from engine.attention.layout import lay_out
from engine.attention.sdpa import SdpaStep
from engine.attention.step import Scores
from engine.backends.base import Kernels
from engine.backends.llama_fused import LeanLayer
from engine.backends.native.stack import NativeLayer
from engine.forward_check import CHECK_TOLERANCE, EXPERT_CHUNKS, difference, typical_difference
from engine.loaded_model import check_supported
from engine.loading import prepare
from tests.engine.architectures import CONFIGS, TOLERANCE, assert_equals_plain_forward, config_of, kernels_of
from tests.engine.harness import engine_model, random_prompts, twins
from training.random_models import llama_config, random_model
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams


@pytest.mark.parametrize(("name", "kernels"), [(name, kernels) for name in CONFIGS for kernels in kernels_of(name)])
async def test_tokens_and_logits_equal_the_plain_forward_in_a_ragged_batch(name: str, kernels: Kernels) -> None:
    await assert_equals_plain_forward(name, kernels, "cpu")


@pytest.mark.parametrize("name", CONFIGS)
def test_queries_are_those_that_attention_gets(name: str) -> None:
    given: dict[int, torch.Tensor] = {}

    class Watched(SdpaStep):
        def attend(self, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
            given[layer] = query * scores.scaling
            return super().attend(layer, query, pairs, scores)

    plan = prepare(random_model(config_of(name), seed=3, spread=0.2), "plain").plan
    layout = lay_out(list(range(3, 15)), [12], [0], [np.zeros(1, dtype=np.int32)], 16, {})
    with torch.inference_mode():
        step = Watched(layout, plan.cache(16, plan.device))
        _, states = plan.stack.hidden(layout, step, frozenset(range(plan.num_layers)))
        for layer, hidden in states.items():
            queries = plan.stack.queries(layer, hidden, torch.arange(12))
            if queries is not None:
                torch.testing.assert_close(queries, given[layer], atol=1e-5, rtol=0)
    assert sorted(given) == list(range(plan.num_layers))


@pytest.mark.parametrize("dtype", [torch.float64])
def test_weights_of_a_dtype_without_kernels_are_refused_by_name(dtype: torch.dtype) -> None:
    """Over native kernels a forward of them ended the process."""
    named = f"weights in {str(dtype)[6:]} are not supported; supported: float32, bfloat16, float16"
    with pytest.raises(TurnoutError, match=named) as caught:
        prepare(random_model(config_of("llama"), seed=3).to(dtype))
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "dtype")


@pytest.mark.parametrize("kind", ["ctrl", "opt", "mamba", "bloom"])
def test_unsupported_architectures_are_refused_by_name(kind: str) -> None:
    with pytest.raises(TurnoutError, match=f"'{kind}' is not supported: .*; supported: cohere2") as caught:
        check_supported(AutoConfig.for_model(kind))
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.field == "model"


def test_rotary_scaling_by_length_of_one_layer_type_is_refused() -> None:
    full = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = config_of("gemma3_text")
    config.rope_parameters = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": full}
    with pytest.raises(
        TurnoutError, match=r"rotary scaling by kind of layer \(default, dynamic\) is not supported \(gemma3_text\)"
    ):
        check_supported(config)


def test_what_a_file_says_of_a_configuration_is_refused() -> None:
    config = config_of("smollm3", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(TurnoutError, match="no_rope_layers has 2 entries, and must have one for each of 3 layers"):
        check_supported(config)


def test_bidirectional_attention_is_refused() -> None:
    config = config_of("gemma3_text")
    config.use_bidirectional_attention = True
    with pytest.raises(TurnoutError, match="bidirectional"):
        check_supported(config)


def wrong_scaling(layer: LeanLayer) -> None:
    layer.scores = Scores(layer.scores.scaling * 1.2)


def wrong_window(layer: LeanLayer) -> None:
    layer.scores = Scores(layer.scores.scaling, window=8)


def broken_weight(layer: LeanLayer) -> None:
    layer.down = torch.nn.Sequential(layer.down, torch.nn.Threshold(torch.inf, 0.0))


def swapped_norms(layer: LeanLayer) -> None:
    layer.before_attention.variance_epsilon = 0.5


def native_scaling(layer: NativeLayer) -> None:
    layer.struct.scores.scale *= 1.2


def native_window(layer: NativeLayer) -> None:
    layer.struct.scores.window = 8


def native_weight(layer: NativeLayer) -> None:
    layer.struct.down = layer.struct.out


def native_norms(layer: NativeLayer) -> None:
    layer.struct.before_mlp = layer.struct.before_attention
    layer.struct.before_attention = layer.struct.qkv.panels


FAULTS = {
    LeanLayer: [wrong_scaling, wrong_window, broken_weight, swapped_norms],
    NativeLayer: [native_scaling, native_window, native_weight, native_norms],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind, faults in FAULTS.items() for fault in faults])
def test_the_load_check_catches_a_planted_fault(
    kind: Any, fault: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = kind.__init__
    kernels: Kernels = "torch" if kind is LeanLayer else "native"
    made: list[Any] = []

    def planted(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self)
        if len(made) == 2:
            fault(self)

    prepare(random_model(config_of("llama"), seed=3, spread=0.2).to(dtype), kernels)
    monkeypatch.setattr(kind, "__init__", planted)
    with pytest.raises(TurnoutError, match="llama: our forward differs from the plain one") as caught:
        prepare(random_model(config_of("llama"), seed=3, spread=0.2).to(dtype), kernels)
    assert caught.value.code is Code.INTERNAL


def test_what_the_plain_forward_rounds_more_than_ours_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECK_TOLERANCE, torch.bfloat16, 1e-4)
    exact = random_model(config_of("llama"), seed=3, spread=0.2).eval()

    def rounded() -> Any:
        return random_model(config_of("llama"), seed=3, spread=0.2).to(torch.bfloat16)

    with pytest.raises(TurnoutError, match="differs from the plain one"):
        prepare(rounded())
    with pytest.raises(TurnoutError, match="differs from the plain one"):
        prepare(rounded(), exact=lambda: None)  # it does not fit into memory
    prepare(rounded(), exact=lambda: exact)
    ours = loading.our_logits
    monkeypatch.setattr(loading, "our_logits", lambda *args: ours(*args).roll(1, 0))
    with pytest.raises(TurnoutError, match="differs from the plain one"):
        prepare(rounded(), exact=lambda: exact)


def test_a_difference_does_not_grow_with_the_vocabulary_and_no_wrong_row_or_logit_is_averaged_away() -> None:
    generator = torch.Generator().manual_seed(7)
    for vocab_size in (500, 150_000):
        expected = torch.randn(24, vocab_size, generator=generator) * 3
        rounded = expected + torch.randn(24, vocab_size, generator=generator) * 3 * 0.05
        assert difference(rounded, expected) == pytest.approx(0.05, rel=0.15)
        rounded[3, 5] = expected[3, 5] + 3 * 2.0
        assert difference(rounded, expected) == pytest.approx(2.0 / 8, rel=0.01)
        rounded[17] = expected[16]
        assert difference(rounded, expected) == pytest.approx(2**0.5, rel=0.15)
        assert typical_difference(rounded, expected, EXPERT_CHUNKS) == pytest.approx(0.05, rel=0.15)
        for first, rows in ((0, 9), (19, 5)):  # most of those fed together, and of those fed alone
            faulty = rounded.clone()
            faulty[first : first + rows] = expected[first : first + rows].roll(1, 0)
            assert typical_difference(faulty, expected, EXPERT_CHUNKS) > 1.0
        rounded[3, 5] = torch.nan
        assert not typical_difference(rounded, expected, EXPERT_CHUNKS) <= 1.0


def rounded_experts(seed: int) -> Any:
    """A model in bfloat16 of which rounding chooses some experts."""
    config = config_of("mixtral", num_hidden_layers=4, num_experts=16, num_local_experts=16)
    return random_model(config, seed=seed, spread=0.2).to(torch.bfloat16)


@pytest.mark.parametrize("seed", [0, 3])
def test_experts_that_rounding_chooses_are_no_fault(seed: int) -> None:
    assert prepare(rounded_experts(seed)).plan.has_experts


@pytest.mark.parametrize("way", ["_attend_singles", "_attend_span"])
def test_a_fault_of_one_way_to_attend_shows_in_spite_of_experts(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = getattr(SdpaStep, way)
    monkeypatch.setattr(SdpaStep, way, lambda *arguments: original(*arguments).flip(-1))
    with pytest.raises(TurnoutError, match="mixtral: our forward differs from the plain one"):
        prepare(rounded_experts(0), "torch")


def test_the_load_check_refuses_broken_numbers() -> None:
    model = random_model(config_of("llama"), seed=3, spread=0.2)
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with pytest.raises(TurnoutError, match="differs"):
        prepare(model)


async def test_hidden_states_are_those_of_the_plain_model() -> None:
    for kernels in ("native", "torch", "plain"):
        model, plain = twins(config_of("llama"), seed=3, kernels=kernels, block_size=4, token_budget=7)
        tokens = random_prompts(1, 20, seed=5, vocab_size=97)[0]
        with torch.inference_mode():
            expected = plain.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        for layer in (0, 1, -1):
            seq = Sequence(tokens, SamplingParams(), seed=0)
            row = (await model.extend(seq, want=ReadSpec(hidden=frozenset({layer}))))[0]
            torch.testing.assert_close(row.hidden[layer], expected[layer][0, -1], atol=TOLERANCE, rtol=0)
            model.release(seq)
        await model.close()


def test_parameters_are_counted_once() -> None:
    tied = llama_config(tie_word_embeddings=True)
    model = engine_model(random_model(tied, seed=0))
    assert model.num_parameters == sum(p.numel() for p in random_model(tied, seed=0).parameters())
