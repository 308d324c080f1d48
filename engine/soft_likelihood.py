"""Differentiable reading by a model in this process: see `decoding.soft_likelihood.SoftLikelihood`."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from decoding.sequence import Sequence
from decoding.soft_likelihood import SoftLikelihood, SoftScores, fluency, mixtures
from engine.checkpoints import read_model, reading
from engine.costs.limits import available_memory
from engine.device import to_its_end
from engine.fixed_lanes import let_steps_pass
from turnout.config import model_path
from turnout.errors import busy, invalid, out_of_range

if TYPE_CHECKING:
    from engine.model import EngineModel

FIELD = "method"
LOADING_MARGIN = 1.5  # of the memory of the weights in float32, for what is read on the way


class SoftReader:
    """A model's weights in float32 as transformers runs them: our kernels pack theirs, and keep no gradient.

    Args:
        model: as transformers loads it; without a cache, its parameters frozen.
        vocab_size: logits beyond this are cut off.
    """

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        embed = model.get_input_embeddings()
        ids = torch.arange(vocab_size, device=model.device)
        # Some embeddings are scaled: the table is what they give.
        self._table: torch.Tensor = embed.weight[:vocab_size] if type(embed) is nn.Embedding else embed(ids).detach()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def read(self, tokens: list[int], op: SoftLikelihood) -> SoftScores:
        """Carry out the operation after these tokens."""
        device = self._table.device
        logits = op.logits.to(device, torch.float32, copy=True).requires_grad_()
        chains, length, _ = logits.shape
        soft = mixtures(logits, op.temperature) @ self._table
        before, after = (self._embedded(ids, chains) for ids in (tokens, list(op.after)))
        states = torch.cat([before, soft, after], 1)
        predicted = self._model(inputs_embeds=states, use_cache=False).logits[..., : self._vocab_size].float()
        first = len(tokens) - 1
        flowing = fluency(predicted[:, first : first + length], logits, op.top_k, op.kept)
        expected = predicted[:, first + length : -1].log_softmax(-1)
        wanted = torch.tensor(op.after, dtype=torch.int64, device=device).expand(chains, -1)
        prediction = expected.gather(-1, wanted[..., None]).sum((-1, -2))
        total = op.fluency_weight * flowing + op.prediction_weight * prediction
        [gradient] = torch.autograd.grad(total.sum(), logits)  # chains do not see each other
        return SoftScores(flowing.detach().cpu(), prediction.detach().cpu(), gradient.cpu())

    def _embedded(self, ids: list[int], chains: int) -> torch.Tensor:
        return self._table[torch.tensor(ids, dtype=torch.int64, device=self._table.device)].expand(chains, -1, -1)


class SoftReaders:
    """The one reader of a model, made when first needed, and freed with the last sequence that used it."""

    def __init__(self) -> None:
        self._users: dict[Sequence, SoftReader] = {}
        self._loading = asyncio.Lock()

    async def of(self, model: EngineModel, seq: Sequence) -> SoftReader:
        """Return the reader for a sequence.

        Raises:
            TurnoutError: see `SoftLikelihood`.
        """
        if seq not in self._users:
            async with self._loading:
                reader = next(iter(self._users.values()), None)
                self._users[seq] = reader or await asyncio.to_thread(_load, model)
        return self._users[seq]

    def release(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self._users.pop(seq, None)


def check_differentiable(model: EngineModel) -> None:
    """Refuse weights that have no gradient.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    ranks = model.batcher.runner.plan.ranks
    if ranks > 1:
        raise invalid(FIELD, f"{model.name!r} is split over {ranks} processes, and cannot be differentiated")
    if model.weights != "dense":
        raise invalid(FIELD, f"{model.name!r} keeps its weights as {model.weights}, which cannot be differentiated")


def _load(model: EngineModel) -> SoftReader:
    device = model.batcher.device.torch_device
    needed = int(4 * LOADING_MARGIN * model.num_parameters)
    if needed > available_memory(str(device)):
        raise busy(f"no memory for the weights of {model.name!r} in float32, of {needed >> 20} MiB", FIELD)
    folder = model_path(model.config)
    with reading(folder, FIELD):
        plain, _ = read_model(folder, torch.float32, FIELD, attn_implementation="eager")
    return SoftReader(plain.to(device).eval().requires_grad_(False), model.vocab_size)


async def soft_likelihood(model: EngineModel, seq: Sequence, op: SoftLikelihood) -> SoftScores:
    """Carry out a `SoftLikelihood` between two steps of the model's device."""
    check_differentiable(model)
    op.check_vocabulary(model.vocab_size)
    chains, length, _ = op.logits.shape
    fed = len(seq) + length + len(op.after)
    if fed > model.max_length:
        raise out_of_range(
            FIELD, f"{fed} tokens with what is read softly; {model.name!r} has room for {model.max_length}"
        )
    reader, device = await model.soft_readers.of(model, seq), model.batcher.device
    async with device.fixed_turn:
        if seq.low_priority:
            await let_steps_pass(device)
        async with device.quiet():
            started = time.perf_counter()
            scores = await to_its_end(device.run(partial(reader.read, list(seq.tokens), op)))
    device.charge(seq.low_priority, time.perf_counter() - started)
    counts = seq.meter.of(model.name, model.num_parameters)
    counts.forwards += 1
    counts.draft_tokens += chains * fed
    return scores
