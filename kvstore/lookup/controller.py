"""Fetch or recompute, how much, and at which quality: decided from what the link, the codecs and the engine do now.

Source: #238 CacheGen (step 5, the streaming controller). Pure but for the clock: it does no I/O and starts nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from kvstore.encodings import Encoding

WEIGHT = 0.5  # of the newest measurement; times per byte are averaged, so that one slow chunk shows at once
STALE_S = 3.0  # a link not measured within this time may have changed: it is tried again
NEAR = 1.1  # a better quality is taken if it costs no more than this many times the fastest
PATIENCE = 3.0  # a chunk may take this many times its estimate
LEAST_PATIENCE_S = 0.02
WORTH = 0.1  # and this part of the time to compute everything, which it may save
MOST_STEPS = 64  # numbers of chunks that are compared


GATE_WEIGHT = 0.2  # of the newest look-up in the mean time of those that found nothing
FADE = 0.98  # of what is known of a tenant, with each look-up: about the last fifty count
STREAK = 8  # look-ups of a tenant that found nothing, one after the other, before any is left out
TRIES = 16  # one of this number of look-ups that would not pay is made: only so are chunks of others seen
MOST_TENANTS = 1024


@dataclass(frozen=True, slots=True)
class Level:
    """A encoding in which chunks are stored: a codec.

    Attributes:
        codec: its name.
        chunk_bytes: expected size of an encoded chunk.
        available: chunks found in this encoding, from the first wanted one on.
    """

    codec: str
    chunk_bytes: int
    available: int


@dataclass(frozen=True, slots=True)
class FetchQuery:
    """Input of a decision.

    Attributes:
        levels: best quality first.
        raw_bytes: of a decoded chunk.
        rest: number of chunks fetched -> predicted seconds to compute all that is then missing.
        elapsed_s: time this request has spent on fetching so far.
        target_s: everything, fetching and computing, should take no longer, where that can be had; None: the fastest.
        budget_s: fetching may take no longer, on top of `elapsed_s`.
        own_bytes: of the bytes that are queued, those that this request asked for.
    """

    levels: Sequence[Level]
    raw_bytes: int
    rest: Callable[[int], float]
    elapsed_s: float = 0.0
    target_s: float | None = None
    budget_s: float = float("inf")
    own_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Next step of a look-up.

    Attributes:
        codec: the encoding to fetch; "" where nothing is fetched.
        chunks: how many to fetch; 0: compute.
        expected_s: estimate of everything, what has elapsed included.
        patience_s: longest wait for the next chunk: then it is given up.
        compute_s: estimate of everything if nothing more is fetched.
        other_s: estimate of the best choice that was not taken: another codec or none.
        explores: whether it is only to learn how fast the link is.
    """

    codec: str
    chunks: int
    expected_s: float
    patience_s: float
    compute_s: float
    other_s: float
    explores: bool = False


class Availability:
    """Number of leading chunks of a run that can be read in each encoding. Thread-safe.

    Args:
        counts: by encoding, as a probe found them.
    """

    def __init__(self, counts: dict[Encoding, int]) -> None:
        self._lock = Lock()
        self._counts = counts
        self._refused: int | None = None

    def cut(self, encoding: Encoding, count: int) -> None:
        """Limit an encoding to its first `count` chunks."""
        with self._lock:
            self._counts[encoding] = min(self._counts[encoding], count)

    def refuse(self, encoding: Encoding, index: int) -> bool:
        """Drop a chunk, and what follows it, from an encoding; return whether another encoding has that chunk."""
        self.cut(encoding, index)
        with self._lock:
            if not any(count > index for count in self._counts.values()):
                return False
            self._refused = index if self._refused is None else min(index, self._refused)
            return True

    def take_refused(self) -> int | None:
        """Take, once, the first chunk that was refused and is there in another encoding; None: there is none."""
        with self._lock:
            refused, self._refused = self._refused, None
            return refused

    @property
    def is_refused(self) -> bool:
        """Whether `take_refused` has a chunk."""
        return self._refused is not None

    @property
    def most(self) -> int:
        """Chunks available in the encoding that has the most."""
        return max(self._counts.values(), default=0)

    def after(self, done: int) -> dict[Encoding, int]:
        """Count the chunks behind the first `done`, for the encodings that have any."""
        return {encoding: count - done for encoding, count in list(self._counts.items()) if count > done}

    def __len__(self) -> int:
        return len(self._counts)


class Controller:
    """Estimates of one link, and decisions from them. Any thread may call.

    Args:
        clock: monotonic, seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._trip: float | None = None  # seconds
        self._per_byte: float | None = None  # seconds
        self._measured = float("-inf")
        self._decoding: dict[str, float] = {}  # seconds per byte of the decoded chunk
        self._ratio: dict[str, float] = {}  # encoded bytes per raw byte
        self._queued = 0

    def round_trip(self, seconds: float) -> None:
        """Note the time of a request without payload."""
        with self._lock:
            self._trip = _mean(self._trip, seconds)

    def received(self, codec: str, size: int, raw_size: int, seconds: float) -> None:
        """Note the seconds in which a value of `size` bytes (decoded: `raw_size`) came through the link."""
        with self._lock:
            now = self._clock()
            old = self._per_byte if now - self._measured <= STALE_S else None  # what was long ago says little
            self._per_byte, self._measured = _mean(old, max(seconds, 1e-9) / max(size, 1)), now
            self._ratio[codec] = _mean(self._ratio.get(codec), size / max(raw_size, 1))

    def decoded(self, codec: str, raw_size: int, seconds: float) -> None:
        """Note the seconds of checking and decoding a value of `raw_size` decoded bytes."""
        with self._lock:
            self._decoding[codec] = _mean(self._decoding.get(codec), seconds / max(raw_size, 1))

    def stalled(self, size: int, seconds: float) -> None:
        """Note the seconds in which no complete value came, where one of `size` bytes was waited for."""
        with self._lock:
            slowness = seconds / max(size, 1)
            if self._per_byte is None or slowness > self._per_byte:
                self._per_byte = slowness
            self._measured = self._clock()

    def queue(self, size: int) -> None:
        """Add to the bytes that are asked for (negative: no longer)."""
        with self._lock:
            self._queued = max(0, self._queued + size)

    def chunk_bytes(self, codec: str, raw_size: int, otherwise: int) -> int:
        """Estimate the size of an encoded chunk; `otherwise` before any was seen."""
        ratio = self._ratio.get(codec)
        return otherwise if ratio is None else int(ratio * raw_size)

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None before anything came."""
        return None if self._per_byte is None else 1.0 / self._per_byte

    @property
    def trip_s(self) -> float:
        """Round trip, seconds; 0 before one was measured."""
        return self._trip or 0.0

    def fetch_s(self, level: Level, chunks: int, raw_bytes: int, own_bytes: int = 0) -> float:
        """Estimate the time to fetch chunks: decoding overlaps the transfer, except that of the last chunk."""
        if not chunks:
            return 0.0
        with self._lock:
            per_byte = self._per_byte or 0.0
            decode = self._decoding.get(level.codec, 0.0) * raw_bytes
            transfer = per_byte * level.chunk_bytes
            queue = per_byte * max(0, self._queued - own_bytes)
            return (self._trip or 0.0) + queue + max(transfer, decode) * chunks + min(transfer, decode)

    def decide(self, query: FetchQuery) -> Decision:
        """Decide how many chunks to fetch and in which encoding.

        Of the encodings that meet the target the best is taken, else the fastest; what is estimated to take longer than
        the budget is none. A link whose speed is not known is tried with one chunk.
        """
        compute = query.elapsed_s + query.rest(0)
        unknown = self._per_byte is None or self._clock() - self._measured > STALE_S
        best = [each for level in query.levels if (each := self._best(query, level)) is not None]
        chosen = _choose(query, best, compute)
        if chosen is None:
            if unknown and any(level.available for level in query.levels) and _may_explore(query):
                return _explore(query, compute)
            other = min((total for total, _, _ in best), default=compute)
            return Decision("", 0, compute, 0.0, compute, other)
        total, chunks, level = chosen
        other = min([each for each, _, taken in best if taken is not level] + [compute])
        first = self.fetch_s(level, 1, query.raw_bytes, query.own_bytes)
        patience = max(PATIENCE * first, LEAST_PATIENCE_S, (0.5 if unknown else WORTH) * query.rest(0))
        if query.target_s is not None and compute < query.target_s:  # leave the time to compute everything still
            patience = max(1.5 * first, min(patience, query.target_s - compute))
        return Decision(level.codec, chunks, total, min(patience, query.budget_s), compute, other, unknown)

    def _best(self, query: FetchQuery, level: Level) -> tuple[float, int, Level] | None:
        """Find the number of chunks that is fastest in this encoding, and its estimate."""
        most = level.available
        step = max(1, most // MOST_STEPS)
        found: tuple[float, int, Level] | None = None
        for chunks in sorted({*range(step, most + 1, step), *((most,) if most else ())}):
            fetch = self.fetch_s(level, chunks, query.raw_bytes, query.own_bytes)
            if fetch > query.budget_s:
                break
            total = query.elapsed_s + fetch + query.rest(chunks)
            if found is None or total < found[0]:
                found = total, chunks, level
        return found


def _choose(query: FetchQuery, best: list[tuple[float, int, Level]], compute: float) -> tuple[float, int, Level] | None:
    """Choose the first encoding that meets the target, else the first that is about as fast as the fastest."""
    faster = [each for each in best if each[0] < compute]
    if not faster:
        return None
    if query.target_s is not None:
        for each in faster:
            if each[0] <= query.target_s:
                return each
    limit = NEAR * (min(each[0] for each in faster) - query.elapsed_s) + query.elapsed_s
    return next(each for each in faster if each[0] <= limit)


def _may_explore(query: FetchQuery) -> bool:
    compute = query.elapsed_s + query.rest(0)
    return query.target_s is None or not (compute <= query.target_s < compute + LEAST_PATIENCE_S)


def _explore(query: FetchQuery, compute: float) -> Decision:
    """Fetch one chunk in the smallest encoding, for no longer than a fraction of the time to compute."""
    level = min((each for each in query.levels if each.available), key=lambda each: each.chunk_bytes)
    patience = max(WORTH * query.rest(0), LEAST_PATIENCE_S)
    if query.target_s is not None and compute < query.target_s:
        patience = min(patience, query.target_s - compute)
    return Decision(level.codec, 1, compute, min(patience, query.budget_s), compute, compute, True)


def regret(decision: Decision, actual_s: float) -> float:
    """Return the seconds that the best other choice would have saved, by its estimate."""
    return max(0.0, actual_s - min(decision.other_s, decision.compute_s))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1.0 - WEIGHT) * old + WEIGHT * new


@dataclass(slots=True)
class _Record:
    """Outcomes of a tenant's look-ups, discounted with age."""

    hits: float = 0.0
    made: float = 0.0
    streak: int = 0
    left_out: int = 0


class LookupGate:
    """Comparison of the time a look-up takes with the computing it may save. For one event loop.

    A look-up takes a round trip, two changes of thread, and, where many prompts come together, their common forward.
    So what look-ups that found nothing took of late is measured, and set against the chance of a hit, by how the
    tenant's look-ups went, times the time to compute what is missing.
    """

    def __init__(self) -> None:
        self._fruitless_s: float | None = None
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def pays(self, tenant: str, compute_s: float) -> bool:
        """Tell whether to look; a tenant with a short record is looked up for.

        Args:
            tenant: whose prompt it is.
            compute_s: predicted time to compute what is missing, in seconds.
        """
        record = self._records.get(tenant)
        if record is None or record.streak < STREAK or self._fruitless_s is None:
            return True
        if compute_s * (record.hits + 1.0) / (record.made + 2.0) >= self._fruitless_s:
            return True
        record.left_out += 1
        return record.left_out % TRIES == 0

    def looked(self, tenant: str, found: bool, seconds: float) -> None:
        """Note the time and the outcome of a look-up."""
        record = self._records.setdefault(tenant, _Record())
        self._records.move_to_end(tenant)
        while len(self._records) > MOST_TENANTS:
            self._records.popitem(last=False)
        record.hits = FADE * record.hits + found
        record.made = FADE * record.made + 1.0
        record.streak = 0 if found else record.streak + 1
        if not found:
            old = self._fruitless_s
            self._fruitless_s = seconds if old is None else (1.0 - GATE_WEIGHT) * old + GATE_WEIGHT * seconds
