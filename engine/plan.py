"""How to run each supported architecture layer by layer, and which architectures those are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.attention.paged import AttentionStep
from engine.lean import LEAN, Angles, LeanLayer
from engine.packing import pack_linears, packed
from turnout.errors import Code, TurnoutError

STANDARD = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "mixtral"})
SUPPORTED = STANDARD | {"gpt_neox"}
# Rotary variants whose angles depend on the longest sequence of the batch: one request would change another's.
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class LayerPlan:
    """The parts of a causal language model, in the order a forward pass uses them.

    Args:
        model: a loaded causal language model whose architecture `check_supported` accepts. With `fast`, its
            layers are taken over and the model must not be used any more.
        fast: pack linear weights, and run the Llama family through `engine.lean`.
    """

    def __init__(self, model: Any, fast: bool) -> None:
        config = model.config
        heads = config.num_attention_heads
        if config.model_type == "gpt_neox":
            body, self._embed, self._norm = model.gpt_neox, model.gpt_neox.embed_in, model.gpt_neox.final_layer_norm
        else:
            body, self._embed, self._norm = model.model, model.model.embed_tokens, model.model.norm
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        self.num_layers: int = len(body.layers)
        # Logits beyond this are cut off: checkpoints of one family pad one vocabulary to different sizes.
        self.vocab_size: int = config.vocab_size
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._rotary = body.rotary_emb
        self._layer_types: tuple[str, ...] = tuple(config.layer_types) if config.model_type == "gemma3_text" else ()
        self._angles: Angles | None = None
        self._head: nn.Module = packed(model.get_output_embeddings()) if fast else model.get_output_embeddings()
        self._layers: list[nn.Module] = list(body.layers)
        if fast and config.model_type in LEAN:
            self._angles = Angles(self._rotary, model.dtype, model.device)
            self._layers = [LeanLayer(layer, index) for index, layer in enumerate(body.layers)]
        elif fast:
            for layer in self._layers:
                pack_linears(layer)

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, highest: int, step: AttentionStep, taps: frozenset[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Embed and run the decoder layers.

        Args:
            ids: [T] token ids.
            positions: [T] their positions; `highest` is the largest.
            step: the attention batch.
            taps: layers whose output is wanted too (0: the embeddings).

        Returns:
            [T, hidden] before the final norm, and the tapped outputs [T, hidden].
        """
        return (self._run_modules if self._angles is None else self._run_lean)(ids, positions, highest, step, taps)

    def _run_lean(
        self, ids: torch.Tensor, positions: torch.Tensor, highest: int, step: AttentionStep, taps: frozenset[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        assert self._angles is not None
        hidden = self._embed(ids)
        cos, sin = self._angles(positions, highest)
        tapped = {0: hidden} if 0 in taps else {}
        for index, layer in enumerate(self._layers, start=1):
            hidden = layer.forward(hidden, cos, sin, step)
            if index in taps:
                tapped[index] = hidden
        return hidden, tapped

    def _run_modules(
        self, ids: torch.Tensor, positions: torch.Tensor, highest: int, step: AttentionStep, taps: frozenset[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        hidden = self._embed(ids[None])
        angles = self._rotate(hidden, positions[None])
        tapped = {0: hidden[0]} if 0 in taps else {}
        for index, layer in enumerate(self._layers, start=1):
            hidden = layer(hidden, position_embeddings=angles[index - 1], attention_mask=None, turnout_step=step)
            if index in taps:
                tapped[index] = hidden[0]
        return hidden[0], tapped

    def _rotate(self, hidden: torch.Tensor, positions: torch.Tensor) -> list[Any]:
        """Position embeddings of every layer; Gemma 3 has one kind per layer type."""
        if not self._layer_types:
            return [self._rotary(hidden, positions)] * self.num_layers
        by_type = {kind: self._rotary(hidden, positions, kind) for kind in set(self._layer_types)}
        return [by_type[kind] for kind in self._layer_types]

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm: [R, hidden] -> [R, hidden]."""
        normed: torch.Tensor = self._norm(hidden)
        return normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Normed hidden rows [R, hidden] -> float32 logits [R, vocab_size]."""
        logits: torch.Tensor = self._head(normed)[:, : self.vocab_size].float()
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


def check_supported(config: Any) -> None:
    """Refuse what cannot be run exactly.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the architecture or the rotary variant.
    """
    kind = config.model_type
    if kind not in SUPPORTED:
        listed = ", ".join(sorted(SUPPORTED))
        raise TurnoutError(
            Code.INVALID_ARGUMENT, f"architecture {kind!r} is not supported; supported: {listed}", "model"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    variants = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    for variant in variants:
        if variant.get("rope_type") in BATCH_DEPENDENT_ROPE:
            name = variant["rope_type"]
            raise TurnoutError(Code.INVALID_ARGUMENT, f"rotary scaling {name!r} is not supported ({kind})", "model")
    if getattr(config, "use_bidirectional_attention", False):
        raise TurnoutError(Code.INVALID_ARGUMENT, f"bidirectional attention is not supported ({kind})", "model")
