"""What runs a model's layers: the protocol, and the stack that uses the model's own modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from decoding.partial_forward import WHOLE, LayerSelection
from decoding.read_spec import FEED_FORWARD
from engine.architectures.base import ModelParts
from engine.attention.layout import Int64, Layout
from engine.attention.step import AttentionStep
from engine.backends.parallel_attention import ModuleHalves, normed, run_groups
from engine.backends.weight_packing import linear_part
from engine.rope import LengthRotary
from turnout.errors import Code, TurnoutError

# By the names that transformers has for it in decoder layers.
FEED_FORWARD_BLOCKS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")
Head = Callable[[torch.Tensor], torch.Tensor]  # normed hidden rows [R, hidden] -> float32 logits


class LayerStack(Protocol):
    """Runs embeddings, decoder layers, final norm and head of one model."""

    def hidden(
        self,
        layout: Layout,
        step: AttentionStep,
        taps: frozenset[int],
        depth: LayerSelection = WHOLE,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Embed and run the decoder layers.

        Args:
            layout: the batch, T tokens.
            step: its attention.
            taps: layers whose output is wanted too (0: the embeddings), and `FEED_FORWARD`; those that do not run, or
                run in groups, are left out, and the latter where no module is known as the feed-forward block.
            depth: which layers run.
            states: [T, hidden] what goes into the first of them; None: the embeddings.

        Returns:
            [T, hidden] before the final norm, and the tapped outputs [T, hidden].

        Raises:
            ValueError: this stack cannot skip what is to be skipped.
            TurnoutError: INVALID_ARGUMENT: this architecture has no file, without which layers cannot run in groups.
        """
        ...

    def setups(self, most_blocks: int) -> Iterable[tuple[int, int, int]]:
        """Batches whose first forward sets up what all alike use, as (sequences, tokens each feeds, blocks of one).

        Args:
            most_blocks: of the longest sequence.
        """
        ...

    def queries(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Queries of a layer, rotated and scaled: [R, heads, head_dim].

        Args:
            layer: which.
            hidden: [R, hidden] what goes into it.
            positions: int64 [R].

        Returns:
            None where this architecture does not compute them apart from keys and values.
        """
        ...

    def norm(self, hidden: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        """The final norm of rows `picked` (int64 [R]): [R, hidden]."""
        ...

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Normed hidden rows [R, hidden] -> float32 logits [R, columns of the head]."""
        ...

    def head_of(self, ids: torch.Tensor) -> Head | None:
        """The head of some ids (int64 [k]), which costs what they cost; None where it cannot be had apart."""
        ...


class ModuleStack:
    """The model's own modules, one after the other.

    Args:
        parts: the model.
    """

    def __init__(self, parts: ModelParts) -> None:
        self._parts = parts

    def hidden(
        self,
        layout: Layout,
        step: AttentionStep,
        taps: frozenset[int],
        depth: LayerSelection = WHOLE,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """See `LayerStack.hidden`; skips whole layers only."""
        device = self._parts.device
        ids, positions = (torch.from_numpy(array).to(device) for array in (layout.tokens, layout.positions))
        hidden = self._embed(ids, positions) if states is None else states[None].to(self._parts.norm.weight.dtype)
        angles = self._rotate(hidden, positions[None], layout.row_rope_lengths)
        if depth.groups:
            halves = self._halves(angles, step, positions)
            hidden, tapped = run_groups(halves, hidden, depth, len(angles), taps)
            return hidden[0], {layer: states[0] for layer, states in tapped.items()}
        tapped = {depth.first: hidden[0]} if depth.first in taps else {}
        with self._watched(tapped) if FEED_FORWARD in taps else nullcontext():
            for index in range(depth.first, len(angles) if depth.last is None else depth.last):
                skips = [2 * index + part in depth.skipped for part in (0, 1)]
                if any(skips) != all(skips):
                    raise ValueError("this architecture skips whole layers only")
                if not any(skips):
                    hidden = self._layer(index, hidden, angles, step, positions)
                if index + 1 in taps:
                    tapped[index + 1] = hidden[0]
        return hidden[0], tapped

    @contextmanager
    def _watched(self, tapped: dict[int, torch.Tensor]) -> Iterator[None]:
        """Note what goes into the last layer's feed-forward block while a forward runs."""
        last = self._parts.layers[-1]
        block = next((each for name in FEED_FORWARD_BLOCKS if (each := getattr(last, name, None)) is not None), None)
        if block is None:
            yield
            return

        def note(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            states: torch.Tensor = given[0] if given else next(iter(named.values()))
            tapped[FEED_FORWARD] = states.view(-1, states.shape[-1])

        hook = block.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def setups(self, most_blocks: int) -> Iterable[tuple[int, int, int]]:
        """See `LayerStack.setups`."""
        return ()

    def _embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._parts.embed(ids[None])
        return hidden if self._parts.positions is None else hidden + self._parts.positions(positions[None])

    def _layer(
        self, index: int, hidden: torch.Tensor, angles: list[Any], step: AttentionStep, positions: torch.Tensor
    ) -> torch.Tensor:
        """The residual stream after a layer, [1, T, hidden]."""
        if not self._parts.architecture.whole:
            halves = self._halves(angles, step, positions)
            return halves.feed_forward(index, hidden, halves.attentions(range(index, index + 1), hidden)[0])
        after: torch.Tensor = self._parts.layers[index](
            hidden,
            position_embeddings=angles[index],
            position_ids=positions[None],
            attention_mask=None,
            turnout_step=step,
            turnout_positions=positions,
        )
        return after

    def _halves(self, angles: list[Any], step: AttentionStep, positions: torch.Tensor) -> ModuleHalves:
        names = self._parts.architecture.halves
        if names is None:
            kind = self._parts.architecture.title
            message = f"layers of {kind!r} cannot run in groups: no file says what its layers consist of"
            raise TurnoutError(Code.INVALID_ARGUMENT, message, "model")
        return ModuleHalves(names, self._parts.layers, angles, step, positions[None])

    def _rotate(self, hidden: torch.Tensor, positions: torch.Tensor, lengths: Int64 | None = None) -> list[Any]:
        """Position embeddings of every layer; some architectures have one kind per layer type."""
        parts = self._parts
        if parts.rotary is None:
            return [None] * len(parts.layers)
        if isinstance(parts.rotary, LengthRotary):
            return [parts.rotary(hidden, positions, lengths)] * len(parts.layers)
        if not parts.layer_types:
            return [parts.rotary(hidden, positions)] * len(parts.layers)
        by_type = {kind: parts.rotary(hidden, positions, kind) for kind in set(parts.layer_types)}
        return [by_type[kind] for kind in parts.layer_types]

    def queries(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """See `LayerStack.queries`."""
        halves, module = self._parts.architecture.halves, self._parts.layers[layer]
        attention: Any = getattr(module, "self_attn", None)
        if halves is None or not self._parts.architecture.has_queries or getattr(attention, "q_proj", None) is None:
            return None
        states = hidden.to(self._parts.norm.weight.dtype)[None]
        cos, sin = self._rotate(states, positions[None])[layer]
        query: torch.Tensor = attention.q_proj(normed(module, halves.before_attention, states))[0]
        query = query.view(len(hidden), -1, attention.head_dim)
        if getattr(attention, "q_norm", None) is not None:
            query = attention.q_norm(query)
        rotates, scaling = self._parts.architecture.rotates, float(attention.scaling)
        if rotates is not None and not rotates(attention.config)[layer]:
            return query * scaling
        return rotated(query, cos[0, :, None], sin[0, :, None]) * scaling

    def norm(self, hidden: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        """See `LayerStack.norm`."""
        states: torch.Tensor = self._parts.norm(pick(hidden, picked))
        return states

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """See `LayerStack.logits`."""
        logits: torch.Tensor = self._parts.head(normed)
        return logits.float()

    def head_of(self, ids: torch.Tensor) -> Head | None:
        """See `LayerStack.head_of`."""
        head = linear_part(self._parts.head, ids)
        return None if head is None else lambda normed: head(normed).float()


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [R, heads, head_dim] turned by their positions; cos and sin [R, 1, rotated], the other numbers stay."""
    width = cos.shape[-1]
    turned, rest = heads[..., :width], heads[..., width:]
    swapped = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    return torch.cat((turned * cos + swapped * sin, rest), dim=-1)


def pick(hidden: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """Rows `picked` (in ascending order) of hidden [T, width]."""
    return hidden if len(picked) == len(hidden) else hidden.index_select(0, picked)
