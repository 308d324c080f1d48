"""What engine tests share: plain Hugging Face models to compare with, and calls to a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from decoding.logits import choice_scores
from decoding.noise import Purpose, gumbel, noise_key
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from engine.backends.base import Kernels
from engine.device import Device
from engine.loading import prepare
from engine.model import EngineModel
from pool.local_pool import LocalPool
from tests.engine.margin import assert_best
from training.random_models import random_model
from turnout.calls import Chunk, GenerateCall, Regained, TokenOut, Usage
from turnout.config import EngineConfig, ModelConfig, PoolConfig, TurnoutConfig
from turnout.types import FinishReason, SamplingParams, Token

CPU = torch.device("cpu")


class Reference:
    """A plain Hugging Face model: every answer is a full forward over all tokens, nothing cached."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        if getattr(model.config, "attn_logit_softcapping", None):
            model.config._attn_implementation = "eager"  # transformers 5.17's sdpa leaves the soft cap out
        self.device = model.device

    @torch.inference_mode()
    def logits(self, tokens: Tokens[int]) -> torch.Tensor:
        """float32 [len(tokens), vocab] on the CPU: row i is read after token i."""
        ids = torch.tensor([list(tokens)], device=self.device)
        return self.model(ids, use_cache=False).logits[0].float().cpu()

    def scores(self, prompt: Tokens[int], answer: Tokens[int], sampling: SamplingParams, seed: int) -> torch.Tensor:
        """float32 [len(answer), vocab]: what each token of an answer was chosen by, its noise included."""
        raw = self.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        rows = []
        seq = Sequence(prompt, sampling.model_copy(update={"max_tokens": len(answer) + 1}), seed)
        for row, token in zip(raw, answer, strict=True):
            scores = choice_scores(row[None], [RowContext(seq)])[0]
            if not sampling.greedy:
                scores = scores + gumbel([noise_key(seed, len(seq), Purpose.SAMPLE)], len(row), CPU)[0]
            rows.append(scores)
            seq.append(Token(token, "reference"))
        return torch.stack(rows)


@cache
def reference(folder: Path) -> Reference:
    """The plain model of a checkpoint folder."""
    return Reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def engine_model(
    model: Any,
    *,
    kernels: Kernels = "auto",
    device: str = "cpu",
    num_blocks: int | None = None,
    max_length: int | None = None,
    **engine: int,
) -> EngineModel:
    """An engine model over random weights.

    Args:
        model: taken over.
        kernels: see `prepare`.
        device: where it runs.
        num_blocks: exact size of the block pool.
        max_length: of a sequence; None: the model's own.
        engine: block_size, token_budget, max_batch.
    """
    settings = EngineConfig(**engine)
    checkpoint = prepare(model.to(device), kernels)
    config = ModelConfig(path="-", kv_memory_bytes=8 << 20, max_length=max_length)
    made = EngineModel("m", checkpoint, config, settings, Device(device))
    if num_blocks is not None:
        shrink(made, num_blocks)
    return made


def shrink(model: EngineModel, num_blocks: int) -> None:
    """Make the block pool of an unused model that small."""
    assert not model.batcher.tables
    pool = model.pool
    pool.__init__(num_blocks, pool.block_size, pool._rope_length)  # type: ignore[misc]


def twins(config: Any, seed: int, spread: float = 0.2, **options: Any) -> tuple[EngineModel, Reference]:
    """An engine model and a plain one with the same random weights."""
    plain, taken = (random_model(deepcopy(config), seed, spread) for _ in range(2))
    return engine_model(taken, **options), Reference(plain.to(options.get("device", "cpu")))


def pair_config(
    folder: Path, small: str = "small", large: str = "large", device: str = "cpu", **engine: int
) -> TurnoutConfig:
    """Two checkpoints of a folder in float32."""
    return TurnoutConfig(
        models={
            role: ModelConfig(path=str(folder / name), dtype="float32", device=device, kv_memory_bytes=8 << 20)
            for role, name in (("small", small), ("large", large))
        },
        pools={"pair": PoolConfig(small="small", large="large")},
        engine=EngineConfig(**engine),
    )


@dataclass(frozen=True)
class Reply:
    """What came back for one call; of several answers, the tokens of each."""

    texts: list[str]
    answers: list[list[TokenOut]]
    reasons: list[FinishReason | None]
    usage: Usage
    stops: list[str | int | None]

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def tokens(self) -> list[TokenOut]:
        return self.answers[0]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Maximal runs of one model: (name, length)."""
        runs: list[tuple[str, int]] = []
        for token in self.tokens:
            if runs and runs[-1][0] == token.source:
                runs[-1] = (token.source, runs[-1][1] + 1)
            else:
                runs.append((token.source, 1))
        return runs


def call_of(
    prompt: Any, method: str | None = None, params: dict[str, Any] | None = None, **options: Any
) -> GenerateCall:
    """A call to the pair: greedy, 16 tokens, unless told otherwise."""
    known = {key: options.pop(key) for key in ("messages", "tenant", "deadline_s", "model") if key in options}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "seed": 11, **options})
    prompt = tuple(prompt) if isinstance(prompt, list) else prompt
    call = {"request_id": f"r{id(sampling)}", "model": "pair", "sampling": sampling, **known}
    return GenerateCall(prompt=prompt, method=method, params=params or {}, **call)


async def answer(pool: LocalPool, call: GenerateCall) -> Reply:
    """Everything a call yields."""
    n, usage = call.sampling.n, None
    texts, answers = [""] * n, [[] for _ in range(n)]
    reasons: list[FinishReason | None] = [None] * n
    stops: list[str | int | None] = [None] * n
    async for event in pool.generate(call):
        if isinstance(event, Chunk):
            assert reasons[event.index] is None, "a chunk after the last one"
            texts[event.index] += event.text
            answers[event.index].extend(event.tokens)
            reasons[event.index], stops[event.index] = event.finish_reason, event.stop
        elif not isinstance(event, Regained):
            assert usage is None
            assert isinstance(event, Usage)
            usage = event
    assert usage is not None
    return Reply(texts, answers, reasons, usage, stops)


async def ask(pool: LocalPool, prompt: Any, method: str | None = "plain", *args: Any, **options: Any) -> Reply:
    """Answer one prompt; see `call_of`."""
    return await answer(pool, call_of(prompt, method, *args, **options))


async def ask_all(pool: LocalPool, calls: list[GenerateCall]) -> list[Reply]:
    """Answer many calls at once."""
    return list(await asyncio.gather(*(answer(pool, call) for call in calls)))


def assert_claimed(folder: Path, call: GenerateCall, reply: Reply, names: dict[str, str] | None = None) -> None:
    """Every token is the choice of the model that claims it, by fresh full forwards."""
    assert isinstance(call.prompt, tuple)
    assert call.sampling.seed is not None
    for source in {token.source for token in reply.tokens}:
        plain = reference(folder / (names or {}).get(source, source))
        scores = plain.scores(call.prompt, reply.ids, call.sampling, call.sampling.seed)
        for place, token in enumerate(reply.tokens):
            if token.source == source:
                assert_best(token.id, scores[place], f"{call.method}: token {place} by {source}")


def random_prompts(count: int, longest: int, seed: int = 0, vocab_size: int = 256) -> list[list[int]]:
    """Prompts of random bytes, of random length from 1 to `longest`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


async def until(condition: Callable[[], bool]) -> None:
    """Let others work until it holds, for a minute at most."""
    try:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(asyncio.all_tasks()) from None
