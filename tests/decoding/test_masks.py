"""Masks of large vocabularies: what one may cost, and that working them out beforehand changes nothing."""

from __future__ import annotations

import os
import random
import string
import threading
import time
from collections.abc import Sequence as Rows
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.random_vocabulary import random_vocabulary
from decoding import mask_prefetch as ahead
from decoding.constraints.base import Constraint, Mask, allows, is_forced
from decoding.logits import keep_allowed, process
from decoding.mask_prefetch import MaskPrefetch, spares_core
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.structures import Compiler
from tests.constrained import allowed_ids, char_compiler, ids_in
from turnout.errors import TurnoutError
from turnout.structure import Structure
from turnout.types import SamplingParams

VOCAB = 32_000
WORST_S = 3.0  # of processor time, which a busy neighbour may double; 0.2 to 0.3 s are seen, without bounds minutes
NASTY = {
    "many words": "\n | ".join(f"/[a-z]*{a}{b}[a-z]*/" for a in "abcdefghij" for b in "etaoinshrd"),
    "far repeats": "\n | ".join(f"/[a-z]*{a}.{{8}}{a}[a-z]*/" for a in string.ascii_lowercase),
}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(random_vocabulary(VOCAB))


@pytest.mark.parametrize("name", list(NASTY))
def test_the_worst_mask_is_bounded(compiler: Compiler, name: str) -> None:
    """A grammar that would need states without number is refused, or fails its answer, after a bounded time."""
    draw, worst, answer, failure = random.Random(1), 0.0, list[int](), ""
    started = time.thread_time()
    try:
        made = compiler.compile(Structure(kind="grammar", value=f"start: (x)*\nx: {NASTY[name]}")).clone()
    except TurnoutError as refused:
        failure = refused.message
    worst = time.thread_time() - started
    while not failure and len(answer) < 8:
        started = time.thread_time()
        ids = allowed_ids(made, answer)
        worst, failure = max(worst, time.thread_time() - started), made.failure
        answer.append(draw.choice(ids or [0]))
    assert "too many" in failure
    assert worst < WORST_S


@pytest.mark.parametrize(
    "value", [{"enum": ["".join(random.Random(i).choices("abcdef", k=9)) for i in range(1024)]}, {"type": "object"}]
)
def test_what_is_usual_stays_far_below_the_limits(compiler: Compiler, value: object) -> None:
    made, draw, answer = (
        compiler.compile(Structure.model_validate({"json_schema": value})).clone(),
        random.Random(2),
        [],
    )
    for _ in range(60):
        ids = [each for each in allowed_ids(made, answer) or () if each not in made.end_ids]
        assert made.failure == ""
        if not ids:
            break
        answer.append(draw.choice(ids))
    assert answer


def test_a_tree_of_paths_is_each_path_alone(compiler: Compiler) -> None:
    value = Structure.model_validate({"json_schema": {"type": "array", "items": {"type": "string"}}})
    made, draw, paths = compiler.compile(value), random.Random(3), [()]
    answer = [(allowed_ids(made, []) or [0])[0]]
    while len(paths) < 40:
        path = draw.choice(paths)
        ids = allowed_ids(made.clone(), [*answer, *path]) or [0]
        paths.append((*path, draw.choice(ids) if draw.random() < 0.9 else 0))
    draw.shuffle(paths)
    together = made.clone().masks(answer, paths)
    for path, mask in zip(paths, together, strict=True):
        assert ids_in(mask) == allowed_ids(made.clone(), [*answer, *path])
        ids = set(ids_in(mask) or ())
        assert all(allows(mask, token) == (token in ids) for token in (0, 1, 7, *list(ids)[:3], VOCAB + 64))


def test_rows_of_any_device_and_width_are_exact() -> None:
    draw = np.random.default_rng(1)
    for vocab in (8, 33, 1000):
        logits = torch.randn(3, vocab)
        allowed = draw.random((3, vocab)) < 0.5
        packed = np.packbits(allowed, axis=1, bitorder="little")
        kept = keep_allowed(logits, [0, 1, 2], list(packed))
        assert torch.equal(kept, logits.masked_fill(torch.from_numpy(~allowed), float("-inf")))


class Watched(Constraint):
    """Notes who asks."""

    def __init__(self, made: Constraint, fails: bool = False) -> None:
        self.made, self.fails, self.asked = made, fails, list[tuple[str, list[int], list[tuple[int, ...]]]]()
        self.end_ids, self.vocab_size, self.failure, self.come = made.end_ids, made.vocab_size, "", threading.Event()
        self.remembers = True

    def masks(self, answer: list[int], paths: Rows[tuple[int, ...]]) -> list[Mask | None]:
        self.asked.append((threading.current_thread().name, list(answer), list(paths)))
        self.come.set()
        if self.fails:
            raise RuntimeError("planted")
        return self.made.masks(answer, paths)

    def accepts(self, tokens: list[int]) -> bool:
        return self.made.accepts(tokens)

    def clone(self) -> Constraint:
        return Watched(self.made.clone())


@pytest.mark.parametrize("fails", [False, True])
def test_masks_are_asked_for_beside_the_forward(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(ahead, "LEAST", 0)
    seq, free = [Sequence([5, 6], SamplingParams(temperature=0.7), 0) for _ in range(2)]
    watched = seq.constraint = Watched(char_compiler().compile(Structure(kind="regex", value="[a-c]+;")).clone(), fails)
    rows = [RowContext(seq), RowContext(free), RowContext(seq, (2, 3)), RowContext(seq, (30,), free=True)]
    logits = torch.randn(4, 40)
    with MaskPrefetch(lambda: True).of(rows):
        assert watched.come.wait(10)
    [(thread, answer, paths)] = watched.asked
    assert thread.startswith("masks")
    assert (answer, paths) == ([], [(), (2, 3)])
    watched.fails = False
    alone = Sequence([5, 6], SamplingParams(temperature=0.7), 0)
    alone.constraint = char_compiler().compile(Structure(kind="regex", value="[a-c]+;")).clone()
    expected = process(logits, [RowContext(alone), RowContext(free), RowContext(alone, (2, 3)), RowContext(free)])
    assert torch.equal(process(logits, rows), expected)


def test_no_thread_where_nothing_or_little_is_constrained() -> None:
    free, bound = [Sequence([5], SamplingParams(), 0) for _ in range(2)]
    watched = bound.constraint = Watched(char_compiler().compile(Structure(kind="regex", value="[a-c]+;")).clone())
    made = MaskPrefetch(lambda: True)
    with made.of([RowContext(free), RowContext(bound)]):
        pass
    assert made._thread is None
    assert watched.asked == []


def test_no_thread_where_the_forward_has_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LEAST", 0)
    seq = Sequence([5], SamplingParams(), 0)
    watched = seq.constraint = Watched(char_compiler().compile(Structure(kind="regex", value="[a-c]+;")).clone())
    made = MaskPrefetch(partial(spares_core, torch.device("cpu")))
    monkeypatch.setattr(torch, "get_num_threads", lambda: os.cpu_count())
    with made.of([RowContext(seq)]):
        pass
    assert made._thread is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 0)
    with made.of([RowContext(seq)]):
        assert watched.come.wait(10)
    assert spares_core(torch.device("cuda"))


def test_no_choice_is_left_by_one_token_or_by_those_that_end_the_answer() -> None:
    def mask(*ids: int) -> Mask:
        return np.packbits(np.isin(np.arange(32), ids), bitorder="little")

    ends = frozenset({0, 1})
    assert is_forced(mask(5), 32, ends)
    assert is_forced(mask(0, 1), 32, ends)
    assert is_forced(mask(5, 20), 20, ends)  # the model has 20 tokens
    assert not is_forced(mask(1, 5), 32, ends)
    assert not is_forced(mask(5, 6), 32, ends)
    assert not is_forced(mask(), 32, ends)
