"""Differentiable reading by a model in this process: see `decoding.soft_likelihood.SoftLikelihood`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from decoding.sequence import Sequence
from decoding.soft_likelihood import SoftLikelihood, SoftScores, fluency, mixtures
from engine.checkpoints import read_model, reading
from engine.costs.limits import CPU, available_memory, claim
from engine.device import to_its_end
from engine.fixed_lanes import let_steps_pass
from turnout.config import model_path
from turnout.errors import busy, invalid, out_of_range

if TYPE_CHECKING:
    from engine.model import EngineModel

FIELD = "method"
LOADING_MARGIN = 1.5  # of the memory of the weights in float32, for what is read on the way
# Numbers that a reading holds at its widest, of each token: in a layer, of the logits, and of soft tokens.
OF_WIDTH, OF_INNER, OF_SCORES, OF_LOGITS, OF_SOFT = 12, 4, 2, 3, 10
MOST_AT_ONCE = 2048  # tokens of all chains, if it is not one: other requests' steps wait meanwhile
KEPT_S = 60.0  # that the weights stay without a user: reading them again may take as long


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
        flowing = fluency(predicted[:, first : first + length], logits, op.top_k, op.uncut)
        expected = predicted[:, first + length : -1].log_softmax(-1)
        wanted = torch.tensor(op.after, dtype=torch.int64, device=device).expand(chains, -1)
        prediction = expected.gather(-1, wanted[..., None]).sum((-1, -2))
        total = op.fluency_weight * flowing + op.prediction_weight * prediction
        [gradient] = torch.autograd.grad(total.sum(), logits)  # chains do not see each other
        return SoftScores(flowing.detach().cpu(), prediction.detach().cpu(), gradient.cpu())

    def bytes_needed(self, fed: int, op: SoftLikelihood) -> int:
        """Memory of a reading, roughly: what each layer keeps for the way back, its attention without tiles included.

        Args:
            fed: tokens of a chain.
            op: which.
        """
        config = self._model.config.get_text_config()
        chains, length, vocab_size = op.logits.shape
        width, heads = config.hidden_size, config.num_attention_heads
        inner = int(getattr(config, "intermediate_size", None) or 4 * width) * (
            getattr(config, "num_experts_per_tok", None) or 1
        )
        layers = config.num_hidden_layers * (OF_WIDTH * width + OF_INNER * inner + OF_SCORES * heads * fed)
        return int(4 * chains * (fed * (layers + OF_LOGITS * vocab_size) + OF_SOFT * length * vocab_size))

    def _embedded(self, ids: list[int], chains: int) -> torch.Tensor:
        return self._table[torch.tensor(ids, dtype=torch.int64, device=self._table.device)].expand(chains, -1, -1)


class SoftReaders:
    """The one reader of a model: made when first needed, and kept for some time behind the last sequence that used it.

    The weights are read by one thread at a time, whatever is cancelled meanwhile, and not for each request: requests
    that follow each other must not fill memory or the disk's time with copies.

    Args:
        kept_s: how long, in seconds.

    Attributes:
        reader: None: there is none now.
    """

    def __init__(self, kept_s: float = KEPT_S) -> None:
        self.reader: SoftReader | None = None
        self._kept_s = kept_s
        self._users: set[Sequence] = set()
        self._loading: asyncio.Future[SoftReader] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    async def of(self, model: EngineModel, seq: Sequence) -> SoftReader:
        """Return the reader for a sequence.

        Raises:
            TurnoutError: see `SoftLikelihood`.
        """
        self._users.add(seq)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self.reader is not None:
            return self.reader
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(_load, model))
            self._loading.add_done_callback(partial(self._loaded, {model.config.device: 4 * model.num_parameters}))
        return await asyncio.shield(self._loading)

    def release(self, seq: Sequence) -> None:
        """Forget a sequence."""
        if seq in self._users:
            self._users.remove(seq)
            self._expire_later()

    def close(self) -> None:
        """Free the weights, those too that are being read."""
        self._users.clear()
        self._kept_s = 0.0
        self._expire()

    def _loaded(self, needs: dict[str, int], loading: asyncio.Future[SoftReader]) -> None:
        self._loading = None
        if not loading.cancelled() and loading.exception() is None:
            self.reader = loading.result()
            claim(self.reader, needs)  # as long as it lives
            self._expire_later()

    def _expire_later(self) -> None:
        if self._users or self.reader is None:
            return
        if self._kept_s <= 0.0:
            self._expire()
        elif self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(self._kept_s, self._expire)

    def _expire(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if not self._users:
            self.reader = None


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
    device, needed = model.config.device, int(4 * LOADING_MARGIN * model.num_parameters)
    with _one_at_a_time:  # two may not both count on memory that only one of them can have
        for where in {device, CPU}:  # they pass through the machine's
            if needed > available_memory(where):
                raise busy(f"no memory for the weights of {model.name!r} in float32, of {needed >> 20} MiB", FIELD)
        folder = model_path(model.config)
        with reading(folder, FIELD):
            plain, _ = read_model(folder, torch.float32, FIELD, attn_implementation="eager")
        plain = plain.to(model.batcher.device.torch_device).eval().requires_grad_(False)
        return SoftReader(plain, model.vocab_size)


_one_at_a_time = Lock()


async def soft_likelihood(model: EngineModel, seq: Sequence, op: SoftLikelihood) -> SoftScores:
    """Carry out a `SoftLikelihood` between steps of the model's device, some of the chains at a time."""
    check_differentiable(model)
    op.check_vocabulary(model.vocab_size)
    chains, length, _ = op.logits.shape
    fed = len(seq) + length + len(op.after)
    if fed > model.max_length:
        raise out_of_range(
            FIELD, f"{fed} tokens with what is read softly; {model.name!r} has room for {model.max_length}"
        )
    reader, device = await model.soft_readers.of(model, seq), model.batcher.device
    size = max(1, MOST_AT_ONCE // fed)
    parts = [replace(op, logits=op.logits[at : at + size]) for at in range(0, chains, size)]
    if (needed := reader.bytes_needed(fed, parts[0])) > available_memory(model.config.device):
        said = f"no memory for gradients through {len(parts[0].logits)} times {fed} tokens, of {needed >> 20} MiB"
        raise busy(said, FIELD)
    found = []
    for part in parts:
        async with device.fixed_turn:
            if seq.low_priority:
                await let_steps_pass(device)
            async with device.quiet():
                started = time.perf_counter()
                found.append(await to_its_end(device.run(partial(reader.read, list(seq.tokens), part))))
        device.charge(seq.low_priority, time.perf_counter() - started)
        counts = seq.meter.of(model.name, model.num_parameters)
        counts.forwards += 1
        counts.draft_tokens += len(part.logits) * fed
    return found[0] if len(found) == 1 else await asyncio.to_thread(SoftScores.joined, found)
