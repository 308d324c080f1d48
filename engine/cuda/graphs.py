"""CUDA graphs of a model's layers: one for each bucket of batch shapes, captured on first use, replayed after that.

A decode step of a small batch is a few hundred kernels of a few microseconds; launching them one by one takes longer
than running them. A graph launches all of them at once, but only over the same memory: so every bucket has inputs of
its own, which a batch is copied into, padded (see `engine.cuda.metadata.pack` on what padding may touch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.layout import Layout
from engine.cache.store import KVStore
from engine.cuda.metadata import Extent, Metadata
from engine.cuda.paged_attention import Reach
from engine.cuda.step import CudaStep, PagedStep

MAX_ROWS = 64
# Smallest width of a block table, and the factor from one bucket's width to the next.
WIDTH, WIDER = 64, 4
# Rows of a sequence that feeds several, as a rule: a short draft. Wrong guesses cost time, nothing else.
TYPICAL_SPAN = 4

Work = Callable[[], torch.Tensor]


class Recording(Protocol):
    """Recorded work."""

    @property
    def output(self) -> torch.Tensor:
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
    output: torch.Tensor

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
        # The first graph owns the memory, which lives as long as some graph uses it: so this one is kept.
        self._first: torch.cuda.CUDAGraph | None = None

    def record(self, work: Work) -> CudaRecording:
        """See `Recorder.record`."""
        with torch.cuda.device(self._device):
            # Once outside the capture: kernels are compiled and libraries set up, which a capture does not allow.
            current, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
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
class Bucket:
    """Batches that one graph serves.

    Attributes:
        rows: fed tokens at most, a power of two; as many sequences at most.
        is_single: no sequence feeds more than one token.
        width: columns of the block tables.
    """

    rows: int
    is_single: bool
    width: int

    @classmethod
    def of(cls, layout: Layout) -> Bucket | None:
        """The smallest that holds a batch; None: more than `MAX_ROWS` rows."""
        if layout.num_tokens > MAX_ROWS:
            return None
        width = WIDTH
        while width < layout.blocks.shape[1]:
            width *= WIDER
        return cls(1 << (layout.num_tokens - 1).bit_length(), int(layout.counts.max()) == 1, width)


class Frame:
    """Inputs of one graph at fixed places, and the graph once it is recorded.

    Args:
        bucket: what it serves.
        step: of the batch that asks for it first.
        like: a table of rotary angles, [positions, 2, head_dim].
    """

    def __init__(self, bucket: Bucket, step: CudaStep, like: torch.Tensor) -> None:
        block_size = step.layout.block_size
        metadata = Metadata.empty(Extent(bucket.rows, bucket.rows, bucket.width), like.device)
        keys = bucket.width * block_size
        if bucket.is_single:
            reach = Reach(bucket.rows, bucket.rows, 1, keys)
        else:
            reach = Reach(bucket.rows, max(bucket.rows // TYPICAL_SPAN, 1), bucket.rows, keys)
        self.step = PagedStep(metadata, step.store, block_size, reach, step.processors)
        self.angles = like.new_empty(bucket.rows, *like.shape[1:])
        self.recording: Recording | None = None

    def load(self, layout: Layout, angles: torch.Tensor) -> None:
        """Take over a batch's inputs; angles [positions, 2, head_dim] reach to its highest position."""
        self.step.metadata.load(layout)
        torch.index_select(angles, 0, self.step.metadata.positions, out=self.angles)


class Graphs:
    """Runs a model's layers over batches of few rows.

    Args:
        layers: the work to record: (tokens [rows], angles [rows, 2, head_dim], attention) -> hidden [rows, hidden].
        recorder: records it.
    """

    def __init__(
        self, layers: Callable[[torch.Tensor, torch.Tensor, PagedStep], torch.Tensor], recorder: Recorder
    ) -> None:
        self._layers = layers
        self._recorder = recorder
        self._frames: dict[Bucket, Frame] = {}
        self._store: KVStore | None = None

    def run(self, bucket: Bucket, step: CudaStep, angles: torch.Tensor) -> torch.Tensor:
        """Hidden states of a batch in its bucket, [its rows, hidden]: valid until the next run.

        Args:
            bucket: of the batch.
            step: its layout and cache.
            angles: [positions, 2, head_dim], up to its highest position at least.
        """
        if step.store is not self._store:
            # Graphs hold the addresses of the cache they were recorded over.
            self._frames.clear()
            self._store = step.store
        frame = self._frames.get(bucket)
        if frame is None:
            frame = self._frames[bucket] = Frame(bucket, step, angles)
        frame.load(step.layout, angles)
        if frame.recording is None:
            frame.recording = self._recorder.record(lambda: self._forward(frame))
        else:
            frame.recording.replay()
        return frame.recording.output[: step.layout.num_tokens]

    def _forward(self, frame: Frame) -> torch.Tensor:
        return self._layers(frame.step.metadata.tokens, frame.angles, frame.step)
