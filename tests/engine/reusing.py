"""Models that take over spans, and what is read of them, for tests of reuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine.model import EngineModel
from engine.reuse.reused_spans import ReuseCounts
from engine.reuse.settings import ReuseSettings
from tests.engine.harness import Reference, twins
from training.random_models import llama_config
from turnout.types import SamplingParams, Sharing

SIZE = 8
LLAMA = llama_config(
    150, num_hidden_layers=5, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, max_position_embeddings=2048
)
TENANT = Sharing.private("a")


def reusing(settings: ReuseSettings, **options: Any) -> tuple[EngineModel, Reference]:
    """A random model that takes over spans, and the plain one."""
    model, plain = twins(options.pop("config", LLAMA), seed=4, spread=0.15, **{"block_size": SIZE, **options})
    model.reuse(settings)
    return model, plain


def text(seed: int, count: int) -> list[int]:
    """Random tokens."""
    drawn: list[int] = np.random.default_rng(seed).integers(2, 150, count).tolist()
    return drawn


# A prompt that was seen, and one that has two of its pieces in another order: 32 tokens and 80.
A, B, C = text(1, 24), text(2, 80), text(3, 40)
OLD = [*A, *B, *C]
NEW = [*text(4, 13), *C[:32], *text(5, 7), *B, *text(6, 9)]


def sequence(tokens: list[int], lossy: bool = False, sharing: Sharing = TENANT, most: int = 50) -> Sequence:
    """Greedy, of one tenant."""
    sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    return Sequence(tokens, sampling, seed=0, sharing=sharing, lossy=lossy)


async def logits(model: EngineModel, seq: Sequence, extra: tuple[int, ...] = ()) -> torch.Tensor:
    """float32 [1 + extra, vocab] after the sequence's last token and after each of `extra`."""
    rows = await model.extend(seq, extra, ReadSpec(draw=None, logits=True), every=True)
    return torch.stack([row.logits.float().cpu() for row in rows if row.logits is not None])


async def remember(model: EngineModel, tokens: list[int], sharing: Sharing = TENANT) -> None:
    """Let a model compute a prompt, and go."""
    seq = sequence(tokens, sharing=sharing)
    await model.extend(seq)
    model.release(seq)


def counts(model: EngineModel, seq: Sequence) -> ReuseCounts:
    """What a sequence took over so far."""
    reused = model.batcher.tables[seq].reused
    return ReuseCounts() if reused is None else reused.counts


def cached(model: EngineModel, seq: Sequence) -> list[torch.Tensor]:
    """Each layer's KV of a sequence: [cached tokens, 2, kv_heads, head_dim]."""
    table = model.batcher.tables[seq]
    slots = torch.tensor(table.slots(0, len(table)))
    return [layer[slots] for layer in model.store.layers]


def divergence(expected: torch.Tensor, got: torch.Tensor) -> float:
    """KL(expected || got) of logits [n, vocab], in nats, averaged over rows."""
    log_p, log_q = expected.log_softmax(-1), got.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


async def assert_nothing_is_left(model: EngineModel) -> None:
    """Every block was given back."""
    model.pool.check_integrity()
    assert model.pool.num_held == 0
    assert not model.batcher.tables
    await model.close()
