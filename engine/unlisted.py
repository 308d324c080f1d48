"""Architectures without a file: what in a configuration is known, and what is refused for being unknown.

Such a model runs its own modules over our attention. A configuration is accepted where its attention arguments, layer
kinds and RoPE kinds are known, and where a tiny twin of it is equal to Hugging Face's forward (`engine.twin`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.architectures import listed
from engine.attention.step import CHUNKED
from engine.rope import LENGTH_DEPENDENT, rope_variants
from turnout.errors import invalid

LAYER_KINDS = frozenset({"full_attention", "sliding_attention", CHUNKED})
MLP_KINDS = frozenset({"dense", "sparse"})
# A state of fixed size stands for the tokens so far: it cannot be cut back to a prefix, as a cache of keys can.
RECURRENT_KINDS = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid"})
ROPE_KINDS = LENGTH_DEPENDENT | {"default", "linear", "llama3", "yarn"}  # others depend on the position alone

TWIN_TOKENS = 48  # of a twin, which so crosses every boundary that is smaller
# Numbers that are sizes or identifiers: another one that large may be a boundary that the twin does not cross.
SIZES = re.compile(
    r"vocab_size|(\w+_)?hidden_size\w*|\w*intermediate_size\w*|\w*head_dim|\w*_rank|(moe_)?num_\w+|n_\w+|\w*_token_id"
    r"|max_position_embeddings|original_max_position_embeddings|initial_context_length|sliding_window"
    r"|attention_chunk_size|floor_scale|max_window_layers|rope_theta"
    r"|query_pre_attn_scalar|attn_logit_softcapping|final_logit_softcapping"
)


def refuse(kind: Any, reason: str, field: str = "model") -> NoReturn:
    """Refuse an architecture without a file.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`, with the reason.
    """
    known = ", ".join(listed())
    raise invalid(
        field, f"architecture {kind!r} is not supported: {reason}; supported: {known}, and others proven equal at load"
    )


def check_kind(kind: Any, field: str = "model") -> None:
    """Refuse a `model_type` that has no file here and no causal language model in transformers.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`, naming it and those supported.
    """
    if not isinstance(kind, str) or (kind not in listed() and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        refuse(kind, "transformers has no causal language model of it", field)


def check_unlisted(config: Any, field: str = "model") -> None:
    """Refuse a configuration with anything unknown in it, without loading anything.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`, naming the architecture and what is not known.
    """
    reason = next(_unknown(config), None)
    if reason is not None:
        refuse(config.model_type, reason, field)


def _unknown(config: Any) -> Iterator[str]:
    if config.sub_configs or config.is_encoder_decoder:
        yield "it is more than a causal language model"
    if getattr(config, "is_heterogeneous", False):
        yield "every layer has a configuration of its own"
    for name, kind in _kinds(config):
        if kind in RECURRENT_KINDS:
            yield f"layers of kind {kind!r} ({name}) keep a recurrent state, which is not supported"
        elif kind not in LAYER_KINDS | MLP_KINDS:
            yield f"layers of kind {kind!r} ({name}) are not known"
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        yield "its positions are not rotary (RoPE)"
    for variant in rope_variants(rope):
        if variant.get("rope_type") not in ROPE_KINDS:
            yield f"rotary scaling {variant.get('rope_type')!r} is not known"
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"):
        if not isinstance(getattr(config, name, None), int):
            yield f"its configuration does not say {name}"
    for name, value in _numbers(config.to_dict()):
        if abs(value) >= TWIN_TOKENS and not SIZES.fullmatch(name):
            yield f"{name} = {value} may be a boundary between positions, and is not known"


def _kinds(config: Any) -> Iterator[tuple[str, str]]:
    """Fields that list kinds of layers, and each kind; first `layer_types`, which may be derived from others."""
    fields = {"layer_types": getattr(config, "layer_types", None), **config.to_dict()}
    for name, value in fields.items():
        if name != "architectures" and isinstance(value, list | tuple):
            yield from ((name, kind) for kind in value if isinstance(kind, str))


def _numbers(settings: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
