"""What tenants' stores may hold, and who loses one where there is too much."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from decoding.backoff_ngrams import BackoffNgrams
from decoding.drafter_state import OPENINGS_BETWEEN_COUNTS, Stores
from decoding.drafters.aded import GUESSES, TrigramStore
from decoding.ngrams import RecentTexts
from decoding.sequence import Sequence
from turnout.types import SamplingParams

VOCAB = 32_000


@dataclass
class Sized:
    nbytes: int = 0


def test_a_tenant_that_opens_many_kinds_loses_its_own() -> None:
    stores = Stores(most=10)
    quiet = [stores.open(f"matrix/{i}", "quiet", list) for i in range(3)]
    for i in range(300):
        stores.open(f"domain/{i}", "loud", list)
    assert [stores.open(f"matrix/{i}", "quiet", list) for i in range(3)] == quiet
    assert all(stores.open(f"matrix/{i}", "quiet", list) is quiet[i] for i in range(3))
    last = stores.open("domain/299", "loud", list)
    assert stores.open("domain/299", "loud", list) is last


def test_bytes_are_bounded_and_the_tenant_that_holds_most_gives() -> None:
    stores = Stores(most_bytes=1000)
    small = stores.open("rows", "quiet", Sized)
    small.nbytes = 300
    first, second = (stores.open(kind, "loud", Sized) for kind in ("first", "second"))
    first.nbytes = second.nbytes = 400
    for _ in range(OPENINGS_BETWEEN_COUNTS):
        stores.open("rows", "quiet", Sized)
    assert stores.nbytes == 700
    assert stores.open("rows", "quiet", Sized) is small
    assert stores.open("second", "loud", Sized) is second
    assert stores.open("first", "loud", Sized) is not first


def test_stores_within_stores_count() -> None:
    stores = Stores(most_bytes=1000)
    within = stores.open("trimmed", "loud", Stores)
    within.open("rows", "loud", Sized).nbytes = 1100
    for _ in range(OPENINGS_BETWEEN_COUNTS):
        stores.open("other", "quiet", list)
    assert stores.nbytes == 0


def learn_trigrams(store: TrigramStore, draw: Random) -> None:
    for _ in range(10_000):
        guesses = tuple((draw.randrange(VOCAB), draw.random()) for _ in range(GUESSES))
        store.learn((draw.randrange(VOCAB), draw.randrange(VOCAB)), guesses, 1.0)


def learn_ngrams(store: BackoffNgrams, draw: Random) -> None:
    for _ in range(200):
        before = [draw.randrange(VOCAB), draw.randrange(VOCAB)]
        for _ in range(8):
            store.learn(before, [(draw.randrange(VOCAB), draw.random()) for _ in range(4)])


def learn_texts(store: RecentTexts, draw: Random) -> None:
    for _ in range(20):
        store.add([draw.randrange(VOCAB) for _ in range(1000)])


@pytest.mark.parametrize(
    ("make", "learn"), [(TrigramStore, learn_trigrams), (BackoffNgrams, learn_ngrams), (RecentTexts, learn_texts)]
)
def test_what_a_store_says_it_holds_is_about_what_it_holds(
    make: Callable[[], Any], learn: Callable[[Any, Random], None]
) -> None:
    draw = Random(1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        store = make()
        learn(store, draw)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / 2 <= store.nbytes <= 2 * held


def test_what_is_learnt_on_an_account_of_the_pools_own_is_apart_and_goes_with_the_tenant() -> None:
    stores = Stores()
    seqs = [Sequence([1], SamplingParams(), seed=0, tenant=name) for name in ("ann", "bob", "ann", "bob")]
    for seq in seqs[2:]:
        seq.tenant = "(shadow)"
    texts = [stores.open("texts", seq.learner, list) for seq in seqs]
    assert len({id(each) for each in texts}) == 4
    assert stores.open("texts", "ann", list) is texts[0]
    fork = seqs[2].fork(seed=1)
    assert stores.open("texts", fork.learner, list) is texts[2]
    stores.forget("ann")
    assert len(stores) == 2
    assert stores.open("texts", seqs[3].learner, list) is texts[3]
    assert stores.open("texts", seqs[2].learner, list) is not texts[2]
