"""A chain of tokens from a small model with another vocabulary, carried over as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.lengths.base import LengthPolicy
from decoding.model import ReadSpec
from decoding.sequence import Sequence
from decoding.translated_sequence import TranslatedSequence
from decoding.translation import Translation
from decoding.tree import DraftTree
from decoding.verifiers.base import probs_of
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model, ModelPool


class TextChainParams(MethodParams):
    """Parameters of `text_chain`."""

    per_token: Annotated[
        int, Field(ge=1, le=16, description="tokens of the small model for one of the draft's, on average, at most")
    ] = 4


class TextChainDrafter(ModelChainDrafter):
    """Draft by a small model with any vocabulary, as text (paper #248, string-level exact match).

    The small model reads the text so far in its own tokens and continues it with its most probable ones. The target's
    tokenizer encodes what it wrote; what that changes of the text is left out. Special tokens never pass as text: an
    end of the answer becomes the target's, any other ends the draft. With one vocabulary, a chain of fixed candidates.

    Attributes:
        cost: forwards of the small model for a token of the last draft.
    """

    Params = TextChainParams
    papers = (248,)
    kinds = frozenset({Candidates.FIXED})
    stepwise = False
    across_vocabularies = True
    changing = ("after", "cost")
    params: TextChainParams
    cost: float = 1.0
    translation: Translation | None = None

    def check(self, models: ModelPool) -> None:
        """Look the vocabularies up; any two will do."""
        self.translation = models.vocabularies.translation(models.small, models.large)

    @property
    def share(self) -> float:
        """Forwards of the small model for a level, as in the last draft."""
        return self.cost

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A chain; shorter where the small model's context ends."""
        if self.translation is None:
            return await super().propose(model, seq, room, length)
        written = TranslatedSequence.following(seq, model.name, self.translation)
        read = written.follow(seq)
        depth = min(room.depth, room.nodes)
        tokens: list[int] = []
        path: list[int] = []
        drafted = b""
        want = ReadSpec(draw=None, probs=True)
        most = model.max_length - len(written) - len(read or ())
        while read is not None and len(tokens) < depth and len(path) < min(depth * self.params.per_token, most):
            [row] = await model.extend(written, tokens=(*read, *path), want=want)
            token = int(probs_of(row).argmax())
            path.append(token)
            if token in self.translation.draft.ends:
                end = self.translation.end_of(token)
                whole = end is not None and self._adds(tokens, drafted)
                tokens += [end] if end is not None and whole else []
                break
            added = self.translation.draft.bytes_of(token)
            if not added:
                break
            drafted += added
            tokens = written.continuation(drafted)
        if tokens:
            self.cost = len(path) / min(len(tokens), depth)
        return DraftTree.chain(tokens[:depth], model.name)

    def _adds(self, tokens: list[int], drafted: bytes) -> bool:
        """Return whether the target's tokens are all of a text."""
        assert self.translation is not None
        return b"".join(map(self.translation.target.bytes_of, tokens)) == drafted


PART = TextChainDrafter
