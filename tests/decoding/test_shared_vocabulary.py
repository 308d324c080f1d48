"""Drafts over the intersection of two vocabularies keep the target's law exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.shared_vocabulary import SharedVocabularyDrafter
from decoding.drafters.text_chain import TextChainDrafter
from decoding.sequence import Sequence
from decoding.translated_sequence import MOST_TAIL, TranslatedSequence
from decoding.translation import Translation
from decoding.verifiers.rejection import RejectionVerifier
from tests.decoding.markov_rounds import DRAFT, FAR, p_value
from turnout.types import SamplingParams

RUNS = 200_000


class Letters:
    """A vocabulary of letters. Implements `decoding.vocabulary.Vocabulary`."""

    is_constant: ClassVar[bool] = True
    begins: tuple[int, ...] = ()

    def __init__(self, letters: str, special: Mapping[int, str] = {}, end: int | None = None) -> None:
        self.letters = letters
        self.special, self.end = special, end
        self.ends = frozenset(() if end is None else (end,))

    def __len__(self) -> int:
        return len(self.letters)

    def bytes_of(self, token_id: int, first: bool = False) -> bytes:
        return b"" if token_id in self.special else self.letters[token_id].encode()

    def is_byte(self, token_id: int) -> bool:
        return False

    def encode(self, text: str, first: bool = False) -> list[int]:
        return [self.letters.index(letter) if letter in self.letters else 1 for letter in text]


# The target writes a, b and c. The small model has no c, and an x that the target has not.
PARTLY = Translation.of(Letters("bxa"), Letters("abc"), 3, 3)


def drafter_of(part: type[SharedVocabularyDrafter]) -> SharedVocabularyDrafter:
    made = part(candidates=Candidates.DRAWN)
    made.translation, made.target_size = PARTLY, 3
    return made


class Unnormalised(SharedVocabularyDrafter):
    """States the small model's probabilities, as if nothing had been left out of them."""

    def _proposal(self, shared: torch.Tensor) -> torch.Tensor:
        return super()._proposal(shared) * 0.5


class Misplaced(SharedVocabularyDrafter):
    """States them for the small model's ids."""

    def _proposal(self, shared: torch.Tensor) -> torch.Tensor:
        return torch.cat([shared, shared.new_zeros(1)])


def law(part: type[SharedVocabularyDrafter], draft: torch.Tensor, runs: int, **sampling: Any) -> float:
    return p_value(drafter_of(part), RejectionVerifier(), runs, DraftBudget(2, 2), draft, **sampling)


def test_the_intersection_is_found() -> None:
    assert PARTLY.draft_ids.tolist() == [0, 2]
    assert PARTLY.target_ids.tolist() == [1, 0]


def test_an_id_has_one_counterpart() -> None:
    """The usual end stands for the target's, although another special token has its name."""
    draft = Letters("ab..", {2: "<end>", 3: "<stop>"}, end=3)
    target = Letters("b.a.", {1: "<end>", 3: "<user>"}, end=1)
    made = Translation.of(draft, target, 4, 4)
    assert dict(zip(made.draft_ids.tolist(), made.target_ids.tolist(), strict=True)) == {3: 1, 0: 2, 1: 0}
    assert (made.special, made.end_of(3)) == ({1: 2}, 1)
    # Neither model can write what lies behind its output matrix.
    small = Translation.of(draft, target, 3, 2)
    assert dict(zip(small.draft_ids.tolist(), small.target_ids.tolist(), strict=True)) == {1: 0, 2: 1}


def test_the_small_model_reads_no_id_that_it_does_not_have() -> None:
    """A tokenizer may know more tokens than the model, as checkpoints with added tokens do."""
    made = Translation.of(Letters("bxac"), Letters("abc"), 3, 3)
    seq = Sequence([2, 0, 1, 2] * 200, SamplingParams(), 0)
    written = TranslatedSequence.following(seq, "small", made)
    read = written.follow(seq)
    assert read is not None
    assert [*written.tokens, *read] == [2, 0] * 200
    assert len(read) <= MOST_TAIL


@pytest.mark.parametrize("runs", [200, pytest.param(RUNS, marks=pytest.mark.exactness)])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("draft", [DRAFT, FAR], ids=["near", "far"])
def test_the_law_is_the_targets(draft: torch.Tensor, sampling: dict[str, Any], runs: int) -> None:
    torch.set_num_threads(1)
    assert law(SharedVocabularyDrafter, draft, runs, **sampling) > 1e-3


@pytest.mark.parametrize("faulty", [Unnormalised, Misplaced])
def test_a_wrong_proposal_is_seen(faulty: type[SharedVocabularyDrafter]) -> None:
    torch.set_num_threads(1)
    assert law(faulty, FAR, 600) < 1e-4


@pytest.mark.parametrize("runs", [200, pytest.param(RUNS, marks=pytest.mark.exactness)])
def test_a_draft_by_text_keeps_the_law_as_any_fixed_draft_does(runs: int) -> None:
    torch.set_num_threads(1)
    drafter = TextChainDrafter()
    drafter.translation = PARTLY
    assert p_value(drafter, RejectionVerifier(), runs, DraftBudget(2, 2), FAR) > 1e-3
