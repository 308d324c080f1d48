"""Translation between two vocabularies: which tokens both have, and which text tokens stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from decoding.vocabulary import Vocabulary

if TYPE_CHECKING:
    from decoding.model import Model


@dataclass(frozen=True, eq=False)
class Translation:
    """Translation from the tokens of a draft model to those of its target, and back.

    Tokens are the same if they add the same bytes to a text, if they are special and have one name, or if both end a
    text; each id has at most one counterpart.

    Attributes:
        draft: the draft model's vocabulary.
        target: the target's.
        draft_size: ids that the draft model can read are below this, whatever its tokenizer has.
        draft_ids: int64 [k], the draft model's ids of the tokens that both have.
        target_ids: int64 [k], the target's ids of the same tokens.
        special: for the target's special tokens, the draft model's id; those without one are left out.
        byte_ids: the draft model's token for each single byte that has one.
    """

    is_constant: ClassVar[bool] = True
    draft: Vocabulary
    target: Vocabulary
    draft_size: int
    draft_ids: torch.Tensor
    target_ids: torch.Tensor
    special: Mapping[int, int]
    byte_ids: Mapping[int, int]

    @classmethod
    def of(cls, draft: Vocabulary, target: Vocabulary, draft_size: int, target_size: int) -> Translation:
        """Compare two vocabularies.

        Args:
            draft: the draft model's.
            target: the target's.
            draft_size: ids that the draft model can read and write are below this.
            target_size: likewise the target.
        """
        own, others = _texts(draft, draft_size), _texts(target, target_size)
        special = _special(draft, target, draft_size)
        alike = [(own[text], others[text]) for text in own if text in others]
        alike += [(mine, theirs) for theirs, mine in special.items() if theirs < target_size]
        if draft.end is not None and target.end is not None and draft.end < draft_size and target.end < target_size:
            alike.insert(0, (draft.end, target.end))  # whatever else their names are given to
        common: dict[int, int] = {}
        taken: set[int] = set()
        for mine, theirs in alike:
            if mine not in common and theirs not in taken:
                common[mine] = theirs
                taken.add(theirs)
        single = {text[0]: token for text, token in own.items() if len(text) == 1}
        return cls(
            draft,
            target,
            draft_size,
            torch.tensor(list(common.keys()), dtype=torch.int64),
            torch.tensor(list(common.values()), dtype=torch.int64),
            special,
            single,
        )

    def end_of(self, token: int) -> int | None:
        """Return the target's end of a text for the draft model's; None: there is none."""
        if self.target.end is None or token == self.draft.end:
            return self.target.end
        name = self.draft.special.get(token)
        return next((each for each in self.target.ends if self.target.special.get(each) == name), self.target.end)


def _texts(vocabulary: Vocabulary, size: int) -> dict[bytes, int]:
    """Return a token for each text that is one; of several, one that is no byte fallback, with the lowest id."""
    found: dict[bytes, int] = {}
    for token in range(min(len(vocabulary), size)):
        text = vocabulary.bytes_of(token)
        if text and (text not in found or (vocabulary.is_byte(found[text]) and not vocabulary.is_byte(token))):
            found[text] = token
    return found


def _special(draft: Vocabulary, target: Vocabulary, draft_size: int) -> dict[int, int]:
    """Return the draft model's special token for each of the target's that has one: by name, else by its use."""
    named = {name: token for token, name in draft.special.items() if token < draft_size}
    found = {token: named[name] for token, name in target.special.items() if name in named}
    if draft.end is not None:
        for token in target.ends:
            found.setdefault(token, draft.end)
    return found


class Vocabularies:
    """Vocabularies of a pool's models, where they differ.

    Args:
        common: of the large model, and of all that are not in
        others: by model name.
    """

    def __init__(self, common: Vocabulary | None = None, others: Mapping[str, Vocabulary] | None = None) -> None:
        self._common = common
        self._others = dict(others or {})
        self._translations: dict[str, Translation] = {}

    def differs(self, model: str) -> bool:
        """Return whether a model has another vocabulary than the pool."""
        return model in self._others

    def translation(self, draft: Model, target: Model) -> Translation | None:
        """Return the translation from a model's tokens to the pool's; None: they are the same.

        Args:
            draft: any of the pool's models.
            target: one with the pool's vocabulary.
        """
        if draft.name not in self._others:
            return None
        assert self._common is not None
        if draft.name not in self._translations:
            sizes = draft.vocab_size, target.vocab_size
            self._translations[draft.name] = Translation.of(self._others[draft.name], self._common, *sizes)
        return self._translations[draft.name]
