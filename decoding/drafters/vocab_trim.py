"""Drafts from the part of the vocabulary that the target uses most, around any drafter of the small model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import torch
from pydantic import Field

from decoding.drafter_state import Stores
from decoding.drafters.base import FIELD, PACKAGE, Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.model import Model, WrappedModel
from decoding.operations import Expand, Extend, Operation, PartialForward, Read
from decoding.parts import Example, ModelShape
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.vocabulary import SubVocabulary
from turnout.errors import invalid
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import ModelPool
    from decoding.verifiers.base import VerifyResult

R = TypeVar("R")

# Tokens of the target after which the kept ids are chosen again.
REFRESH_AFTER = 256


class VocabTrimParams(MethodParams):
    """Parameters of `vocab_trim`."""

    drafter: Annotated[
        PartChoice,
        Field(
            description="the drafter it is put around, one of the small model's",
            json_schema_extra={"x-slot": "drafters"},
        ),
    ] = PartChoice(name="model_chain")
    keep: Annotated[int, Field(ge=1, le=1_000_000, description="ids that can be drafted, ends of the answer apart")] = (
        32_768
    )
    domain: Annotated[
        str, Field(max_length=64, description="whose counts: requests of one domain share a sub-vocabulary")
    ] = "default"
    count_prompts: Annotated[bool, Field(description="whether prompts count like the target's own tokens")] = False


class TokenCounts:
    """Counts of the tokens that the target emitted, and the ids kept by these counts.

    Args:
        vocab_size: number of ids.
        keep: how many ids to keep.
    """

    def __init__(self, vocab_size: int, keep: int) -> None:
        self._counts = torch.zeros(vocab_size, dtype=torch.int64)
        self._keep = keep
        self._kept: dict[frozenset[int], SubVocabulary] = {}
        self._new = 0

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return self._counts.nbytes + sum(kept.ids.nbytes for kept in self._kept.values())

    def add(self, tokens: list[int]) -> None:
        """Tokens of the target, or of a text like its own."""
        ids = torch.tensor(tokens, dtype=torch.int64)
        self._counts.index_add_(0, ids, torch.ones_like(ids))
        self._new += len(tokens)
        if self._new >= REFRESH_AFTER:
            self._new = 0
            self._kept.clear()

    def kept(self, ends: frozenset[int]) -> SubVocabulary | None:
        """The most frequent ids, and `ends` that the model has; None: all ids.

        Ties go to the lower ids, which byte-pair vocabularies merged first.
        """
        if self._keep >= len(self._counts):
            return None
        found = self._kept.get(ends)
        if found is None:
            order = self._counts.argsort(descending=True, stable=True)[: self._keep].tolist()
            ids = {*order, *(end for end in ends if end < len(self._counts))}
            found = self._kept[ends] = SubVocabulary(torch.tensor(sorted(ids)))
        return found


class TrimmedModel(WrappedModel):
    """A model that reads as if its vocabulary were a part of it; everything else is the model's own.

    Args:
        model: whose readings.
        stores: for what drafters learn of it.
        kept: the part; None: all of it.
    """

    def __init__(self, model: Model, stores: Stores, kept: SubVocabulary | None) -> None:
        super().__init__(model)
        self._kept = kept
        self.stores = stores

    async def do(self, seq: Sequence, op: Operation[R]) -> R:
        """See `decoding.model.Model.do`."""
        if isinstance(op, Extend | Expand | PartialForward | Read) and op.want.among is None:
            trimmed = replace(op, want=replace(op.want, among=self._kept))
            return cast(R, await self.inner.do(seq, trimmed))
        return await self.inner.do(seq, op)


class VocabTrimDrafter(Drafter):
    """Drafts of frequent tokens only (paper #189, VocabTrim: Vocabulary Pruning for Efficient Speculative Decoding).

    Around any drafter that asks the small model. Ids are kept by how often the target itself emitted them in requests
    of the tenant and domain, and those that end the answer always. What is drafted, and the distribution stored with
    it, are the draft model's over the kept ids, zero elsewhere; a token outside them comes from the target alone. The
    draft model multiplies by the kept rows of its head only, which are stored in addition to the whole head.
    """

    Params = VocabTrimParams
    papers = (189,)
    runs_on = "small"
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    stepwise = True
    params: VocabTrimParams

    def __init__(self, params: VocabTrimParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self._counts_prompt = self.params.count_prompts
        drafter = self.inside(self.params)
        self._drafter = drafter(self.params.drafter.parse(drafter, f"{self.where}.drafter"), candidates)

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        return Example(params={"keep": shape.vocab_size // 2})

    @classmethod
    def inside(cls, params: VocabTrimParams, where: str = FIELD) -> type[Drafter]:
        """The drafter it is put around.

        Args:
            params: its own.
            where: see `Drafter.inside`.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: it is unknown, has wrong parameters, or asks no small model.
        """
        field = f"{where}.drafter"
        drafter = params.drafter.find(PACKAGE, field)
        assert issubclass(drafter, Drafter)
        if drafter.runs_on != "small" or drafter is cls:
            raise invalid(field, f"{drafter.name!r} does not draft with the small model, whose vocabulary is trimmed")
        return drafter

    def check(self, models: ModelPool) -> None:
        """Check the needs of the wrapped drafter."""
        self._drafter.where = f"{self.where}.drafter"
        self._drafter.check(models)

    def state(self) -> tuple[Any, ...]:
        """The state of the drafter inside."""
        return self._drafter.state()

    def load_state(self, state: tuple[Any, ...]) -> None:
        """Into the drafter inside."""
        self._drafter.load_state(state)

    @property
    def note(self) -> str:
        """Note of the wrapped drafter."""
        return self._drafter.note

    def check_room(self, room: DraftBudget, field: str) -> None:
        """Refuse what the wrapped drafter refuses."""
        self._drafter.check_room(room, field)

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The other drafter's draft, from the part of the vocabulary."""
        if self._counts_prompt:
            self._counts(model, seq).add(seq.tokens[: seq.num_prompt_tokens])
            self._counts_prompt = False
        return await self._drafter.propose(self._trim(model, seq), seq, room, length)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Count what the target emitted."""
        self._drafter.observe(self._trim(model, seq), seq, draft, verdict)
        self._counts(model, seq).add([token.id for token in verdict.tokens if token.id < model.vocab_size])

    def _trim(self, model: Model, seq: Sequence) -> Model:
        stores = model.stores.open(f"{self._kind(model)}/stores", seq.learner, Stores)
        return TrimmedModel(model, stores, self._counts(model, seq).kept(seq.end_ids))

    def _counts(self, model: Model, seq: Sequence) -> TokenCounts:
        size, keep = model.vocab_size, min(self.params.keep, model.vocab_size)
        return model.stores.open(self._kind(model), seq.learner, lambda: TokenCounts(size, keep))

    def _kind(self, model: Model) -> str:
        keep = min(self.params.keep, model.vocab_size)
        return f"vocab_trim/{model.vocab_size}/{keep}/{self.params.domain}"


PART = VocabTrimDrafter
