"""A tiny twin of a configuration: a model with the same settings and small sizes, whose forward must be ours."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.architectures import architecture_of
from engine.attention.layout import Layout
from engine.attention.step import NAME, AttentionStep, Scores, UnknownAttentionError
from engine.backends.base import PlainBackend
from engine.cache.paged_kv import PagedKV
from engine.forward_check import CHECK_TOLERANCE, difference, our_logits, plain_logits
from engine.loaded_model import LoadedModel
from engine.rope import depends_on_length, rope_variants
from engine.unlisted import TWIN_TOKENS, refuse

TWIN_LAYERS = 4
TWIN_HEAD = 32
# Boundaries that the twin's tokens cross more than once.
TWIN_WINDOW = 6
TWIN_CHUNK = 11
TWIN_SCALED_FROM = 16
TWIN_SIZES = {
    "vocab_size": 97,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": TWIN_WINDOW,
    "attention_chunk_size": TWIN_CHUNK,
    "floor_scale": TWIN_CHUNK,
    "original_max_position_embeddings": TWIN_SCALED_FROM,
    "initial_context_length": TWIN_SCALED_FROM,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_window_layers": 1,
}
NOT_KEPT = ("architectures", "dtype", "torch_dtype", "quantization_config", "transformers_version", "_name_or_path")
# In one piece, in chunks across every boundary, token by token.
TWIN_CHUNKS = ((TWIN_TOKENS,), (5, 14, 1, 13, TWIN_TOKENS - 33), (1,) * TWIN_TOKENS)

LONGEST_REASON = 200  # characters of a library's message
_proven: set[str] = set()  # configurations of twins


def check_twin(config: Any, field: str = "model") -> None:
    """Run a tiny twin of an architecture without a file, once; one with a file has its tests.

    Args:
        config: which `check_supported` accepts.
        field: the model's place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: there is no such twin, it does not run over our attention, or its
            logits differ from Hugging Face's in one piece, in chunks or token by token.
    """
    if architecture_of(config).listed:
        return
    kind = config.model_type
    try:
        name = repr(twin_config(config).to_dict())
        model = None if name in _proven else twin_of(config)
    except Exception as error:  # any class of configuration
        refuse(kind, f"no tiny twin can be made to check it ({_said(error)})", field)
    if model is None:
        return
    try:
        reason = twin_difference(model)
    except UnknownAttentionError as error:
        reason = error.reason
    except Exception as error:  # any modules
        reason = f"its layers do not run over our attention ({_said(error)})"
    if reason is not None:
        refuse(kind, reason, field)
    _proven.add(name)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST_REASON]}"


def twin_difference(model: Any) -> str | None:
    """Why a twin's forward is not ours; None: it is."""
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        return "its attention is not causal"
    # Below the boundary of frequencies that depend on the length first: dynamic scaling does not return to it.
    counts = (TWIN_SCALED_FROM, TWIN_TOKENS) if depends_on_length(model.config) else (TWIN_TOKENS,)
    expected = {count: plain_logits(model, count) for count in counts}
    model.config._attn_implementation = NAME
    backend = _WatchedBackend()
    try:
        plan = LoadedModel(model, backend)
    except AttributeError as error:
        return f"it has other parts ({error})"
    for chunks in (*TWIN_CHUNKS, (7, TWIN_SCALED_FROM - 7)):
        if sum(chunks) not in expected:
            continue
        plain = expected[sum(chunks)]
        backend.calls.clear()
        got = our_logits(plan, chunks, model.config.vocab_size, plain.device)
        if [layer for layer, _ in backend.calls] != list(range(plan.num_layers)) * len(chunks):
            return "its layers do not call transformers' attention interface once each, in their order"
        for _, scores in backend.calls:
            if scores.window not in (None, TWIN_WINDOW):
                return f"attention has a window of {scores.window}, which is not its sliding_window"
        apart = difference(got, plain)
        if not apart <= CHECK_TOLERANCE[torch.float32]:
            way = "in one piece" if len(chunks) == 1 else f"in {len(chunks)} chunks"
            return f"a tiny twin differs from its plain forward by {apart:.3g} of the logits' spread, {way}"
    return None


class _WatchedBackend(PlainBackend):
    """Notes which layers call attention, and how."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Scores]] = []

    def step(self, layout: Layout, store: PagedKV) -> AttentionStep:
        """See `engine.backends.base.Backend.step`."""
        return _WatchedStep(super().step(layout, store), self.calls)


class _WatchedStep:
    def __init__(self, step: AttentionStep, calls: list[tuple[int, Scores]]) -> None:
        self._step, self._calls = step, calls

    def attend(self, layer: int, query: torch.Tensor, pairs: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        self._calls.append((layer, scores))
        return self._step.attend(layer, query, pairs, scores)


def twin_config(config: Any) -> Any:
    """A configuration of the same class and settings, of tiny sizes, whose boundaries few tokens cross."""
    settings = {name: value for name, value in config.to_dict().items() if name not in NOT_KEPT}
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    layers: int = config.num_hidden_layers
    kept = _kept_layers(settings, layers)
    tiny = {name: _at_most(settings[name], most) for name, most in TWIN_SIZES.items() if name in settings}
    tiny_kv = 2 if kv_heads > 1 else 1
    tiny_heads = tiny_kv if kv_heads == heads else 2 * tiny_kv
    tiny |= {"num_attention_heads": tiny_heads, "hidden_size": tiny_heads * TWIN_HEAD, "num_hidden_layers": len(kept)}
    tiny |= {name: tiny_kv for name in ("num_key_value_heads",) if settings.get(name)}
    tiny |= {name: tiny.get("qk_rope_head_dim", TWIN_HEAD) for name in ("head_dim",) if settings.get(name)}
    tiny |= {name: 0 if name == "pad_token_id" else 1 for name in settings if name.endswith("_token_id")}
    for name, value in settings.items():
        if _is_by_layer(value, layers):
            tiny[name] = [value[layer] for layer in kept]
    if rope := settings.get("rope_parameters"):
        dynamic = any(variant.get("rope_type") == "dynamic" for variant in rope_variants(rope))
        factor = max(variant.get("factor") or 1.0 for variant in rope_variants(rope))
        tiny["rope_parameters"] = _tiny_rope(rope, int(TWIN_SCALED_FROM * factor))
        longest = TWIN_SCALED_FROM if dynamic else max(int(TWIN_SCALED_FROM * factor), TWIN_TOKENS)
        tiny["max_position_embeddings"] = longest
    return type(config).from_dict({**settings, **tiny})


def _at_most(value: Any, most: int) -> Any:
    return min(value, most) if isinstance(value, int) and not isinstance(value, bool) else value


def _kept_layers(settings: dict[str, Any], layers: int) -> list[int]:
    """The first layer of every kind, and others up to `TWIN_LAYERS`."""
    by_layer = [value for value in settings.values() if _is_by_layer(value, layers)]
    first: dict[str, int] = {}
    for layer in range(layers):
        first.setdefault(repr([value[layer] for value in by_layer]), layer)
    rest = [layer for layer in range(layers) if layer not in first.values()]
    return sorted([*first.values(), *rest[: max(TWIN_LAYERS - len(first), 0)]])


def _is_by_layer(value: Any, layers: int) -> bool:
    """Whether a setting says something of each layer; a list of all layers (`moe_layers`) does not."""
    return isinstance(value, list) and len(value) == layers and value != list(range(layers))


def _tiny_rope(rope: dict[str, Any], longest: int) -> dict[str, Any]:
    tiny = {name: _tiny_rope(value, longest) if isinstance(value, dict) else value for name, value in rope.items()}
    rotated = int(TWIN_HEAD * rope.get("partial_rotary_factor", 1.0))
    tiny |= {name: value[: rotated // 2] for name, value in tiny.items() if isinstance(value, list)}  # LongRoPE's
    boundaries = {"original_max_position_embeddings": TWIN_SCALED_FROM, "max_position_embeddings": longest}
    return tiny | {name: value for name, value in boundaries.items() if name in tiny}


def twin_of(config: Any) -> Any:
    """A model of `twin_config` with random float32 weights, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(twin_config(config)).float().eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.2 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
