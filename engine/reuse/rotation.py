"""Keys cached at one position made into keys of another: one rotation by a constant, no forward.

A cached key is R(p) k for its position p, so R(s) times it is the key of the same k at p + s, whatever p was. Values
carry no position. Source: positional integrity encoding of paper #230, "Let the Code LLM Edit Itself When You Edit the
Code".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from decoding.partial_forward import LayerSelection
from engine.attention.layout import lay_out
from engine.cache.paged_kv import PagedKV
from engine.loaded_model import LoadedModel
from turnout.errors import Code, TurnoutError

CHECK_PLACES = 12
CHECK_BLOCK = 16
# Largest difference that rounding explains, relative to the largest number in a key.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class Rotation:
    """R(s) of every layer of one model.

    Args:
        frequencies: for each layer, angle per position of the pairs it rotates: float64 [rotated / 2]; layers with the
            same ones share the tensor. The first `rotated` numbers of a key turn, number i with number
            i + rotated / 2; the rest stay.
    """

    def __init__(self, frequencies: Sequence[torch.Tensor]) -> None:
        self._frequencies = list(frequencies)

    @classmethod
    def of(cls, plan: LoadedModel) -> Rotation:
        """A loaded model's.

        Raises:
            TurnoutError: INVALID_ARGUMENT: its keys are not plainly rotated by position, or lie on several processes.
        """
        if plan.ranks > 1:
            raise _refusal("it is split over several processes")
        if not plan.rotates:
            raise _refusal("there is no file that says which layers rotate them, one half of a head with the other")
        found = {kind: _frequencies(plan.rotary, kind) for kind in plan.layer_types or ("",)}
        still = {kind: torch.zeros_like(each) for kind, each in found.items()}  # layers that rotate nothing
        kinds = plan.layer_types or ("",) * plan.num_layers
        rotation = cls([(found if turns else still)[kind] for kind, turns in zip(kinds, plan.rotates, strict=True)])
        _check(plan, rotation)
        return rotation

    @torch.inference_mode()
    def turn(self, keys: torch.Tensor, layer: int, shifts: torch.Tensor) -> None:
        """Move keys in place: [n, heads, head_dim] by `shifts` positions, int64 [n]."""
        cos, sin = self._angles(layer, shifts)
        _turn(keys, cos, sin)

    @torch.inference_mode()
    def move(self, store: PagedKV, sources: torch.Tensor, targets: torch.Tensor, shifts: torch.Tensor) -> None:
        """Copy slots to slots, int64 [n] each, their keys moved so far; all are read before any is written."""
        angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, cache in enumerate(store.layers):
            known = id(self._frequencies[layer])
            if known not in angles:
                angles[known] = self._angles(layer, shifts)
            pairs = cache.index_select(0, sources)
            _turn(pairs[:, 0], *angles[known])
            cache.index_copy_(0, targets, pairs)

    def _angles(self, layer: int, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [n, 1, rotated / 2]; the product is exact enough for any shift in float64 only."""
        angles = shifts.double()[:, None, None] * self._frequencies[layer].to(shifts.device)
        return angles.cos().float(), angles.sin().float()


def _turn(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    left, right = keys[..., :half].float(), keys[..., half : 2 * half].float()
    turned = torch.addcmul(left * cos, right, sin, value=-1.0), torch.addcmul(right * cos, left, sin)
    keys[..., :half], keys[..., half : 2 * half] = turned


def _frequencies(rotary: Any, kind: str) -> torch.Tensor:
    """Angle per position, float64; scaling factors of cos and sin turn nothing and do not show."""
    buffer = getattr(rotary, f"{kind}_inv_freq" if kind else "inv_freq", None)
    if not isinstance(buffer, torch.Tensor):
        raise _refusal("its rotary embedding has no fixed frequencies")
    return buffer.detach().double()


@torch.inference_mode()
def _check(plan: LoadedModel, rotation: Rotation) -> None:
    """Keys of one token at several positions, in the layer below all attention, must be each other's rotations."""
    device = plan.device
    store = PagedKV(plan.num_layers, CHECK_BLOCK, plan.kv_heads, plan.head_dim, plan.dtype, device)
    blocks = [np.zeros(1, dtype=np.int32)]
    layout = lay_out([1] * CHECK_PLACES, [CHECK_PLACES], [0], blocks, CHECK_BLOCK, {})
    plan.stack.hidden(layout, plan.backend.step(layout, store), frozenset(), LayerSelection(last=1))
    keys = store.layers[0][:CHECK_PLACES, 0]
    moved = keys[:1].repeat(CHECK_PLACES, 1, 1)
    rotation.turn(moved, 0, torch.arange(CHECK_PLACES, device=device))
    error = (moved.float() - keys.float()).abs().max() / keys.float().abs().max().clamp_min(1e-6)
    if not error.item() <= TOLERANCE.get(plan.dtype, 3e-2):
        raise _refusal(f"a moved key differs by {error.item():.3g} of the largest number in it")


def _refusal(reason: str) -> TurnoutError:
    message = f"keys of this model cannot be moved to other positions: {reason}"
    return TurnoutError(Code.INVALID_ARGUMENT, message, "reuse")
