"""Triton in a process of its own. Whether kernels are interpreted is settled when Triton is imported, for good."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.architectures.base import ModelParts
from engine.attention.layout import Layout
from engine.attention.step import Scores
from engine.backends.cuda.graphs import Work
from engine.backends.stacks import LayerStack, ModuleStack
from engine.cache.paged_kv import PagedKV

Call = Callable[..., Any]


@contextmanager
def triton_process(interpreted: bool, cache: Path) -> Iterator[Call]:
    """Calls functions of a module in another process: call(function, *arguments).

    Args:
        interpreted: kernels run on the CPU, in numpy.
        cache: where compiled kernels go.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=torch.set_num_threads, initargs=(1,)) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", str(int(interpreted)))
            patch.setenv("TRITON_CACHE_DIR", str(cache))
            process.submit(abs, 0).result()  # the process is born with these settings, whatever it imports
        yield lambda function, *arguments: process.submit(function, *arguments).result()


def attend(
    layout: Layout, store: PagedKV, query: torch.Tensor, pairs: torch.Tensor, scores: Scores, processors: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the CUDA step computes, and the cache after it."""
    from engine.backends.cuda.step import CudaStep

    out = CudaStep(layout, store, processors).attend(0, query, pairs, scores)
    return out.clone(), store.layers[0].clone()


def attend_padded(
    layout: Layout, store: PagedKV, query: torch.Tensor, pairs: torch.Tensor, scores: Scores, rows: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the metadata padded to `rows` rows and sequences, after another batch has used their place."""
    from engine.backends.cuda.metadata import Extent, Metadata
    from engine.backends.cuda.paged_attention import Reach
    from engine.backends.cuda.step import PagedStep

    metadata = Metadata.empty(Extent(rows, rows, width), store.device)
    metadata.flat.fill_(1)
    metadata.load(layout)
    padding = rows - len(query)
    query = torch.cat((query, query.new_full((padding, *query.shape[1:]), float("nan"))))
    pairs = torch.cat((pairs, pairs.new_full((padding, *pairs.shape[1:]), float("nan"))))
    step = PagedStep(metadata, store, layout.block_size, Reach(rows, 4, rows, width * layout.block_size), 8)
    out = step.attend(0, query, pairs, scores)
    return out[: rows - padding].clone(), store.layers[0].clone()


class Rerun:
    """Stands in for a CUDA graph on the CPU: the same work over the same memory, into the same output."""

    def __init__(self, work: Work) -> None:
        self._work = work
        hidden, taps = work()
        self.output = hidden.clone(), {layer: tapped.clone() for layer, tapped in taps.items()}

    def replay(self) -> None:
        hidden, taps = self._work()
        self.output[0].copy_(hidden)
        for layer, tapped in taps.items():
            self.output[1][layer].copy_(tapped)


class Reruns:
    """Stands in for `CudaRecorder`."""

    def __init__(self) -> None:
        self.recorded: list[Rerun] = []

    def record(self, work: Work) -> Rerun:
        self.recorded.append(Rerun(work))
        return self.recorded[-1]


class InterpretedBackend:
    """`CudaBackend` on the CPU: kernels interpreted, graphs replaced by `Reruns`."""

    name = "interpreted"
    keeps_trees = True

    def __init__(self, processors: int = 8) -> None:
        self.recorder = Reruns()
        self._processors = processors

    def stack(self, parts: ModelParts, dtype: torch.dtype) -> LayerStack:
        from engine.backends.cuda.stack import CudaStack

        return CudaStack(parts, dtype, self.recorder) if parts.fused else ModuleStack(parts)

    def step(self, layout: Layout, store: PagedKV) -> Any:
        from engine.backends.cuda.step import CudaStep

        return CudaStep(layout, store, self._processors)


def check_architecture(name: str) -> int:
    """`assert_equals_plain_forward` over the interpreted backend; returns how many graphs were recorded."""
    import engine.loading
    from engine.backends.cuda.stack import CudaStack
    from tests.engine.architectures import assert_equals_plain_forward

    backend = InterpretedBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.loading, "choose_backend", lambda *_: backend)
        patch.setattr(CudaStack, "setups", lambda *_: ())  # interpreted, they would take minutes
        asyncio.run(assert_equals_plain_forward(name, "auto", "cpu"))
    return len(backend.recorder.recorded)


def check_replays(name: str, changes: dict[str, Any]) -> None:
    """`assert_replays_equal_launches` of a small model over the interpreted backend."""
    import engine.loading
    from tests.engine.architectures import config_of
    from tests.engine.replays import assert_replays_equal_launches
    from training.random_models import random_model

    backend = InterpretedBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.loading, "choose_backend", lambda *_: backend)
        model = random_model(config_of(name, num_hidden_layers=4, **changes), seed=3, spread=0.2)
        plan = engine.loading.prepare(model).plan
    recorded = len(backend.recorder.recorded)
    assert_replays_equal_launches(plan, torch.device("cpu"))
    assert len(backend.recorder.recorded) > recorded


def compile_kernel(
    name: str, pointers: dict[str, str], constants: dict[str, Any], capability: int, options: dict[str, int]
) -> int:
    """Compile a kernel for a GPU that need not be there, to machine code; returns its shared memory in bytes.

    Args:
        name: of the kernel.
        pointers: argument -> Triton type; every other argument is a 32-bit integer or one of `constants`.
        constants: compile-time arguments.
        capability: of the GPU, as in sm_90.
        options: warps and stages.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.backends.cuda import fused_kernels, kernels

    kernel = getattr(kernels, name, None) or getattr(fused_kernels, name)
    signature = {argument: pointers.get(argument, "i32") for argument in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, places), target=GPUTarget("cuda", capability, 32), options=options
    )
    assert len(compiled.asm["cubin"]) > 0
    return int(compiled.metadata.shared)


def flipped(layout: Layout, sequence: int, row: int, node: int) -> Layout:
    """The layout with one bit of a tree's mask wrong."""
    mask = layout.trees[sequence].clone()
    mask[row, node] = ~mask[row, node]
    return replace(layout, trees={**layout.trees, sequence: mask})
