"""Migration of calls to another replica: packing what it need not compute again, and unpacking it there.

Nothing here can fail a call: a cache that is too large, lost or another model's is left behind, and computed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Protocol, runtime_checkable

import torch

from decoding.model import Model
from decoding.sequence import Sequence
from engine.kv_operations import ExportKV, ImportKV
from turnout.cost import Meter
from turnout.moved_calls import Moved, MovedCache

log = logging.getLogger(__name__)

MOST_BYTES = 256 << 20  # of one call's caches: what a fast network moves in less than the time of a short prompt
PACK_S = 10.0  # for one cache: a model that does not answer must not hold up the call

WHOLE = 256  # tokens; a block is no larger, so that what is moved twice of a prompt joins what was moved once


@runtime_checkable
class MovesCaches(Protocol):
    """A model whose caches can be moved; see `engine.kv_operations`.

    Attributes:
        numerics: class of what computes it, see `engine.fingerprint.numerics_class`.
        token_bytes: KV of one token as it is moved.
    """

    numerics: str
    token_bytes: int


@runtime_checkable
class HasBlocks(Protocol):
    """A model that says how many tokens a block of its cache holds: caches are moved in whole blocks."""

    block_size: int


class HandOver:
    """Packs what the answers of one call have, one after the other.

    Args:
        models: by name.
        most_bytes: of all caches together; of what is more, the first tokens are taken.
    """

    def __init__(self, models: Mapping[str, Model], most_bytes: int = MOST_BYTES) -> None:
        self._models = models
        self._left = most_bytes
        self._with_prompt: set[str] = set()
        self._caches: list[MovedCache] = []
        self._meters: dict[int, Meter] = {}

    @property
    def packed(self) -> bool:
        """Whether any answer continues elsewhere."""
        return bool(self._meters)

    def moved(self, meters: list[Meter], streams: Meter | None = None) -> Moved:
        """What was packed, and the work done: of all answers, these meters where they ended here, and for streams."""
        return Moved(tuple(self._caches), {**dict(enumerate(meters)), **self._meters}, streams or Meter())

    async def pack(self, answer: int, seq: Sequence, whole: bool) -> None:
        """Take an answer's work along; the caches of its prompt only once for all answers.

        Args:
            answer: its number.
            seq: what it has so far; nothing is added any more.
            whole: whether the next replica continues from its tokens; otherwise only the prompt is of use there.
        """
        self._meters[answer] = deepcopy(seq.meter)
        if not whole:
            _discard_all(self._meters[answer])
        for name, model in self._models.items():
            if name not in seq.meter.models:
                continue  # it has not worked on this answer
            try:
                async with asyncio.timeout(PACK_S):
                    await self._pack(answer, seq, name, model, len(seq) if whole else seq.num_prompt_tokens)
            except Exception:
                log.exception("the cache of %s could not be taken along", name)

    async def _pack(self, answer: int, seq: Sequence, name: str, model: Model, stop: int) -> None:
        if not isinstance(model, MovesCaches):
            return
        per_token = model.token_bytes
        size = model.block_size if isinstance(model, HasBlocks) else WHOLE
        prompt = seq.num_prompt_tokens // size * size
        start = prompt if name in self._with_prompt else 0
        stop = min(stop, start + self._left // per_token)
        if stop <= start:
            return
        reserved = (stop - start) * per_token  # before it is there: none of it may be too much
        self._left -= reserved
        self._with_prompt.add(name)  # other answers are packed meanwhile
        ids: tuple[int, ...] = ()
        try:
            kv = (await model.do(seq, ExportKV(start, stop))).to("cpu")
            ids = tuple(seq.tokens[: start + kv.shape[1]])
        finally:
            self._left += reserved
            if len(ids) < prompt:
                self._with_prompt.discard(name)
        if kv.nbytes > 0:
            self._left -= kv.nbytes
            longest = min(seq.greatest_length, model.max_length)
            self._caches.append(MovedCache(answer, name, _digest(model), start, ids, kv.nbytes, kv, longest))


async def unpack(moved: Moved, models: Mapping[str, Model], sequences: list[Sequence]) -> int:
    """Put what came into the models' pools, and count the work done elsewhere as the sequences'.

    Args:
        moved: what another replica packed.
        models: by name.
        sequences: of the answers, which begin as they did there; those that are made again have their prompt only.

    Returns:
        Tokens whose keys and values need not be computed, summed over models.
    """
    for answer, meter in moved.meters.items():
        if answer < len(sequences):
            sequences[answer].meter.merge(_counted(meter, sequences[answer]))
    count = 0
    for cache in sorted(moved.caches, key=lambda each: (each.answer, each.start)):
        try:
            if cache.answer < len(sequences):
                count += await _unpack(cache, models.get(cache.model), sequences[cache.answer])
        except Exception:
            log.exception("the cache of %s could not be taken over", cache.model)
    return count


async def _unpack(cache: MovedCache, model: Model | None, seq: Sequence) -> int:
    if model is None or _digest(model) != cache.digest or not isinstance(cache.kv, torch.Tensor):
        return 0
    pairs = zip(cache.ids, seq.tokens, strict=False)
    same = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(cache.ids), len(seq)))
    if same <= cache.start:
        return 0
    kv = cache.kv[:, : same - cache.start]
    if not isinstance(model, MovesCaches):
        return 0
    held = await model.do(seq, ImportKV(cache.start, kv, cache.longest))
    return max(min(held, same) - cache.start, 0)


def _digest(model: Model) -> str:
    """Whose a cache is: another model's is of no use, and one that was computed otherwise is not exact."""
    numerics = model.numerics if isinstance(model, MovesCaches) else ""
    return f"{model.digest} {numerics}"


def _counted(meter: Meter, seq: Sequence) -> Meter:
    """Work done elsewhere; where the sequence does not begin with all that was written there, that was in vain."""
    meter = deepcopy(meter)
    if sum(each.generated_tokens for each in meter.models.values()) > len(seq.generated):
        _discard_all(meter)
    return meter


def _discard_all(meter: Meter) -> None:
    """What was written will be written again."""
    for each in meter.models.values():
        each.discarded_tokens += each.generated_tokens
        each.generated_tokens = 0
