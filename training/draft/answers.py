"""Answers of a target to prompts, with its most probable tokens at every place: data that a draft model learns from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from decoding.model import Model
from training.length_data import Source
from turnout.atomic_files import write_whole

FORMAT = "draft-answers/1"
SHARD = 64  # prompts answered together, and kept in one file
TOP = 20  # alternatives kept of each place: the most that a request may ask for


@dataclass(frozen=True)
class TargetAnswers:
    """Prompts with the target's answers, one after the other.

    Attributes:
        prompt_lengths: int64 [answers], tokens of each prompt.
        lengths: int64 [answers], tokens of each answer.
        prompts: int64 [sum of prompt_lengths].
        tokens: int64 [n], n the sum of lengths.
        top_ids: int64 [n, k], the most probable tokens at each place of an answer, best first.
        top_logprobs: float32 [n, k], their raw log-probabilities in nats.
        seconds: float64 [shards], the time each took.
    """

    prompt_lengths: torch.Tensor
    lengths: torch.Tensor
    prompts: torch.Tensor
    tokens: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    seconds: torch.Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def best(self) -> torch.Tensor:
        """Most probable token at each place, int64 [n]: the answer itself where it is greedy."""
        return self.top_ids[:, 0]

    @classmethod
    def joined(cls, parts: list[TargetAnswers]) -> TargetAnswers:
        """Join several."""
        return cls(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    def rows(self) -> Iterator[tuple[torch.Tensor, int, slice]]:
        """Yield for each answer: tokens of prompt and answer, the prompt's length, the answer's places in `tokens`."""
        start = answered = 0
        for prompt, length in zip(self.prompt_lengths.tolist(), self.lengths.tolist(), strict=True):
            place = slice(answered, answered + length)
            yield torch.cat([self.prompts[start : start + prompt], self.tokens[place]]), prompt, place
            start, answered = start + prompt, answered + length

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save(vars(self)))

    @classmethod
    def load(cls, path: Path) -> TargetAnswers | None:
        """Read what `save` wrote; None: there is nothing readable."""
        try:
            return cls(**load_file(path))
        except (OSError, SafetensorError, TypeError):
            return None


async def collect(
    model: Model,
    sources: list[Source],
    folder: Path,
    seconds: float | None = None,
    advance: Callable[[int, int, float], None] = lambda answered, tokens, spent: None,
) -> TargetAnswers:
    """Let the target answer prompts, shard by shard, until all are answered or the time is spent.

    A shard is written once: an interrupted run continues after the last, and the time that all took counts.

    Args:
        model: the target, as it is served; stays as it is.
        sources: prompts with their sampling, in this order; each must ask for `TOP` log-probabilities.
        folder: where the shards are kept.
        seconds: time after which no shard is begun; None: all are answered. The first shard always is.
        advance: called with the answers so far, their tokens, and the seconds that they took.
    """
    shards: list[TargetAnswers] = []
    spent, answered, tokens = 0.0, 0, 0
    for source in sources:
        for start in range(0, len(source.prompts), SHARD):
            if shards and seconds is not None and spent >= seconds:
                return TargetAnswers.joined(shards)
            indices = range(start, min(start + SHARD, len(source.prompts)))
            path = folder / f"{source.shard_key(model, indices, format=FORMAT)}.safetensors"
            shard = TargetAnswers.load(path)
            if shard is None:
                shard = await _answer_all(model, source, indices)
                shard.save(path)
            shards.append(shard)
            answered, tokens = answered + len(shard), tokens + len(shard.tokens)
            spent += float(shard.seconds.sum())
            advance(answered, tokens, spent)
    return TargetAnswers.joined(shards)


async def _answer_all(model: Model, source: Source, indices: range) -> TargetAnswers:
    """One shard: its prompts answered in one batch."""
    started = perf_counter()
    answers = await asyncio.gather(*(_answer(model, source, index) for index in indices))
    least = min(answer.top_ids.shape[1] for answer in answers)
    cut = [
        replace(each, top_ids=each.top_ids[:, :least], top_logprobs=each.top_logprobs[:, :least]) for each in answers
    ]
    seconds = torch.tensor([perf_counter() - started], dtype=torch.float64)
    return replace(TargetAnswers.joined(cut), seconds=seconds)


async def _answer(model: Model, source: Source, index: int) -> TargetAnswers:
    seq = source.sequence(index)
    prompt = seq.num_prompt_tokens
    try:
        segment = await model.decode(seq)
    finally:
        model.release(seq)
    top = [token.top for token in segment.tokens]
    k = min(map(len, top))
    return TargetAnswers(
        prompt_lengths=torch.tensor([prompt]),
        lengths=torch.tensor([len(segment.tokens)]),
        prompts=torch.tensor(source.prompts[index], dtype=torch.int64),
        tokens=torch.tensor([token.id for token in segment.tokens]),
        top_ids=torch.tensor([[token for token, _ in each[:k]] for each in top], dtype=torch.int64),
        top_logprobs=torch.tensor([[logprob for _, logprob in each[:k]] for each in top], dtype=torch.float32),
        seconds=torch.zeros(0, dtype=torch.float64),
    )
