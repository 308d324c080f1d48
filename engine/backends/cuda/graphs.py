"""CUDA graphs of a model's layers: one for each bucket of batch shapes, captured once, replayed after that.

A decode step of a small batch is a few hundred kernels of a few microseconds; launching them one by one takes longer
than running them. A graph launches all of them at once, but only over the same memory: so every bucket has inputs of
its own, which a batch is copied into, padded (see `engine.backends.cuda.metadata.pack` on what padding may touch).

Drafters that read inner layers, or run only some of them, have graphs of their own as well: one such request launched
kernel by kernel would slow down every request of its batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from decoding.partial_forward import WHOLE, LayerSelection
from engine.attention.layout import Layout
from engine.backends.cuda.buckets import Bucket
from engine.backends.cuda.metadata import Extent, Metadata
from engine.backends.cuda.step import CudaStep, PagedStep
from engine.cache.paged_kv import PagedKV

# A part of the layers is recorded once it has run so often: a search for layers to leave out tries most sets briefly.
OFTEN = 4
# Recordings of parts that are kept at once, those used last; twice as many parts are counted that have none.
MOST_PARTS = 64

# Hidden states after the layers, and what was tapped: layer -> [rows, hidden].
Output = tuple[torch.Tensor, dict[int, torch.Tensor]]
Work = Callable[[], Output]


class Recording(Protocol):
    """Recorded work."""

    @property
    def output(self) -> Output:
        """What the work returned; every replay writes there."""
        ...

    def replay(self) -> None:
        """Do the work again, over the same memory."""
        ...


class Recorder(Protocol):
    """Records work that reads and writes the same memory every time."""

    def record(self, work: Work) -> Recording:
        """Do the work once, and record it."""
        ...


@dataclass(frozen=True, slots=True)
class CudaRecording:
    """A captured graph; see `Recording`."""

    graph: torch.cuda.CUDAGraph
    output: Output

    def replay(self) -> None:
        """See `Recording.replay`."""
        self.graph.replay()


class CudaRecorder:
    """Captures CUDA graphs that share their working memory; see `Recorder`.

    Sharing means that a graph's output is valid until any other of them runs.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for all: cuBLAS keeps a workspace of megabytes for every stream it ever saw.
        self._aside: torch.cuda.Stream | None = None
        # The first graph owns the memory, which lives as long as some graph uses it: so this one is kept.
        self._first: torch.cuda.CUDAGraph | None = None

    def record(self, work: Work) -> CudaRecording:
        """See `Recorder.record`."""
        with torch.cuda.device(self._device):
            # Once outside the capture: kernels are compiled and libraries set up, which a capture does not allow.
            current = torch.cuda.current_stream()
            aside = self._aside = self._aside or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                work()
            current.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            pool = None if self._first is None else self._first.pool()
            # Other threads may allocate meanwhile: draft distributions are judged outside the forward's thread.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                output = work()
            self._first = self._first or graph
            graph.replay()
        return CudaRecording(graph, output)


@dataclass(frozen=True, slots=True)
class Part:
    """What one graph runs.

    Attributes:
        depth: which layers.
        taps: those whose output is wanted too, 0 for the embeddings.
    """

    depth: LayerSelection = WHOLE
    taps: frozenset[int] = frozenset()


ALL = Part()
# The work to record: (part, tokens [rows], states [rows, hidden] into its first layer unless that is 0, angles
# [rows, 2, head_dim], attention) -> what comes out.
Layers = Callable[[Part, torch.Tensor, torch.Tensor | None, torch.Tensor, PagedStep], Output]


class Frame:
    """Inputs of one graph at fixed places, and the graph once it is recorded.

    Args:
        bucket: what it serves.
        step: of the batch that asks for it first.
        like: a table of rotary angles, [positions, 2, head_dim], of the hidden states' dtype.
        states: of that batch, [tokens, hidden]; None: the embeddings go into the first layer.
    """

    def __init__(self, bucket: Bucket, step: CudaStep, like: torch.Tensor, states: torch.Tensor | None) -> None:
        block_size = step.layout.block_size
        metadata = Metadata.empty(Extent(bucket.rows, bucket.rows, bucket.width), like.device)
        self.step = PagedStep(metadata, step.store, block_size, bucket.reach(block_size), step.processors)
        self.angles = like.new_empty(bucket.rows, *like.shape[1:])
        self.states = None if states is None else like.new_zeros(bucket.rows, states.shape[1])
        self.recording: Recording | None = None

    def load(self, layout: Layout, angles: torch.Tensor, states: torch.Tensor | None) -> None:
        """Take over a batch's inputs; angles [positions, 2, head_dim] reach to its highest position."""
        self.step.metadata.load(layout)
        torch.index_select(angles, 0, self.step.metadata.positions, out=self.angles)
        if self.states is not None and states is not None:
            self.states[: len(states)].copy_(states)


class Graphs:
    """Runs a model's layers over batches of few rows.

    Args:
        layers: the work to record.
        recorder: records it.
    """

    def __init__(self, layers: Layers, recorder: Recorder) -> None:
        self._layers = layers
        self._recorder = recorder
        self._frames: dict[Bucket, Frame] = {}
        self._parts: OrderedDict[tuple[Bucket, Part], Frame] = OrderedDict()
        self._runs: OrderedDict[tuple[Bucket, Part], int] = OrderedDict()
        self._store: PagedKV | None = None

    def wants(self, bucket: Bucket, part: Part) -> bool:
        """Whether a part that is about to run should run in a graph: all layers always, others once they run often.

        Each call counts as one run of the part.
        """
        key = (bucket, part)
        if part == ALL or key in self._parts:
            return True
        runs = self._runs[key] = self._runs.pop(key, 0) + 1
        if len(self._runs) > 2 * MOST_PARTS:
            self._runs.popitem(last=False)
        return runs >= OFTEN

    def run(
        self, bucket: Bucket, part: Part, step: CudaStep, angles: torch.Tensor, states: torch.Tensor | None = None
    ) -> Output:
        """What comes out of a batch in its bucket, [its rows, hidden] each: valid until the next run.

        Args:
            bucket: of the batch.
            part: what is to run.
            step: its layout and cache.
            angles: [positions, 2, head_dim], up to its highest position at least.
            states: [its rows, hidden] what goes into the part's first layer, unless that is 0.
        """
        if step.store is not self._store:
            # Graphs hold the addresses of the cache they were recorded over.
            self._frames.clear()
            self._parts.clear()
            self._store = step.store
        frame = self._frame(bucket, part)
        if frame is None:
            frame = self._keep(bucket, part, Frame(bucket, step, angles, states))
        frame.load(step.layout, angles, states)
        if frame.recording is None:
            frame.recording = self._recorder.record(lambda: self._forward(part, frame))
        else:
            frame.recording.replay()
        hidden, taps = frame.recording.output
        rows = step.layout.num_tokens
        return hidden[:rows], {layer: tapped[:rows] for layer, tapped in taps.items()}

    def _frame(self, bucket: Bucket, part: Part) -> Frame | None:
        if part == ALL:
            return self._frames.get(bucket)
        key = (bucket, part)
        if key in self._parts:
            self._parts.move_to_end(key)
        return self._parts.get(key)

    def _keep(self, bucket: Bucket, part: Part, frame: Frame) -> Frame:
        if part == ALL:
            self._frames[bucket] = frame
            return frame
        self._parts[bucket, part] = frame
        self._runs.pop((bucket, part), None)
        if len(self._parts) > MOST_PARTS:
            self._parts.popitem(last=False)
        return frame

    def _forward(self, part: Part, frame: Frame) -> Output:
        return self._layers(part, frame.step.metadata.tokens, frame.states, frame.angles, frame.step)
