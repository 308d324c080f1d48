"""Architectures without a file: accepted when proven equal to Hugging Face's forward, else refused with the reason."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import engine.architectures
import engine.twin
from decoding.model import ReadSpec
from decoding.partial_forward import LayerSelection, Sketch
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.match import MatchVerifier
from engine.architectures import architecture_named, listed
from engine.architectures.base import TINY, TINY_EXPERTS, TINY_WINDOW
from engine.attention.latent import Latent
from engine.attention.step import Scores
from engine.backends.base import Kernels
from engine.costs.resources import ModelShape
from engine.loaded_model import check_supported
from engine.loading import prepare
from engine.parallel.sharding import check_heads
from engine.reuse.rotation import Rotation
from engine.twin import check_twin
from pool.local_pool import LocalPool
from tests.engine.architectures import TOLERANCE, assert_config_equals_plain_forward
from tests.engine.harness import ask_all, assert_claimed, call_of, engine_model, pair_config, twins
from training.random_models import BYTE_VOCAB, byte_tokenizer, random_model
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
KINDS = ["sliding_attention", "full_attention"]
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "olmo3": {"sliding_window": TINY_WINDOW, "layer_types": KINDS, "rope_parameters": YARN},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "vaultgemma": {
        "head_dim": 8,
        "sliding_window": TINY_WINDOW,
        "query_pre_attn_scalar": 8,
        "layer_types": KINDS,
        "attn_logit_softcapping": 5.0,
    },
    "glm4_moe": {**TINY_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "cohere2": {"sliding_window": TINY_WINDOW, "layer_types": KINDS, "logit_scale": 0.25},
    "glm4": {"head_dim": 8},
    "starcoder2": {"sliding_window": TINY_WINDOW},
    "exaone4": {"sliding_window": TINY_WINDOW, "layer_types": KINDS},
    "ministral3": {"head_dim": 8, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
    "phi": {},
    "gpt_oss": {
        **TINY_EXPERTS,
        "head_dim": 8,
        "sliding_window": TINY_WINDOW,
        "layer_types": KINDS,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "deepseek_v3": {**LATENTS, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "llama4_text": {
        **TINY_EXPERTS,
        "head_dim": 8,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 5,
        "floor_scale": 7,
        "attn_scale": 0.5,
    },
}
# Whose twins are enough: they differ from one above by modules that are transformers' own.
SIMILAR = ["deepseek_v2", "granitemoe", "granitemoeshared", "olmoe", "qwen2_moe", "glm4_moe_lite"]
# Grouped attention in torch does what plain attention does, but for these.
GROUPED = ("gpt_oss", "deepseek_v3", "llama4_text")
RUN = [(kind, kernels) for kind in (*GROUPED, "vaultgemma", "glm4_moe", "cohere2") for kernels in ("native", "plain")]
RUN += [(kind, "torch") for kind in GROUPED]
HYBRIDS = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "jamba", "bamba", "granitemoehybrid", "nemotron_h"),
    *("kimi_linear", "minimax", "recurrent_gemma", "mamba2"),
)
# What checkpoints set and the usual configuration of a class leaves open.
UNSET: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "num_key_value_heads": 32},
    "gpt_oss": {"initial_context_length": 4096, "experts_per_token": 4, "swiglu_limit": 7.0},
}
REFUSED = {
    "deepseek_v32": "layers of kind 'indexed_attention' (layer_types) are not known",
    **dict.fromkeys(HYBRIDS, "layers of kind 'linear_attention' (layer_types) keep a recurrent state, which is not "),
    "lfm3": "layers of kind 'conv' (layer_types) keep a recurrent state",
    "falcon_h1": "layers of kind 'hybrid' (layer_types) keep a recurrent state",
    "stablelm": "its layers do not hand arguments on to transformers' attention interface",
    "nanochat": "a tiny twin differs from its plain forward by ",
    "diffllama": "its layers do not call transformers' attention interface once each, in their order",
    "falcon": "it has other parts",
    "dots3_note_text": "every layer has a configuration of its own",
    "gpt2": "its positions are not rotary (RoPE)",
    "bert": "its positions are not rotary (RoPE)",
    "musicgen": "it is more than a causal language model",
    "t5": "transformers has no causal language model of it",
    "gemma3": "it is more than a causal language model",
}


def config_of(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **{**TINY, **ACCEPTED.get(kind, {}), **changes})


def check(config: Any) -> None:
    check_supported(config)
    check_twin(config)


def refusal(config: Any) -> str:
    with pytest.raises(TurnoutError) as caught:
        check(config)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "model")
    assert f"architecture {config.model_type!r} is not supported: " in caught.value.message
    return caught.value.message


@pytest.fixture(scope="module", autouse=True)
def without_files() -> Iterator[None]:
    """As if none of them had a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.architectures, "listed", lambda: sorted(set(listed()) - set(ACCEPTED) - set(REFUSED)))
        architecture_named.cache_clear()
        yield
    architecture_named.cache_clear()


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which configurations have been checked."""
    monkeypatch.setattr("engine.twin._proven", set())


def test_of_latents_one_head_is_cached() -> None:
    shape = ModelShape.of(AutoConfig.for_model("deepseek_v3"), 671 * 10**9, 2)
    assert shape.kv_bytes_per_token == 2 * 61 * (512 + 64) * 2
    plan = prepare(random_model(config_of("deepseek_v3"), seed=3, spread=0.2)).plan
    assert plan.cache(16, plan.device).layers[0].shape == (16, 2, 1, 16 + 4)


@pytest.mark.parametrize(("kind", "kernels"), RUN)
async def test_tokens_and_logits_equal_the_plain_forward_in_a_ragged_batch(kind: str, kernels: Kernels) -> None:
    await assert_config_equals_plain_forward(config_of(kind), kernels, "cpu")


@pytest.mark.parametrize("kind", [*ACCEPTED, *SIMILAR])
def test_configurations_of_real_size_are_proven_by_a_twin(kind: str) -> None:
    check(AutoConfig.for_model(kind, **UNSET.get(kind, {})))


def test_short_convolutions_are_refused_by_their_kind() -> None:
    kinds = ["conv", "full_attention"]
    config = AutoConfig.for_model("lfm2", num_hidden_layers=2, layer_types=kinds)
    assert "layers of kind 'conv' (layer_types) keep a recurrent state" in refusal(config)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_known_is_refused_by_name(kind: str) -> None:
    assert REFUSED[kind] in refusal(AutoConfig.for_model(kind))


Plant = Callable[[pytest.MonkeyPatch, Any], None]


def windows_are_lost(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """As if layers did not hand their window to the attention."""
    original: Callable[..., torch.Tensor] = engine.twin._WatchedStep.attend

    def attend(self: Any, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
        return original(self, layer, query, pairs, replace(scores, window=None))

    monkeypatch.setattr(engine.twin._WatchedStep, "attend", attend)


def sinks_are_lost(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """As if attention did not add them."""
    original: Callable[..., torch.Tensor] = engine.twin._WatchedStep.attend

    def attend(self: Any, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
        return original(self, layer, query, pairs, replace(scores, sinks=None))

    monkeypatch.setattr(engine.twin._WatchedStep, "attend", attend)


def chunks_are_lost(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """As if the kind of a layer did not matter."""
    monkeypatch.setattr("engine.attention.step._chunk_of", lambda module: None)


def temperature_counts_rows(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """As transformers' module does without its own cache."""
    monkeypatch.setattr("engine.loaded_model.take_temperature", lambda layer: None)


def latents_are_those_of_other_heads(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """As if the heads of queries and of what expands latents stood in different orders."""
    original: Callable[..., torch.Tensor] = Latent.absorb
    monkeypatch.setattr(Latent, "absorb", lambda self, query: original(self, query.flip(1)).flip(1))


def around_layers(monkeypatch: pytest.MonkeyPatch, config: Any, change: Callable[..., torch.Tensor]) -> None:
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    [layer] = [value for name, value in vars(module).items() if name.endswith("DecoderLayer")]
    original = layer.forward

    def forward(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        return change(lambda **changed: original(self, hidden_states, **{**options, **changed}), options)

    monkeypatch.setattr(layer, "forward", forward)


def positions_are_lost(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """Which changes nothing before the position from which on queries are scaled."""

    def change(run: Any, options: Any) -> Any:
        return run(position_ids=options["position_ids"] * 0) if "turnout_step" in options else run()

    around_layers(monkeypatch, config, change)


def layers_have_a_state(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """Which is not cached: as long as all tokens are fed at once, it is there."""

    def change(run: Any, options: Any) -> Any:
        states = run()
        return states + states.cumsum(1) / 10

    around_layers(monkeypatch, config, change)


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize(
    ("kind", "plant", "where"),
    [
        ("olmo3", windows_are_lost, "in one piece"),
        ("starcoder2", windows_are_lost, "in one piece"),
        ("ministral3", positions_are_lost, "in one piece"),
        ("granite", layers_have_a_state, "in 5 chunks"),
        ("gpt_oss", sinks_are_lost, "in one piece"),
        ("llama4_text", chunks_are_lost, "in one piece"),
        ("llama4_text", temperature_counts_rows, "in 5 chunks"),
        ("deepseek_v3", latents_are_those_of_other_heads, "in one piece"),
    ],
)
def test_the_twin_of_a_real_configuration_shows_a_planted_fault(
    kind: str, plant: Plant, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model(kind)
    if kind == "starcoder2":  # whose usual configuration has no window
        config.sliding_window = 4096
    plant(monkeypatch, config)
    message = refusal(config)
    assert "a tiny twin differs from its plain forward by " in message
    assert where in message


@pytest.mark.parametrize("kind", ["granite", "cohere2"])
async def test_a_pair_answers_with_any_method(kind: str, tmp_path: Path) -> None:
    """Every token is the choice of the model that claims it, by fresh forwards of Hugging Face's model."""
    for name, layers in (("large", 4), ("small", 2)):
        settings = {"vocab_size": BYTE_VOCAB, "num_hidden_layers": layers, "max_position_embeddings": 512}
        changes = {"layer_types": KINDS * (layers // 2)} if "layer_types" in ACCEPTED[kind] else {}
        model = random_model(config_of(kind, **settings, **changes), seed=4, spread=0.2)
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    pool = LocalPool.load("pair", pair_config(tmp_path, block_size=4, token_budget=24))
    prompt = [7, 8, 9, 10] * 6
    methods: list[tuple[str, dict[str, Any]]] = [
        ("plain", {}),
        ("speculative", {"length": "fixed"}),
        ("speculative", {"drafter": "token_recycling", "length": "fixed"}),
        ("speculative", {"drafter": "lookahead", "length": "fixed"}),
        ("random_switch", {"share": 0.5, "mean_run": 3.0, "min_stay": 2}),
    ]
    calls = [call_of(prompt, name, params, ignore_eos=True) for name, params in methods]
    replies = await ask_all(pool, calls)
    for call, reply in zip(calls, replies, strict=True):
        assert len(reply.ids) == 16
        assert_claimed(tmp_path, call, reply)
    assert replies[1].ids == replies[2].ids == replies[3].ids
    await pool.close()


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "llama4_text"])
async def test_trees_behind_a_cached_prefix_equal_the_plain_forward(kind: str) -> None:
    model, plain = twins(config_of(kind), seed=3, spread=0.2, block_size=4)
    prefix = list(range(3, 21))
    first = Sequence([*prefix, 7], SamplingParams(), seed=0)
    await model.extend(first)
    model.release(first)
    tree = DraftTree((5, 6, 7, 8), (-1, -1, 0, 1), "d")
    logits = ReadSpec(draw=None, logits=True)

    async def verify(last: int) -> None:
        seq = Sequence([*prefix, last], SamplingParams(), seed=0)
        result = await model.verify(seq, tree, MatchVerifier(), logits)
        for row, path in zip(result.rows, ([], [5], [6], [5, 7], [6, 8]), strict=True):
            assert row.logits is not None
            expected = plain.logits([*seq.tokens, *path])[-1]
            torch.testing.assert_close(row.logits, expected, atol=TOLERANCE, rtol=0)
        assert seq.meter.models["m"].cached_tokens == 16
        model.release(seq)

    await asyncio.gather(verify(7), verify(9))
    await model.close()


def test_weights_whose_forward_differs_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("granite")
    check(config)

    def change(run: Any, options: Any) -> Any:
        return run() * (1.5 if "turnout_step" in options else 1.0)

    around_layers(monkeypatch, config, change)
    with pytest.raises(TurnoutError, match="'granite' is not supported: our forward differs from the plain") as caught:
        prepare(random_model(config, seed=3, spread=0.2))
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_a_number_that_may_be_a_boundary_is_refused() -> None:
    config = config_of("granite")
    config.attention_floor = 8192
    assert "attention_floor = 8192 may be a boundary between positions" in refusal(config)
    config.attention_floor = 8  # the twin goes beyond
    check(config)


async def test_what_needs_to_know_layers_is_refused() -> None:
    model = engine_model(random_model(config_of("granite"), seed=3, spread=0.2))
    with pytest.raises(TurnoutError, match="no file that says which layers rotate"):
        Rotation.of(model.batcher.runner.plan)
    seq = Sequence([2, 3], SamplingParams(), seed=0)
    with pytest.raises(TurnoutError, match="layers of 'granite' cannot run in groups"):
        await model.partial_forward(seq, Sketch.chain(1, (3,), 0, LayerSelection(groups=((0, 2),))), ReadSpec())
    model.release(seq)
    await model.close()
    with pytest.raises(TurnoutError, match="'granite' cannot be split; architectures that can: gemma2, "):
        check_heads("big", config_of("granite"), 2)


def test_a_file_in_the_folder_is_all_that_an_architecture_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "olmo.py").write_text(
        "from engine.architectures.base import Architecture\n"
        "ARCHITECTURE = Architecture(title='OLMo', rotates=lambda config: (True,) * config.num_hidden_layers)\n"
    )
    assert not architecture_named("olmo").listed
    monkeypatch.setattr(engine.architectures, "__path__", [*engine.architectures.__path__, str(tmp_path)])
    architecture_named.cache_clear()
    try:
        assert "olmo" in listed()
        plan = prepare(random_model(AutoConfig.for_model("olmo", **TINY), seed=3, spread=0.2)).plan
        assert plan.rotates == (True, True)
        Rotation.of(plan)
    finally:
        architecture_named.cache_clear()
