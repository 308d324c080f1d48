"""Forwards in which some sequences take over KV: the others' rows and what these compute run as one batch.

The first stage of dual-stage high deviation: every token goes through the first layers, where the KV taken over is
compared with what is computed; the tokens that deviate most are computed on, with those that nothing was taken over
for, and the queries of the layers above attend to a mixture of taken and computed KV. The second stage: a new token's
attention, times the deviation, selects the reused tokens that are computed again with the next one. Source: paper #222,
"KVShare: An LLM Service System with Efficient and Effective Multi-Tenant KV Cache Reuse".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from decoding.model import Readout
from decoding.partial_forward import WHOLE, LayerSelection
from engine.attention.layout import Int64, Layout
from engine.cache.paged_kv import PagedKV
from engine.loaded_model import LoadedModel
from engine.reuse.partial_rows import Again, Bools, Picked, pick
from engine.reuse.reused_spans import Partial, ReuseCounts
from engine.reuse.rotation import Rotation
from engine.reuse.settings import ReuseSettings
from engine.runner import Feed, Runner
from turnout.errors import Code, TurnoutError

Taps = dict[int, torch.Tensor]


class ReusingRunner(Runner):
    """A runner that also runs feeds with a `partial`.

    Args:
        plan: the model's layers.
        store: its KV tensors.
        block_size: tokens per block.
        device: where the model lives.
        rotation: moves its keys.
        check_layers: see `ReuseSettings`; the last layer is never one of them.

    Attributes:
        counts: what was done so far.
    """

    def __init__(
        self,
        plan: LoadedModel,
        store: PagedKV,
        block_size: int,
        device: torch.device,
        rotation: Rotation,
        check_layers: int,
    ) -> None:
        super().__init__(plan, store, block_size, device)
        self.rotation = rotation
        self.counts = ReuseCounts()
        self._check_layers = max(min(check_layers, plan.num_layers - 1), 1)
        # What a token looks at is read off the last layer.
        self._watched = plan.num_layers - 1

    def _run(self, feeds: Sequence[Feed], depth: LayerSelection) -> list[list[Readout]]:
        partials = {
            place: feed.partial for place, feed in enumerate(feeds) if feed.partial is not None and feed.partial.acts
        }
        if depth != WHOLE or not partials:
            return super()._run(feeds, depth)
        for partial in partials.values():
            self._take_over(partial)
        batch = _Batch(self._lay_out(feeds), partials)
        taps = self.tapped(feeds)
        if any(partial.watches for partial in partials.values()):
            taps |= {self._watched}
        checked = {place: partial for place, partial in partials.items() if _checks(partial)}
        if checked:
            old = {place: self._pairs(partial) for place, partial in checked.items()}
            first = batch.pick({place: partial.given for place, partial in partials.items() if place not in checked})
            hidden, below = self._layers(first.layout, taps, LayerSelection(last=self._check_layers))
            left = {place: self._settle(partial, old.get(place)) for place, partial in partials.items()}
            second = batch.pick(left)
            rows = torch.from_numpy(first.rows_of(second.names)).to(self.device)
            below = {layer: states.index_select(0, rows) for layer, states in below.items()}
            hidden, above = self._layers(
                second.layout, taps, LayerSelection(first=self._check_layers), hidden.index_select(0, rows)
            )
            above = below | above
            runs = [(first, self._check_layers), (second, self.plan.num_layers - self._check_layers)]
        else:
            left = {place: self._settle(partial, None) for place, partial in partials.items()}
            second = batch.pick(left)
            hidden, above = self._layers(second.layout, taps, WHOLE)
            runs = [(second, self.plan.num_layers)]
        for place, partial in partials.items():
            self._account(partial, [(picked.starts, place, layers) for picked, layers in runs])
            if partial.watches:
                self._watch(partial, above[self._watched][int(second.starts[place + 1]) - 1])
        read = torch.from_numpy(batch.rows_read(feeds, second)).to(self.device)
        return self._deliver(feeds, hidden, above, second.starts, read)

    def _layers(
        self, layout: Layout, taps: frozenset[int], depth: LayerSelection, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Taps]:
        if layout.num_tokens == 0:  # everything is taken over
            hidden = torch.zeros(0, self.plan.width, device=self.device) if states is None else states
            return hidden, dict.fromkeys(taps, hidden)
        return self.plan.stack.hidden(layout, self.plan.backend.step(layout, self.store), taps, depth, states)

    def _take_over(self, partial: Partial) -> None:
        """Put what is taken over into its slots, for its new positions."""
        if len(partial.given):
            sources, shifts = (torch.from_numpy(each).to(self.device) for each in (partial.sources, partial.shifts))
            self.rotation.move(self.store, sources, self._slots(partial), shifts)

    def _slots(self, partial: Partial) -> torch.Tensor:
        return torch.from_numpy(slots_of(partial.feed, partial.given)).to(self.device)

    def _pairs(self, partial: Partial) -> torch.Tensor:
        """float32 [g, 2, kv_heads x head_dim]: KV of what was taken over, in the last of the layers that check."""
        return self.store.layers[self._check_layers - 1].index_select(0, self._slots(partial)).float().flatten(2)

    def _settle(self, partial: Partial, old: torch.Tensor | None) -> Int64:
        """What stays as it was taken over, of `given`; by how far it was off, unless nothing was checked."""
        reused, settings = partial.reused, partial.reused.settings
        deviations = np.full(len(partial.given), np.nan, dtype=np.float32)
        chosen = np.zeros(len(partial.given), dtype=np.bool_)
        if old is not None:
            new = self._pairs(partial)
            unit = new.norm(dim=2).sum(1).mean().clamp_min(1e-9)
            deviations = ((new - old).norm(dim=2).sum(1) / unit).cpu().numpy()
            chosen = chosen_of(deviations, settings, int(partial.given[0]))
        deviations[chosen] = np.nan
        reused.deviations[partial.given] = deviations
        reused.deviations[partial.again] = np.nan
        done = ReuseCounts(len(partial.given), int(chosen.sum()), len(partial.again))
        reused.counts.add(done)
        self.counts.add(done)
        return partial.given[~chosen]

    def _account(self, partial: Partial, runs: list[tuple[np.ndarray, int, int]]) -> None:
        """What was computed for it, in tokens that go through all layers."""
        rows = sum(int(starts[place + 1] - starts[place]) * layers for starts, place, layers in runs)
        partial.spared = len(partial.feed.tokens) - rows / self.plan.num_layers
        full = ReuseCounts(rows=round(rows / self.plan.num_layers))
        partial.reused.counts.add(full)
        self.counts.add(full)

    def _watch(self, partial: Partial, hidden: torch.Tensor) -> None:
        """Choose the tokens to compute again with the next one, by the attention of this token, [hidden] there."""
        reused, feed = partial.reused, partial.feed
        places = np.flatnonzero(~np.isnan(reused.deviations))
        reused.again = []
        if feed.num_rows or not len(places):
            return
        length = len(feed.table) + len(feed.tokens)
        position = torch.tensor([length - 1], device=self.device)
        query = self.plan.stack.queries(self._watched, hidden[None], position)
        if query is None:
            return
        slots = torch.from_numpy(slots_of(feed, np.arange(length))).to(self.device)
        keys = self.store.layers[self._watched][slots, 0].float()  # [length, kv_heads, head_dim]
        grouped = query[0].float().view(keys.shape[1], -1, keys.shape[2])
        weights = torch.einsum("kgd,lkd->kgl", grouped, keys).softmax(-1).mean((0, 1))
        worth = weights.cpu().numpy()[places] * reused.deviations[places]
        best = np.argsort(-worth, kind="stable")[: reused.settings.decode_tokens]
        reused.again = sorted(places[best].tolist())


class _Batch:
    """A batch as the runner lays it out, and what of it is run."""

    def __init__(self, layout: Layout, partials: dict[int, Partial]) -> None:
        self._layout = layout
        self._partials = partials
        self._again = {place: _again(partial) for place, partial in partials.items() if partial.again}

    def pick(self, left_out: dict[int, Int64]) -> Picked:
        """Everything but these places of some sequences."""
        kept: dict[int, Bools] = {}
        for sequence, places in left_out.items():
            if len(places):
                kept[sequence] = np.ones(int(self._layout.counts[sequence]), dtype=np.bool_)
                kept[sequence][places - len(self._partials[sequence].table)] = False
        return pick(self._layout, self._again, kept)

    def rows_read(self, feeds: Sequence[Feed], picked: Picked) -> Int64:
        """Where the rows that are read stand among the picked ones."""
        starts = self._layout.starts.tolist()
        names = [starts[place] + index for place, feed in enumerate(feeds) for index, _, _ in feed.reads]
        return picked.rows_of(np.asarray(names, dtype=np.int64))


def chosen_of(deviations: np.ndarray, settings: ReuseSettings, seed: int) -> Bools:
    """Which tokens taken over are computed again: bool [g].

    Args:
        deviations: [g] how far each is off.
        settings: how many, and how they are chosen.
        seed: of random choices.
    """
    most = int(np.ceil(settings.recompute * len(deviations) - 1e-9))
    chosen = np.zeros(len(deviations), dtype=np.bool_)
    if settings.select == "random":
        chosen[np.random.default_rng(seed).permutation(len(deviations))[:most]] = True
    else:
        chosen[np.argsort(-deviations, kind="stable")[:most]] = True
        if settings.recompute < 1:
            chosen &= deviations > settings.threshold
    return chosen


def slots_of(feed: Feed, places: Int64) -> Int64:
    """Where the KV of these places of a feed's sequence lies."""
    size = feed.table.pool.block_size
    return feed.table.block_array[places // size].astype(np.int64) * size + places % size


def _again(partial: Partial) -> Again:
    places = np.asarray(partial.again, dtype=np.int64)
    tokens = np.asarray([partial.table.seq.tokens[place] for place in partial.again], dtype=np.int64)
    return Again(places, tokens, slots_of(partial.feed, places))


def _checks(partial: Partial) -> bool:
    return len(partial.given) > 0 and partial.reused.settings.recompute > 0


def reusing_runner(runner: Runner, settings: ReuseSettings) -> ReusingRunner:
    """A runner in place of another that runs the same, and feeds with a `partial` too.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the model's keys cannot be moved, or its attention does not take part of the
            rows of a sequence.
    """
    if not runner.plan.keeps_trees:
        message = "reuse: rows in the middle of a sequence need full attention in every layer, on the CPU"
        raise TurnoutError(Code.INVALID_ARGUMENT, message, "reuse")
    if runner.plan.kv_dtype != "auto":
        message = f"reuse: needs kv_dtype auto, since rounded keys cannot be moved; it is {runner.plan.kv_dtype!r}"
        raise TurnoutError(Code.INVALID_ARGUMENT, message, "reuse")
    if runner.plan.num_layers < 2:
        raise TurnoutError(Code.INVALID_ARGUMENT, "reuse: needs a model of at least two layers", "reuse")
    rotation = Rotation.of(runner.plan)
    return ReusingRunner(runner.plan, runner.store, runner.block_size, runner.device, rotation, settings.check_layers)
