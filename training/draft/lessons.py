"""Batches that a student learns from and is judged on: rows of like length, and the places of answers in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from training.draft.answers import TargetAnswers
from training.draft.student import Student


@dataclass(frozen=True)
class LessonBatch:
    """Rows of prompts and answers.

    Attributes:
        rows: int64 [b, n], padded behind with 0: attention is causal, so padding is never seen.
        places: int64 [m], where in the flattened rows the states stand that predict an answer's tokens.
        targets: int64 [m], indices into the answers' tokens.
    """

    rows: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor


def batches_of(answers: TargetAnswers, most_tokens: int) -> list[LessonBatch]:
    """Group answers of like length into batches of at most `most_tokens` tokens, padding included; at least one row."""
    found = sorted(answers.rows(), key=lambda row: len(row[0]))
    groups: list[list[tuple[torch.Tensor, int, slice]]] = [[]]
    for row in found:
        if groups[-1] and (len(groups[-1]) + 1) * len(row[0]) > most_tokens:
            groups.append([])
        groups[-1].append(row)
    return [_batch(group) for group in groups if group]


def _batch(group: list[tuple[torch.Tensor, int, slice]]) -> LessonBatch:
    width = max(len(tokens) for tokens, _, _ in group)
    rows = torch.zeros(len(group), width, dtype=torch.int64)
    places, targets = [], []
    for index, (tokens, prompt, place) in enumerate(group):
        rows[index, : len(tokens)] = tokens
        first = index * width + prompt - 1  # the last token of the prompt predicts the first of the answer
        places.append(torch.arange(first, first + len(tokens) - prompt))
        targets.append(torch.arange(place.start, place.stop))
    return LessonBatch(rows, torch.cat(places), torch.cat(targets))


class SoftLoss:
    """Cross-entropy of a student over its kept ids with the target's most probable tokens.

    What the target gives to ids that are not kept, or not among its most probable, is left out: such places weigh less.

    Args:
        student: what learns.
        answers: with the target's probabilities.
        most_tokens: of a batch.
        hard: weight of the token in the answer, relative to the target's probabilities, 0 to 1.
    """

    def __init__(self, student: Student, answers: TargetAnswers, most_tokens: int, hard: float = 0.0) -> None:
        self._student, self._hard = student, hard
        self.batches = batches_of(answers, most_tokens)
        number = torch.full((student.model.config.vocab_size,), -1, dtype=torch.int64)
        number[student.kept] = torch.arange(len(student.kept))
        ids = number[answers.top_ids]
        self._ids = ids.clamp_min(0)
        self._probs = answers.top_logprobs.exp() * (ids >= 0)
        self._tokens = number[answers.tokens]

    def __len__(self) -> int:
        return len(self.batches)

    def __call__(self, picked: torch.Tensor) -> torch.Tensor:
        """Mean loss of batches with these indices, int64 [b], nats per place."""
        return torch.stack([self._of(self.batches[index]) for index in picked.tolist()]).mean()

    def _of(self, batch: LessonBatch) -> torch.Tensor:
        states = self._student.states(batch.rows).flatten(0, 1)[batch.places]
        logprobs = self._student.logits(states).log_softmax(-1)
        targets = batch.targets
        loss = logprobs.new_zeros(len(targets))
        if self._hard < 1:
            loss = -(1 - self._hard) * (self._probs[targets] * logprobs.gather(1, self._ids[targets])).sum(-1)
        if self._hard > 0:
            tokens = self._tokens[targets]
            chosen = logprobs.gather(1, tokens.clamp_min(0)[:, None])[:, 0]
            loss = loss - self._hard * chosen * (tokens >= 0)
        return loss.mean()


@torch.inference_mode()
def guesses(student: Student, answers: TargetAnswers, most_tokens: int = 4096) -> torch.Tensor:
    """Best id of the student at every place of the answers, read along the answers: int64 [n]."""
    found = torch.empty(len(answers.tokens), dtype=torch.int64)
    for batch in batches_of(answers, most_tokens):
        states = student.states(batch.rows).flatten(0, 1)[batch.places]
        found[batch.targets] = student.kept[student.logits(states).argmax(-1)]
    return found


def chain_rounds(right: torch.Tensor, lengths: Iterable[int], depth: int) -> list[int]:
    """Count what a greedy chain of `depth` has accepted in each round, from where its guesses are right.

    Drafts before a mistake equal the answer, so that guesses along the answer are the drafts themselves.

    Args:
        right: bool [n], for each place of the answers.
        lengths: tokens of each answer.
        depth: of the chain.

    Returns:
        Accepted tokens by round, each followed by a token of the target's; rounds with no room for a draft are
        left out.
    """
    rounds, start = [], 0
    for length in lengths:
        marks = right[start : start + length].tolist()
        start, place = start + length, 0
        while place < length:
            most = min(depth, length - place - 1)  # one place is the target's own token's
            accepted = next((step for step in range(most) if not marks[place + step]), most)
            if most:
                rounds.append(accepted)
            place += accepted + 1
    return rounds
