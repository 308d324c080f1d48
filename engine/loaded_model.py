"""A model ready to run layer by layer, and which architectures can be run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from decoding.processors.base import NEG_INF
from decoding.vocabulary import SubVocabulary
from engine.architectures import architecture_of
from engine.architectures.base import has_experts, kv_shape
from engine.attention.latent import keep_latents
from engine.attention.temperature import take_temperature
from engine.backends.base import Backend
from engine.backends.stacks import Head
from engine.cache.kv_formats import KVDtype
from engine.cache.paged_kv import PagedKV
from engine.rope import LengthRotary, unfit_rope
from engine.unlisted import check_kind, check_unlisted
from turnout.checkpoint_files import not_supported, quantization_of
from turnout.errors import invalid


class Heads:
    """Heads of parts of the vocabulary, made when first needed; those used last stay.

    Args:
        make: from ids; None where there is no such head.
        most_ids: in all that stay: they take as much memory as the whole head at most, or one of them does.
    """

    def __init__(self, make: Callable[[torch.Tensor], Head | None], most_ids: int) -> None:
        self._make = make
        self._most = most_ids
        self._made: OrderedDict[SubVocabulary, Head | None] = OrderedDict()

    def of(self, among: SubVocabulary) -> Head | None:
        """The head of some ids."""
        if among not in self._made:
            self._made[among] = self._make(among.ids)
        self._made.move_to_end(among)
        while len(self._made) > 1 and sum(map(len, self._made)) > self._most:
            self._made.popitem(last=False)
        return self._made[among]


class LoadedModel:
    """A model's shape, and the stack that runs it.

    Args:
        model: a loaded causal language model whose architecture `check_supported` accepts. The backend may take
            its layers over; it must not be used any more.
        backend: how layers and attention are computed.

    Attributes:
        ranks: processes the model is split over; `kv_heads` are those of one.
        rotates: for each layer whether it rotates queries and keys; empty: not known.
        kv_dtype: how its pools keep keys and values.
        has_experts: whether tokens are routed to experts.
        by_length: see `decoding.model.Model`.
    """

    def __init__(self, model: Any, backend: Backend) -> None:
        config = model.config
        architecture = architecture_of(config)
        parts = architecture.parts(model)
        for layer in parts.layers:
            keep_latents(layer)
            take_temperature(layer)
        self.ranks = 1
        self.backend = backend
        self.kv_dtype: KVDtype = "auto"
        self.kv_heads, self.head_dim = kv_shape(config)
        self.num_layers: int = len(parts.layers)
        # Logits beyond this are cut off: checkpoints of one family pad one vocabulary to different sizes.
        self.vocab_size: int = config.vocab_size
        self._logit_scale = architecture.logit_scale(config)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Attention to a growing tree's cached nodes knows their slots, not their depths: a window would need these.
        bounds = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        self.keeps_trees: bool = backend.keeps_trees and not any(bounds)
        self.dtype: torch.dtype = model.dtype
        self.width: int = config.hidden_size
        self.rotary, self.layer_types, self.device = parts.rotary, parts.layer_types, parts.device
        self.has_experts = has_experts(config)
        self.by_length = isinstance(parts.rotary, LengthRotary)
        self.rotates = (True,) * self.num_layers if architecture.rotates is None else architecture.rotates(config)
        self.stack = backend.stack(parts, model.dtype)
        self._embed = parts.embed
        self._heads = Heads(lambda ids: self.stack.head_of(ids), self.vocab_size)  # a stack may be wrapped later

    def cache(self, num_slots: int, device: torch.device) -> PagedKV:
        """Return a new KV pool of `num_slots` tokens."""
        return PagedKV(self.num_layers, num_slots, self.kv_heads, self.head_dim, self.dtype, device, self.kv_dtype)

    def rope_length(self, longest: int) -> int:
        """See `engine.rope.LengthRotary.length_of`; 0 where the angles depend on positions alone."""
        return self.rotary.length_of(longest) if isinstance(self.rotary, LengthRotary) else 0

    @torch.inference_mode()
    def embed(self, tokens: list[int]) -> torch.Tensor:
        """What goes into the first layer for these tokens: float32 [n, hidden], on the CPU."""
        states: torch.Tensor = self._embed(torch.tensor(tokens, dtype=torch.int64, device=self.device))
        return states.to("cpu", torch.float32)

    def logits(self, normed: torch.Tensor, among: SubVocabulary | None = None) -> torch.Tensor:
        """Normed hidden rows [R, hidden] -> float32 logits [R, vocab_size].

        Args:
            normed: the rows.
            among: ids whose logits are enough; the others may be left out, and are then -inf.
        """
        head = None if among is None else self._heads.of(among)
        if among is None or head is None:
            return self._capped(self.stack.logits(normed)[:, : self.vocab_size])
        logits = torch.full((len(normed), self.vocab_size), NEG_INF, device=normed.device)
        return logits.index_copy_(1, among.ids.to(normed.device), self._capped(head(normed)))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits if self._logit_scale == 1.0 else logits * self._logit_scale
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


def check_supported(config: Any, field: str = "model") -> None:
    """Refuse what cannot be run exactly.

    Args:
        config: Hugging Face configuration.
        field: the model's place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`, naming the architecture, its variant or the quantization.
    """
    kind = config.model_type
    check_kind(kind, field)
    if (quantized := quantization_of(config.to_dict())) is not None:
        raise invalid(field, not_supported(*quantized))
    architecture = architecture_of(config)
    if not architecture.listed:
        check_unlisted(config, field)
    if (reason := architecture.unfit(config) or unfit_rope(config)) is not None:
        raise invalid(field, f"{reason} ({kind})")
    if getattr(config, "use_bidirectional_attention", False):
        raise invalid(field, f"bidirectional attention is not supported ({kind})")
