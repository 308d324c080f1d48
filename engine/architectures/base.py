"""What the engine knows of an architecture, and a model of it taken apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine.rope import LengthRotary, depends_on_length

TINY_WINDOW = 6
TINY: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@dataclass(slots=True)
class ModelParts:
    """A causal language model taken apart.

    Attributes:
        architecture: what is known of it.
        embed: token ids -> hidden states.
        layers: decoder layers in order.
        rotary: rotary position embeddings; None: there are none.
        norm: the final norm.
        head: hidden states -> logits.
        layer_types: one per layer where layers of several kinds have rotary embeddings of their own, else empty.
        device: where the weights are.
        positions: positions -> what is added to the embeddings of tokens; None: nothing is.
    """

    architecture: Architecture
    embed: nn.Module
    layers: list[Any]
    rotary: Any
    norm: Any
    head: nn.Module
    layer_types: tuple[str, ...]
    device: torch.device
    positions: nn.Module | None = None

    @property
    def fused(self) -> bool:
        """Whether the fused, native and CUDA stacks compute its layers; their angles depend on positions alone."""
        return self.architecture.fused and not isinstance(self.rotary, LengthRotary)


@dataclass(frozen=True, slots=True)
class Halves:
    """Names in a decoder layer, by which its attention and its MLP can be run apart; None: there is no such norm.

    Attributes:
        attention: the attention module.
        output: its last projection.
        before_attention: the norm of what the attention takes.
        after_attention: the norm of what the attention gives.
        before_mlp: the norm of what the MLP takes.
        after_mlp: the norm of what the MLP gives.
        parallel: whether the MLP does not see what the attention adds, or an attribute that says so.
        factor: an attribute with the factor on what each half adds; None: 1.
    """

    attention: str = "self_attn"
    output: str = "o_proj"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    parallel: str | bool = False
    factor: str | None = None


FOUR_NORMS = Halves(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
POST_NORMS = Halves(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def own_window(attention: Any) -> int | None:
    """The sliding window an attention module names, None: it sees everything."""
    window: int | None = getattr(attention, "sliding_window", None)
    return window


def embedding_scale(config: Any) -> float:
    """The factor on token embeddings, by the names transformers has for it."""
    return float(getattr(config, "embedding_multiplier", None) or 1.0)


def logit_scale(config: Any) -> float:
    """The factor on logits, by the names transformers has for it."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def has_experts(config: Any) -> bool:
    """Whether tokens are routed to experts, by the names transformers has for their number."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)


def kv_shape(config: Any) -> tuple[int, int]:
    """Return the number of key/value heads and the width of one, as they are cached.

    Of latent attention (`engine.attention.latent`) a token's latent and shared key are cached, as one head.
    """
    if rank := getattr(config, "kv_lora_rank", None):
        return 1, int(rank + config.qk_rope_head_dim)
    heads: int = config.num_attention_heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, max(width, getattr(config, "v_head_dim", None) or 0)


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything that differs between architectures; the defaults are Llama's.

    Attributes:
        title: its name in the documentation.
        listed: whether it has a file.
        norms: names of the final norm in the body; the first that is there counts.
        layers: name of the decoder layers in the body.
        positions: name of the embedding of absolute positions in the body; None: there is none.
        adapt: changes a decoder layer before it is used.
        halves: see there; None: layers run whole only.
        whole: whether layers can run whole: they pass arguments on to their attention.
        fused: whether the layers are Llama's, so that the fused, native and CUDA stacks compute them.
        splits: whether it can be split over processes by transformers' tensor-parallel plan.
        window: of an attention module; only fused stacks ask, others get it in every call.
        has_queries: whether queries are `q_proj`, then `q_norm` of each head where there is one, then rotation.
        rotates: of a configuration: for each layer whether it rotates queries and keys; empty: not known. None: all.
        embedding_scale: of a configuration: the factor on token embeddings that the body applies.
        logit_scale: of a configuration: the factor on logits.
        unfit: why a configuration cannot be run, in addition to what is refused of all; None: it can.
        tiny: configurations for tests, by what they show ("": the usual one): changes of `TINY`; None drops a value.
    """

    title: str
    listed: bool = True
    norms: tuple[str, ...] = ("norm",)
    layers: str = "layers"
    positions: str | None = None
    adapt: Callable[[Any], None] = lambda layer: None
    halves: Halves | None = field(default_factory=Halves)
    whole: bool = True
    fused: bool = False
    splits: bool = True
    window: Callable[[Any], int | None] = own_window
    has_queries: bool = True
    rotates: Callable[[Any], tuple[bool, ...]] | None = None
    embedding_scale: Callable[[Any], float] = lambda config: 1.0
    logit_scale: Callable[[Any], float] = lambda config: 1.0
    unfit: Callable[[Any], str | None] = lambda config: None
    tiny: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})

    def parts(self, model: Any) -> ModelParts:
        """Take a Hugging Face causal language model apart.

        Raises:
            AttributeError: it has other parts.
        """
        body = model.base_model if model.base_model is not model else model.model
        norm = next((getattr(body, name) for name in self.norms if hasattr(body, name)), None)
        if norm is None:
            raise AttributeError(f"the final norm is none of {', '.join(self.norms)}")
        layers = list(getattr(body, self.layers))
        for layer in layers:
            self.adapt(layer)
        rotary = None if self.positions is not None else body.rotary_emb
        kinds = tuple(model.config.layer_types) if takes_layer_type(rotary) else ()
        embed, scale = model.get_input_embeddings(), self.embedding_scale(model.config)
        embed = embed if scale == 1.0 else ScaledEmbedding(embed, scale)
        rotary = LengthRotary(rotary, model.config) if depends_on_length(model.config) else rotary
        return ModelParts(
            self,
            embed,
            layers,
            rotary,
            norm,
            model.get_output_embeddings(),
            kinds,
            model.device,
            None if self.positions is None else getattr(body, self.positions),
        )

    def tiny_settings(self, variant: str = "") -> dict[str, Any]:
        """Settings of a tiny configuration."""
        return {name: value for name, value in {**TINY, **self.tiny[variant]}.items() if value is not None}


class ScaledEmbedding(nn.Module):
    """Token embeddings times a number."""

    def __init__(self, embedding: nn.Module, scale: float) -> None:
        super().__init__()
        self.embedding, self.scale = embedding, scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [...] -> [..., hidden]."""
        states: torch.Tensor = self.embedding(ids) * self.scale
        return states


def takes_layer_type(rotary: nn.Module | None) -> bool:
    """Whether a rotary embedding has angles of its own for every kind of layer."""
    return rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
