"""The model's own embeddings of texts: the mean of its last hidden states, as `/v1/embeddings` pools them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items

import torch

from decoding.candidates import reading
from decoding.model import Model, ReadSpec
from decoding.sequence import Sequence
from decoding.steps import without_end

MEAN = ReadSpec(draw=None, mean=True)


async def mean_states(model: Model, seq: Sequence, texts: Items[tuple[int, ...]]) -> torch.Tensor:
    """Read texts each alone, in one batch: float32 [n, hidden] on the CPU, the mean over each text's tokens.

    Args:
        model: reads.
        seq: the request's, whose work it is.
        texts: tokens of each; a token that ends an answer is left out.
    """

    async def one(ids: tuple[int, ...]) -> torch.Tensor:
        with reading(model, seq, without_end(ids, seq.end_ids) or ids) as text:
            [row] = await model.extend(text, want=MEAN)
        assert row.mean is not None
        return row.mean.float().cpu()

    return torch.stack(await asyncio.gather(*map(one, texts)))


async def embeddings(model: Model, seq: Sequence, texts: Items[tuple[int, ...]]) -> torch.Tensor:
    """Embed texts: unit vectors [n, hidden] of `mean_states`."""
    return torch.nn.functional.normalize(await mean_states(model, seq, texts), dim=1)
