"""Choice of the ids that a draft model's head keeps, by memory-bound speed-up (papers #189, VocabTrim, and #161)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from training.draft.answers import TargetAnswers
from training.draft.lessons import batches_of, chain_rounds
from training.draft.student import Student

SMALLEST = 64
LEAST_WEIGHT = 0.01  # of a token among the most probable ones, in counts


def mbsu(tau: float, depth: int, cost: float) -> float:
    """Memory-bound speed-up: tokens per forward of the target over the bytes that they take (paper #161, FastDraft).

    Args:
        tau: tokens per forward of the target, its own included.
        depth: tokens of a draft.
        cost: bytes that a forward of the draft reads, in those of the target.
    """
    return tau / (1 + depth * cost)


@dataclass(frozen=True)
class Sizes:
    """Bytes that a forward reads, in numbers: weights, whatever their precision.

    Attributes:
        body: everything but embedding and head.
        row: one row of the head.
        vocab: rows of the whole head.
    """

    body: int
    row: int
    vocab: int

    @classmethod
    def of(cls, model: Any) -> Sizes:
        """Count a Hugging Face causal language model's weights. Of the embedding a forward reads single rows."""
        ends = {id(each) for module in (model.get_input_embeddings(), model.get_output_embeddings())
                for each in module.parameters()}  # fmt: skip
        body = sum(each.numel() for each in model.parameters() if id(each) not in ends)
        head = list(model.get_output_embeddings().parameters())
        return cls(body, sum(each.numel() for each in head) // len(head[0]), len(head[0]))

    def read(self, kept: int | None = None) -> int:
        """Weights that a forward reads, with a head of `kept` rows; None: of all."""
        return self.body + self.row * (self.vocab if kept is None else kept)


def frequency_order(answers: TargetAnswers, vocab: int, ends: frozenset[int]) -> torch.Tensor:
    """All ids, int64 [vocab]: those that end an answer first, then by expected count; ties go to the lower ids.

    A count of the target's outputs, each place counted for every token that it found probable and not only for the one
    it drew: few answers then say as much about rare ids as many would. A text counts by its tokens.

    Args:
        answers: of the target, or of `training.draft.plan.text_rows`.
        vocab: number of ids.
        ends: ids that end an answer.
    """
    weights = answers.top_logprobs.double().exp().clamp_min(LEAST_WEIGHT)
    counts = torch.zeros(vocab, dtype=torch.float64).index_add_(0, answers.top_ids.flatten(), weights.flatten())
    counts[[end for end in ends if end < vocab]] = torch.inf
    return counts.argsort(descending=True, stable=True)


def kept_ids(order: torch.Tensor, size: int) -> torch.Tensor:
    """The first `size` ids of an order, rising."""
    return order[:size].sort().values


def sizes_to_try(vocab: int) -> list[int]:
    """Sizes of heads: each twice the one before, the whole vocabulary last."""
    sizes = []
    size = SMALLEST
    while size < vocab:
        sizes.append(size)
        size *= 2
    return [*sizes, vocab]


@torch.inference_mode()
def sweep(
    student: Student, answers: TargetAnswers, order: torch.Tensor, depth: int, target: Sizes
) -> list[dict[str, float]]:
    """Judge heads of every size along held-out answers, which must be greedy.

    Args:
        student: what drafts; its whole head is read, the ids it was trained with do not matter.
        answers: held-out.
        order: of the ids, see `frequency_order`.
        depth: of the chain.
        target: what the target reads.

    Returns:
        For each size: `ids`, `coverage` (share of the answers' tokens that are kept), `tau`, `c` and `mbsu`.
    """
    sizes, own = sizes_to_try(len(order)), Sizes.of(student.model)
    everything = Student(student.model, order, student.autocast)
    best = torch.empty(len(sizes), len(answers.tokens), dtype=torch.int64)
    ends = torch.tensor(sizes) - 1
    for batch in batches_of(answers, 2048):
        states = everything.states(batch.rows).flatten(0, 1)[batch.places]
        for part, targets in zip(torch.split(states, 256), torch.split(batch.targets, 256), strict=True):
            logits = everything.logits(part)
            best[:, targets] = order[logits.cummax(-1).indices[:, ends].T]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    rows = []
    for index, size in enumerate(sizes):
        rounds = chain_rounds(best[index] == answers.tokens, answers.lengths.tolist(), depth)
        tau, cost = 1 + sum(rounds) / len(rounds), own.read(size) / target.read()
        covered = float((rank[answers.tokens] < size).float().mean())
        row = {"ids": size, "coverage": covered, "tau": tau, "c": cost, "mbsu": mbsu(tau, depth, cost)}
        rows.append(row)
    return rows
