"""Examples for length predictors, taken from what two frozen models do with prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Path
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from decoding.drafters.base import Candidates
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.length_heads import features_of
from decoding.lengths.base import LengthParams, LengthPolicy, Round, Step
from decoding.model import Model, ModelPool, NoiseKind, Readout, ReadSpec, Request
from decoding.noise import derive_seed
from decoding.selectors.first import First
from decoding.sequence import Sequence
from decoding.speculation import Arm, Speculation
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.match import MatchVerifier
from decoding.verifiers.rejection import RejectionVerifier
from turnout.types import SamplingParams


@dataclass(frozen=True)
class Examples:
    """What a head learns from.

    Attributes:
        inputs: float32 [n, width].
        labels: float32 [n], acceptance from 0 to 1.
        prompts: int64 [n], which prompt each came from; prompts are kept apart when examples are split.
        rounds: int64 [n], which round of its prompt; in order.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    prompts: torch.Tensor
    rounds: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, prompts: set[int]) -> Examples:
        """Those of some prompts."""
        kept = torch.tensor([prompt in prompts for prompt in self.prompts.tolist()], dtype=torch.bool)
        return Examples(self.inputs[kept], self.labels[kept], self.prompts[kept], self.rounds[kept])

    @classmethod
    def joined(cls, parts: list[Examples]) -> Examples:
        """All of several."""
        fields = ("inputs", "labels", "prompts", "rounds")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))

    def save(self, path: FilePath) -> None:
        """Replace an .npz file in one rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name("partial." + path.name)
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in vars(self).items()}
        np.savez(partial, **arrays)
        partial.replace(path)

    @classmethod
    def load(cls, path: FilePath) -> Examples:
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return cls(**{name: torch.from_numpy(arrays[name]) for name in arrays})


@dataclass(frozen=True)
class Source:
    """What the models are asked.

    Attributes:
        prompts: token ids of each.
        sampling: how they answer.
        eos_ids: tokens that end an answer.
        seed: of the noise; each prompt's is derived from it.
    """

    prompts: list[list[int]]
    sampling: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0

    @property
    def digest(self) -> str:
        """Names the prompts: 32 hexadecimal digits."""
        return hashlib.blake2b(json.dumps(self.prompts).encode(), digest_size=16).hexdigest()

    def shard_key(self, model: Model, indices: range, **more: Any) -> str:
        """Name a shard of answers by everything that its content follows from: 24 hexadecimal digits.

        Args:
            model: that answers.
            indices: of the prompts.
            more: what else the content follows from, as JSON.
        """
        about = {
            "model": model.digest,
            "prompts": [self.prompts[index] for index in indices],
            "first": indices.start,
            "sampling": self.sampling.model_dump(mode="json"),
            "ends": sorted(self.eos_ids),
            "seed": self.seed,
            **more,
        }
        return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=12).hexdigest()

    def sequence(self, index: int) -> Sequence:
        """A fresh answer to a prompt."""
        return Sequence(self.prompts[index], self.sampling, derive_seed(self.seed, index), self.eos_ids)


class Watch(LengthPolicy):
    """Drafts of one length, each of whose tokens is kept with what became of it."""

    stepwise = True

    def __init__(self, depth: int, top: int) -> None:
        super().__init__(LengthParams(most=depth))
        self.want = ReadSpec(draw=None, entropy=True, top=top)
        self.inputs: list[list[float]] = []
        self.labels: list[float] = []
        self.rounds: list[int] = []
        self._top, self._round = top, 0

    def before_round(self, round: Round) -> int:
        """As deep as asked."""
        self._path: list[Step] = []
        return self.params.most

    def continues(self, path: Path[Step]) -> bool:
        """Always."""
        self._path = list(path)
        return True

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        """Label every drafted token: whether it, and all before it, were accepted."""
        for index, step in enumerate(self._path[: len(draft)], start=1):
            self.inputs.append(features_of(step.row, index, self._top))
            self.labels.append(float(index <= verdict.num_accepted_tokens))
            self.rounds.append(self._round)
        self._round += 1


async def mine_rounds(models: ModelPool, source: Source, index: int, depth: int, top: int) -> Examples:
    """Answer one prompt by speculation with long drafts; see `Watch` for the labels (paper #73, DISCO).

    Args:
        models: small drafts, large verifies; greedy requests by match, others by rejection.
        source: the prompts.
        index: which of them.
        depth: length of the drafts.
        top: how many of the largest probabilities an example has; see `features_of`.
    """
    seq, watch = source.sequence(index), Watch(depth, top)
    greedy = source.sampling.greedy
    drafter = ModelChainDrafter(candidates=Candidates.FIXED if greedy else Candidates.DRAWN)
    verifier = MatchVerifier() if greedy else RejectionVerifier()
    run = Speculation(Request(f"mine {index}", seq), models, [Arm(drafter, watch)], First(), verifier)
    try:
        async for _ in run.run():
            pass
    finally:
        models.small.release(seq)
        models.large.release(seq)
    num = len(watch.labels)
    inputs = torch.tensor(watch.inputs, dtype=torch.float32).reshape(num, top + 2)
    labels = torch.tensor(watch.labels, dtype=torch.float32)
    return Examples(inputs, labels, torch.full((num,), index), torch.tensor(watch.rounds, dtype=torch.int64))


async def mine_acceptance(models: ModelPool, source: Source, index: int, mixing: float) -> Examples:
    """Hidden states of the draft at its own tokens, with their chance of acceptance (paper #105, SpecDec++).

    The target answers with X; at each place the draft draws Y_i after X's earlier tokens, accepted with
    min(1, p(Y_i) / q(Y_i)). The draft then reads Y in which a share `mixing` of tokens is X's again; its last hidden
    state at each Y_i is an example, those at X's tokens are none.

    Args:
        models: small drafts, large answers.
        source: the prompts.
        index: which of them.
        mixing: share of tokens taken from the answer.
    """
    seq, prompt = source.sequence(index), source.sequence(index)
    try:
        segment = await models.large.decode(seq)
        answer = tuple(token.id for token in segment.tokens)
        drawn = await models.small.extend(prompt, answer[:-1], ReadSpec(draw=NoiseKind.DRAFT, probs=True), every=True)
        judged = await models.large.extend(prompt, answer[:-1], ReadSpec(draw=None, probs=True), every=True)
        labels = torch.tensor([_acceptance(q, p) for q, p in zip(drawn, judged, strict=True)])
        chance = torch.Generator().manual_seed(derive_seed(source.seed, index))
        replaced = torch.rand(len(answer), generator=chance) < mixing
        own = [row.token for row in drawn]
        mixed = tuple(
            theirs if taken else mine for theirs, mine, taken in zip(answer, own, replaced.tolist(), strict=True)
        )
        rows = await models.small.extend(prompt, mixed, ReadSpec(draw=None, hidden=frozenset({-1})), every=True)
    finally:
        for sequence in (seq, prompt):
            models.small.release(sequence)
            models.large.release(sequence)
    hidden = torch.stack([row.hidden[-1].to("cpu", torch.float32) for row in rows[1:]])
    num = int((~replaced).sum())
    return Examples(hidden[~replaced], labels[~replaced], torch.full((num,), index), torch.zeros(num).long())


def _acceptance(draft: Readout, target: Readout) -> float:
    """min(1, p / q) of the token the draft drew."""
    assert draft.probs is not None
    assert target.probs is not None
    return min(1.0, float(target.probs[draft.token]) / float(draft.probs[draft.token]))
