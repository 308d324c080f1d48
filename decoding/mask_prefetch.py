"""Mask prefetch: compute a constraint's masks during the forward pass whose rows they are for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

from decoding.constraints.base import Constraint
from decoding.logits import bound_rows
from decoding.row_context import RowContext

# Tokens in all masks of a step below which waking a thread costs more than they do.
LEAST = 60_000

Asked = tuple[Constraint, list[int], list[tuple[int, ...]]]


def spares_core(device: torch.device) -> bool:
    """Return whether a forward on the device leaves a core for another thread.

    On the CPU a forward's own threads wait for each other several times a layer: where they have all cores, one that
    loses its core for a mask stops the others.
    """
    return device.type != "cpu" or torch.get_num_threads() < (os.cpu_count() or 1)


class MaskPrefetch:
    """Mask prefetcher: asks constraints what they will be asked after a forward, on a thread of its own.

    A constraint remembers its answers; a caller that asks before the thread did computes the mask itself. No result
    depends on what the thread has done, or that it has done anything. The thread ends when this is forgotten.

    Args:
        spare: whether there is a core for the thread; asked before each forward, on the forward's thread.
    """

    def __init__(self, spare: Callable[[], bool]) -> None:
        self._spare = spare
        self._thread: ThreadPoolExecutor | None = None

    @contextmanager
    def of(self, rows: Rows[RowContext]) -> Iterator[None]:
        """Ask from now on until the context ends; at its end the thread is idle."""
        asked = [
            (seq.constraint, seq.answer, [rows[i].path for i in places])
            for seq, places in bound_rows(rows).items()
            if seq.constraint is not None and seq.constraint.remembers
        ]
        worth = sum(constraint.vocab_size * len(paths) for constraint, _, paths in asked) >= LEAST
        if not (asked and worth and self._spare()):
            yield
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        over = threading.Event()
        work = self._thread.submit(_ask, asked, over)
        try:
            yield
        finally:
            over.set()
            if not work.cancel():
                wait([work])


def _ask(asked: list[Asked], over: threading.Event) -> None:
    for constraint, answer, paths in asked:
        if over.is_set():
            return
        constraint.masks(answer, paths)
