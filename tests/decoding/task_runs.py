"""What tests of tasks share: a vocabulary of bytes, models over a table, and requests for tasks."""

from __future__ import annotations

import torch

from decoding.fakes import ListText, TableModel, pair
from decoding.model import Model, ModelPool
from decoding.tasks.base import Progress, TaskResult, TaskRun, open_task
from decoding.text import continue_with
from turnout.calls import ScoredTokens, TokenOut
from turnout.types import TokenKind

END, BEGIN = 256, 257
VOCAB = 258


class ByteText(ListText):
    """One token for each byte, and two special ones."""

    def __init__(self) -> None:
        super().__init__([chr(byte) for byte in range(256)] + ["", ""])

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b"<special>"

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        return [BEGIN, *text.encode()]


TEXTS = ByteText()


def byte_model(seed: int, name: str = "large", spread: float = 3.0) -> TableModel:
    """Probabilities depend on the two tokens before."""
    table = torch.randn((64, 64, VOCAB), generator=torch.Generator().manual_seed(seed)) * spread
    return TableModel(name, lambda tokens: table[(tokens[-2] if len(tokens) > 1 else 0) % 64, tokens[-1] % 64], VOCAB)


def models_of(model: TableModel) -> ModelPool:
    return pair(model, model, TEXTS)


def task_run(model: Model) -> TaskRun:
    async def encode(text: str) -> list[int]:
        return list(continue_with(TEXTS, text, parse_special=False))

    run = TaskRun("r", model, _scores, encode, (BEGIN,), frozenset({END}))

    async def scores(prompt: str, completions: tuple[str, ...], top: int) -> list[ScoredTokens]:
        seq = run.sequence([BEGIN, *prompt.encode()], max_tokens=64)
        found = await model.score(seq, [tuple(each.encode()) for each in completions], top)
        model.release(seq)
        made = []
        for text, score in zip(completions, found, strict=True):
            pairs = zip(text.encode(), score.token_logprobs, strict=True)
            tokens = [TokenOut(byte, chr(byte), model.name, TokenKind.DECODED, logprob) for byte, logprob in pairs]
            made.append(ScoredTokens(tuple(tokens), score.greedy, len(seq), score.ranks))
        return made

    run.score = scores
    return run


async def _scores(prompt: str, completions: tuple[str, ...], top: int) -> list[ScoredTokens]:
    raise NotImplementedError


async def result_of(name: str, model: TableModel, progress: Progress | None = None, **params: object) -> TaskResult:
    """What a task comes to; nothing of it is left in the model."""
    found = await open_task(name, dict(params)).run(task_run(model), models_of(model), progress or Progress())
    assert not model.cached
    assert not model.lanes
    return found
