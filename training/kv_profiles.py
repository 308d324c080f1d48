"""What codecs of the shared store must know of a pool's models: norms, ranges and distributions of keys and values.

The models read conversations as they will be served: prompts with the large model's own answers, one alone and many in
a row, so that near and far positions are seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from decoding.artifacts import Artifact
from decoding.sequence import Sequence as Tokens
from engine.cache.table import BlockTable
from engine.model import EngineModel
from kvstore.codecs.adaquant import choose_widths
from kvstore.codecs.cachegen import GROUP, SPAN
from kvstore.profiles import cell_bytes
from pool.local_pool import LocalPool
from training.length_data import Source
from turnout.calls import ChatMessage
from turnout.errors import invalid
from turnout.types import SamplingParams

Advance = Callable[[str, int, int], None]  # what is being done, how much of it, out of how much

FEWEST = 8
AT_ONCE = 16
ROWS = (1, 24)  # turns of the conversations that are read, in turn
ROOM = 0.9  # of a model's longest sequence that they take at most
ANCHOR_CELLS = 32
DIFFERENCE_CELLS = 64
SIGMAS = 5.0  # of an anchor's range: rarer values are kept outside the streams
LEAST_SPREAD = 1e-4  # of a channel, relative to its layer's


@dataclass(frozen=True)
class Profiles:
    """What a run makes.

    Attributes:
        artifacts: by codec family.
        report: what was found, in plain values.
    """

    artifacts: dict[str, Artifact]
    report: dict[str, Any]


async def make_profiles(
    pool: LocalPool, prompts: Sequence[str], sampling: SamplingParams, seed: int, advance: Advance = lambda *_: None
) -> Profiles:
    """Profiles of a pool's models, one artifact for each codec family that has one.

    Args:
        pool: its models stay as they are.
        prompts: user messages.
        sampling: how the large model answers them.
        seed: of the answers.
        advance: called with progress.

    Raises:
        TurnoutError: INVALID_ARGUMENT: fewer than 8 prompts; or `models.NAME.kv_dtype`, a model that keeps bytes.
    """
    for name in pool.roles.values():
        if (kept := pool.engines[name].store.kv_dtype) != "auto":
            raise invalid(f"models.{name}.kv_dtype", f"{kept!r}: profiles are of a model's own numbers; set it to auto")
    if len(prompts) < FEWEST:
        raise invalid("prompts", f"there are {len(prompts)}; at least {FEWEST} are needed")
    answers = await _answers(pool, prompts, sampling, seed, advance)
    read = conversations(pool, list(zip(prompts, answers, strict=True)))
    tensors: dict[str, dict[str, torch.Tensor]] = {"adaquant": {}, "cachegen": {}}
    report: dict[str, Any] = {"conversations": len(read), "tokens": sum(map(len, read)), "models": {}}
    digests = {role: pool.engines[name].digest for role, name in pool.roles.items()}
    for role, name in pool.roles.items():
        shapes = Shapes()
        for done, tokens in enumerate(read, start=1):
            shapes.add(await read_kv(pool.engines[name], tokens))
            advance(f"ranges of the {role} model", done, len(read))
        histograms = shapes.histograms()
        for done, tokens in enumerate(read, start=1):
            histograms.add(await read_kv(pool.engines[name], tokens))
            advance(f"distributions of the {role} model", done, len(read))
        for family, found in (("adaquant", shapes.norms()), ("cachegen", histograms.tensors())):
            tensors[family] |= {f"{role}.{key}": each for key, each in found.items()}
        report["models"][role] = shapes.report()
    settings = {"conversations": len(read), "tokens": report["tokens"], "seed": seed}
    artifacts = {
        family: Artifact(f"kv-{family}", "training.kv_profiles", settings, digests, found)
        for family, found in tensors.items()
    }
    return Profiles(artifacts, report)


async def _answers(
    pool: LocalPool, prompts: Sequence[str], sampling: SamplingParams, seed: int, advance: Advance
) -> list[str]:
    """The large model's, in order."""
    large = pool.model_pool.large
    ids = [pool.tokenizer.encode_chat([ChatMessage("user", prompt)]) for prompt in prompts]
    source = Source(ids, sampling, frozenset(pool.tokenizer.eos_ids), seed)

    async def answer(index: int) -> str:
        seq = source.sequence(index)
        try:
            segment = await large.decode(seq)
        finally:
            large.release(seq)
        return pool.tokenizer.decode([token.id for token in segment.tokens])

    found: list[str] = []
    for start in range(0, len(prompts), AT_ONCE):
        found += await asyncio.gather(*(answer(i) for i in range(start, min(start + AT_ONCE, len(prompts)))))
        advance("answering", len(found), len(prompts))
    return found


def conversations(pool: LocalPool, turns: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Token ids of conversations out of questions and answers: each alone, and many in one, as far as there is room."""
    most = int(ROOM * pool.max_length)
    found = []
    for length in ROWS:
        for start in range(0, len(turns) - length + 1, length):
            messages = [
                ChatMessage(role, text)
                for turn in turns[start : start + length]
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
            found.append(pool.tokenizer.encode_chat(messages)[:most])
    return found


async def read_kv(model: EngineModel, tokens: Sequence[int]) -> torch.Tensor:
    """A model's keys and values at all of some tokens but the last, [layers, tokens - 1, 2, kv_heads, head_dim]."""
    seq = Tokens(tokens, SamplingParams(max_tokens=1), 0)
    try:
        await model.prefill_ahead(seq)
        return cached_kv(model.batcher.tables[seq])
    finally:
        model.release(seq)


def cached_kv(table: BlockTable) -> torch.Tensor:
    """What a table's tokens have in the cache, on the CPU: [layers, tokens, 2, kv_heads, head_dim]."""
    slots = torch.tensor(table.slots(0, len(table)), device=table.store.device)
    return torch.stack([layer.index_select(0, slots).cpu() for layer in table.store.layers])


def _by_channel(kv: torch.Tensor) -> torch.Tensor:
    """As float32 [layers, 2, tokens, channels]."""
    return kv.float().flatten(3).transpose(1, 2)


def _groups(values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Anchors [layers, 2, 1, channels] and the tokens [layers, 2, n, channels] that follow each."""
    for start in range(0, values.shape[2], GROUP):
        yield values[:, :, start : start + 1], values[:, :, start + 1 : start + GROUP]


@dataclass
class Shapes:
    """Sums over tokens, for means, norms, ranges and spreads; [layers, 2, channels] each where nothing else is said."""

    tokens: int = 0
    pairs: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    least: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    most: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def add(self, kv: torch.Tensor) -> None:
        """Count a sequence's [layers, tokens, 2, kv_heads, head_dim]."""
        values = _by_channel(kv)
        wide = values.double()
        pairs = list(_groups(wide))
        others = torch.cat([each for _, each in pairs], 2)
        anchors = torch.cat([anchor.expand_as(each) for anchor, each in pairs], 2)
        new = {
            "sum": wide.sum(2),
            "squares": wide.square().sum(2),
            "others": others.sum(2),
            "others_squares": others.square().sum(2),
            "anchors": anchors.sum(2),
            "anchors_squares": anchors.square().sum(2),
            "products": (others * anchors).sum(2),
            "gram": wide.transpose(2, 3) @ wide,  # [layers, 2, channels, channels]
        }
        self.sums = {name: self.sums[name] + each if self.sums else each for name, each in new.items()}
        self.least = torch.minimum(self.least, values.amin(2)) if self.tokens else values.amin(2)
        self.most = torch.maximum(self.most, values.amax(2)) if self.tokens else values.amax(2)
        self.tokens += values.shape[2]
        self.pairs += others.shape[2]

    def norms(self) -> dict[str, torch.Tensor]:
        """For AdaQuant: `norms` (Frobenius) and `spectral` [layers, 2], `singular_values` [layers, 2, channels]."""
        singular = torch.linalg.eigvalsh(self.sums["gram"]).clamp_min(0).sqrt().flip(-1)
        frobenius = self.sums["squares"].sum(-1).sqrt()
        return {
            "norms": frobenius.float(),
            "spectral": singular[..., 0].float().contiguous(),
            "singular_values": singular.float().contiguous(),
        }

    def histograms(self) -> Histograms:
        """Empty ones over the ranges found."""
        mean, sigma = self.sums["sum"] / self.tokens, self._variance().sqrt()
        weight, shift, left = self._prediction()
        spread = torch.maximum(left.sqrt(), LEAST_SPREAD * left.mean(-1, keepdim=True).sqrt() + 1e-6)
        low = torch.maximum(self.least.double(), mean - SIGMAS * sigma) - spread / 100
        high = torch.minimum(self.most.double(), mean + SIGMAS * sigma) + spread / 100
        named = {"low": low, "high": high, "weight": weight, "shift": shift, "spread": spread}
        return Histograms({name: each.float() for name, each in named.items()})

    def _variance(self) -> torch.Tensor:
        return (self.sums["squares"] / self.tokens - (self.sums["sum"] / self.tokens).square()).clamp_min(0)

    def _prediction(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weight and shift by which an anchor best foretells the tokens after it, and the variance that is left."""
        means = {name: each / max(self.pairs, 1) for name, each in self.sums.items() if name != "gram"}
        of_anchors = (means["anchors_squares"] - means["anchors"].square()).clamp_min(0)
        shared = means["products"] - means["anchors"] * means["others"]
        weight = shared / of_anchors.clamp_min(1e-12)
        left = means["others_squares"] - means["others"].square() - weight * shared
        return weight, means["others"] - weight * means["anchors"], left.clamp_min(0)

    def report(self) -> dict[str, Any]:
        """By layer: norms' ratio and the widths that follow; variances over those of what CacheGen codes."""
        norms = self.norms()["norms"].double()
        _, _, left = self._prediction()
        plain = self.sums["others_squares"] + self.sums["anchors_squares"] - 2 * self.sums["products"]
        of_values, of_differences = self._variance().sum(-1), plain.sum(-1) / max(self.pairs, 1)
        return {
            "tokens": self.tokens,
            "key_norm_over_value_norm": [round(float(k / v), 3) for k, v in norms],
            "widths": [choose_widths(float(k), float(v)) for k, v in norms],
            "variance_of_values": _by_side(of_values / left.sum(-1)),
            "variance_of_plain_differences": _by_side(of_differences / left.sum(-1)),
        }


def _by_side(ratios: torch.Tensor) -> dict[str, list[float]]:
    """[layers, 2] in plain values."""
    return {side: [round(float(each), 3) for each in ratios[:, place]] for place, side in enumerate(("keys", "values"))}


class Histograms:
    """How often values of anchors and of differences to them are met, channel by channel.

    Args:
        ranges: `low`, `high`, `weight`, `shift` and `spread` of `kvstore.codecs.cachegen`.
    """

    def __init__(self, ranges: dict[str, torch.Tensor]) -> None:
        self._ranges = ranges
        size = ranges["spread"].shape
        self._anchors = torch.zeros((*size, ANCHOR_CELLS), dtype=torch.int64)
        self._differences = torch.zeros((*size, DIFFERENCE_CELLS), dtype=torch.int64)

    def add(self, kv: torch.Tensor) -> None:
        """Count a sequence's [layers, tokens, 2, kv_heads, head_dim]."""
        ranges = {name: each[:, :, None] for name, each in self._ranges.items()}
        groups = list(_groups(_by_channel(kv)))
        anchors = torch.cat([anchor for anchor, _ in groups], 2)
        foretold = [anchor * ranges["weight"] + ranges["shift"] for anchor, _ in groups]
        differences = torch.cat([others - near for (_, others), near in zip(groups, foretold, strict=True)], 2)
        _count(self._anchors, (anchors - ranges["low"]) / (ranges["high"] - ranges["low"]))
        _count(self._differences, differences / (2 * SPAN * ranges["spread"]) + 0.5)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What `kvstore.codecs.cachegen` reads."""
        cells = {"anchors": self._anchors, "differences": self._differences}
        codes = {name: torch.from_numpy(cell_bytes(_smooth(each))) for name, each in cells.items()}
        return self._ranges | codes


def _count(cells: torch.Tensor, places: torch.Tensor) -> None:
    """Add places [layers, 2, n, channels], of which those from 0 to 1 count, to cells [layers, 2, channels, cells]."""
    width = cells.shape[-1]
    within = (places >= 0) & (places < 1)
    cell = (places.nan_to_num(0.0).clamp(0, 1) * width).long().clamp_max(width - 1).transpose(2, 3)
    cells.scatter_add_(3, cell, within.transpose(2, 3).long())


def _smooth(counts: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Counts with a share of their neighbours' and a little for what was never met."""
    wide = counts.double().numpy()
    padded = np.pad(wide, [(0, 0)] * (wide.ndim - 1) + [(1, 1)], mode="edge")
    near = 0.25 * padded[..., :-2] + 0.5 * wide + 0.25 * padded[..., 2:]
    found: np.ndarray[Any, np.dtype[np.float64]] = near + near.sum(-1, keepdims=True) / (1000 * wide.shape[-1])
    return found
