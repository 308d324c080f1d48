"""Multi-head latent attention over cached latents: keys and values of all heads are never made.

A latent of `kv_lora_rank` numbers and one rotated key that all heads share are cached of each token, as one head of
keys and values. The matrices that would expand a latent to a head's key and value are applied to the queries before
attention and to its output after it, which is the same product in another order.

Source: DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", section 2.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Latent:
    """The two matrices of every head that expand a latent.

    Args:
        module: an attention module of transformers with `kv_b_proj`, whose weight is taken over.
    """

    def __init__(self, module: Any) -> None:
        self._without_position: int = module.qk_nope_head_dim
        widths = (module.qk_nope_head_dim, module.v_head_dim)
        weight = module.kv_b_proj.weight.detach().unflatten(0, (-1, sum(widths)))
        self._keys, self._values = weight.split(widths, dim=1)  # [heads, width, rank]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Turn queries [T, heads, nope + rope] into queries of latents and shared keys, [T, heads, rank + rope]."""
        plain, turned = query[..., : self._without_position], query[..., self._without_position :]
        return torch.cat((torch.einsum("thn,hnr->thr", plain, self._keys), turned), dim=-1)

    def expand(self, attended: torch.Tensor) -> torch.Tensor:
        """Turn weighted sums of latents [T, heads, rank] into weighted sums of values [T, heads, v_head_dim]."""
        return torch.einsum("thr,hvr->thv", attended, self._values)


def keep_latents(layer: nn.Module) -> None:
    """Make the latent attention of a decoder layer, where it has one, pass latents on as its keys and values.

    Args:
        layer: its attention is recognised by `expand_kv`, and gets an attribute `turnout_latent`.
    """
    module: Any
    for module in list(layer.modules()):
        if hasattr(module, "expand_kv") and module.kv_b_proj.bias is None:
            module.turnout_latent = Latent(module)
            module.expand_kv = _not_expanded
            module.kv_b_proj = None


def _not_expanded(latents: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [1, 1, T, rank + rope] and values, of latents [1, 1, T, rank] and shared keys [1, 1, T, rope]."""
    return torch.cat((latents, turned), dim=-1), latents
