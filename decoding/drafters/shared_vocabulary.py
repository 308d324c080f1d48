"""A chain drawn from the tokens that a small model with another vocabulary has in common with its target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from decoding.draft_trees import tree_noise
from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.lengths.base import LengthPolicy, Step
from decoding.model import Readout, ReadSpec
from decoding.noise import Purpose, gumbel, noise_key, round_seed
from decoding.sequence import Sequence
from decoding.translated_sequence import TranslatedSequence
from decoding.translation import Translation
from decoding.tree import DraftTree
from decoding.verifiers.base import probs_of
from turnout.errors import invalid

if TYPE_CHECKING:
    from decoding.model import Model, ModelPool


class SharedVocabularyDrafter(ModelChainDrafter):
    """Draft over the intersection of two vocabularies (paper #248, token-level intersection).

    The small model reads the text so far in its own tokens. Its distribution, restricted to the tokens that the target
    has too and renormalised, is what a drawn candidate is drawn from and is kept with it in the target's ids, so that
    the rejection verifier's law is the target's. Fixed candidates take the noise that the target will use. With one
    vocabulary it is `model_chain`.
    """

    papers = (248,)
    across_vocabularies = True
    translation: Translation | None = None
    target_size: int = 0

    def check(self, models: ModelPool) -> None:
        """Look the vocabularies up.

        Raises:
            TurnoutError: INVALID_ARGUMENT: they have no token in common.
        """
        self.translation = models.vocabularies.translation(models.small, models.large)
        self.target_size = models.large.vocab_size
        if self.translation is not None and not len(self.translation.draft_ids):
            names = f"{models.small.name!r} and {models.large.name!r}"
            raise invalid(self.where, f"the vocabularies of {names} have no token in common; use 'text_chain'")

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A chain; it ends where the policy stops it, with an end of the answer, or with the small model's context."""
        if self.translation is None:
            return await super().propose(model, seq, room, length)
        written = TranslatedSequence.following(seq, model.name, self.translation)
        read = written.follow(seq)
        want = ReadSpec(draw=None, probs=True, logits=seq.sampling.greedy) | length.want
        own: list[int] = []
        path: list[Step] = []
        proposals: list[torch.Tensor | None] = []
        most = model.max_length - len(written) - len(read or ())
        while read is not None and len(path) < min(room.depth, room.nodes, most):
            [row] = await model.extend(written, tokens=(*read, *own), want=want)
            shared = self._shared(row, seq)
            if shared is None:
                break
            place = int((shared.log() + self._noise(seq, len(path), shared)).argmax())
            token = int(self.translation.target_ids[place])
            own.append(int(self.translation.draft_ids[place]))
            path.append(Step(token, row))
            proposals.append(self._proposal(shared))
            if token in seq.end_ids or own[-1] in self.translation.draft.ends or not length.continues(path):
                break
        drawn = self.candidates is Candidates.DRAWN
        return DraftTree.chain([step.token for step in path], model.name, proposals if drawn else None)

    def _shared(self, row: Readout, seq: Sequence) -> torch.Tensor | None:
        """Return the distribution over the common tokens, float32 [k]; None: nothing is left of it."""
        assert self.translation is not None
        probs = probs_of(row)
        ids = self.translation.draft_ids.to(probs.device)
        shared = probs[ids]
        mass = float(shared.sum())
        if mass > 0.0:
            return shared / mass
        if not seq.sampling.greedy or row.logits is None:
            return None
        best = torch.zeros_like(shared)  # the most probable token is not common: the best of those that are
        best[row.logits[ids].argmax()] = 1.0
        return best

    def _noise(self, seq: Sequence, depth: int, shared: torch.Tensor) -> torch.Tensor:
        """Return the Gumbel noise of a place, float32 [k]: the draft's own of this round, or the target's."""
        assert self.translation is not None
        position = len(seq) + depth
        if self.candidates is Candidates.DRAWN:
            return tree_noise(round_seed(seq.seed, len(seq)), position, [0], shared)[0]
        key = noise_key(seq.seed, position, Purpose.SAMPLE)
        return gumbel([key], self.target_size, shared.device)[0][self.translation.target_ids.to(shared.device)]

    def _proposal(self, shared: torch.Tensor) -> torch.Tensor:
        """Return a distribution over the common tokens in the target's ids, float32 [vocab]."""
        assert self.translation is not None
        whole = shared.new_zeros(self.target_size)
        whole[self.translation.target_ids.to(shared.device)] = shared
        return whole


PART = SharedVocabularyDrafter
