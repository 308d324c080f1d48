"""The judge verifier: what its threshold does, and which hidden state it looks at."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel, markov
from decoding.model import ModelPool
from tests.decoding.step_models import ALPHABET, ID, VOCAB, LastTokenModel, answer, ids, pool, scripted, text, with_head
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import TokenKind


def tables(folder: Path, chance: float = 0.5) -> ModelPool:
    """Two models that agree in part, and a head with an opinion of its own on every character."""
    random = torch.Generator().manual_seed(7)
    one, two = (torch.randn(VOCAB, VOCAB, generator=random) * 2 for _ in range(2))
    models = {"small": 0.7 * two + 0.5 * one, "large": two}
    small, large = (LastTokenModel(name, markov(table.softmax(-1)), VOCAB) for name, table in models.items())
    chances = torch.rand(VOCAB, generator=random).tolist()
    return with_head(pool(small, large), "judge", "large", folder, chances)


async def judged(models: ModelPool, index: int, params: dict[str, Any], **options: Any) -> Any:
    common = {"prompt": [index % VOCAB, index // VOCAB], "seed": index, "temperature": 1.0, "max_tokens": 20}
    seq, _, _ = await answer(models, "speculative", {"draft_length": 6, **params}, **{**common, **options})
    return seq


@pytest.mark.parametrize("standard", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["model_chain", "model_tree"])
async def test_a_threshold_of_1_is_the_standard_verifier(
    tmp_path: Path, standard: str, temperature: float, drafter: str
) -> None:
    """Token by token, with the same seeds, greedily on 24 prompts: what is proved of that verifier holds here."""
    models = tables(tmp_path)
    verifier = {"name": "judge", "threshold": 1.0, "standard": standard}
    for index in range(24 if temperature == 0.0 else 12):
        ours = await judged(models, index, {"drafter": drafter, "verifier": verifier}, temperature=temperature)
        theirs = await judged(models, index, {"drafter": drafter, "verifier": standard}, temperature=temperature)
        assert ours.generated == theirs.generated
        if temperature == 0.0 or standard == "match":
            prompt, common = [index % VOCAB, index // VOCAB], {"temperature": temperature, "max_tokens": 20}
            plain, _, _ = await answer(models, "plain", {}, prompt=prompt, seed=index, **common)
            assert ours.tokens == plain.tokens


async def test_a_threshold_below_0_keeps_every_draft(tmp_path: Path) -> None:
    models = tables(tmp_path)
    for index in range(30):
        seq = await judged(models, index, {"verifier": {"name": "judge", "threshold": -1.0}, "draft_length": 19})
        kinds = [token.kind for token in seq.generated]
        assert TokenKind.RECOVERED not in kinds
        if seq.generated[-1].id != ID["$"]:
            assert kinds == [TokenKind.ACCEPTED] * 19 + [TokenKind.BONUS]
    greedy = await judged(
        models, 5, {"verifier": {"name": "judge", "threshold": -1.0}, "draft_length": 19}, temperature=0.0
    )
    small, _, _ = await answer(models, "plain", {"model": "small"}, prompt=[5, 0], max_tokens=19)
    assert greedy.tokens[:21] == small.tokens


async def test_less_is_accepted_at_a_higher_threshold(tmp_path: Path) -> None:
    models = tables(tmp_path)
    lengths = []
    for threshold in (-1.0, 0.2, 0.5, 0.8, 1.0):
        accepted = rounds = 0
        for index in range(40):
            seq = await judged(models, index, {"verifier": {"name": "judge", "threshold": threshold}})
            accepted += seq.meter.speculation.accepted_tokens
            rounds += seq.meter.speculation.rounds
        lengths.append(accepted / rounds)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2] > lengths[4]


async def test_one_round_by_hand(tmp_path: Path) -> None:
    """The draft says bbcb, the target a at every place; the head approves of b and not of c."""
    small = scripted("small", lambda written: "bbcb"[(len(written) - 1) % 4])
    large = LastTokenModel("large", scripted("large", lambda written: "a").next_logits, VOCAB)
    chances = [0.1] * VOCAB
    chances[ID["b"]] = 0.9
    models = with_head(pool(small, large), "judge", "large", tmp_path, chances)
    seq, segments, _ = await answer(
        models, "speculative", {"verifier": "judge", "draft_length": 4}, prompt="?", max_tokens=12
    )
    assert text([token.id for token in segments[0].tokens]) == "bba"
    assert [token.source for token in segments[0].tokens] == ["small", "small", "large"]
    assert segments[0].tokens[-1].kind is TokenKind.RECOVERED
    assert text(seq.tokens).startswith("?bbab")


async def test_the_state_is_that_after_the_drafted_token_was_read(tmp_path: Path) -> None:
    """A head that knows tokens by the state after them keeps exactly its own: before them all states are the same."""
    small = scripted("small", lambda written: "bc"[len(written) % 2])
    large = LastTokenModel("large", scripted("large", lambda written: "a").next_logits, VOCAB)
    for approved, kept in (("bc", 4), ("b", 0), ("c", 1), ("?", 0), ("a", 0)):
        chances = [0.1] * VOCAB
        for char in approved:
            chances[ID[char]] = 0.9
        models = with_head(pool(small, large), "judge", "large", tmp_path, chances)
        seq, segments, _ = await answer(
            models, "speculative", {"verifier": "judge", "draft_length": 4}, prompt="?", max_tokens=12
        )
        assert [token.kind for token in segments[0].tokens].count(TokenKind.ACCEPTED) == kept, approved
        assert len(seq.generated) == 12


async def test_without_its_artifact_it_is_refused_before_the_first_token(tmp_path: Path) -> None:
    models = pool(TableModel("small", markov(torch.ones(VOCAB, VOCAB) / VOCAB), VOCAB), tables(tmp_path).large)
    with pytest.raises(TurnoutError, match=r"verifier\.artifact"):
        await answer(models, "speculative", {"verifier": "judge"}, prompt=ids("?"))
    seq, _, request = await answer(models, "speculative", {"verifier": "judge", "fallback": "plain"}, max_tokens=4)
    assert len(seq.generated) == 4
    assert "decoded plainly" in request.notes[0]


# The direction: words are free, digits are strict

COUNT, COUNTS = 9, 20


def counting(letters: str, slips: bool) -> Callable[[str], str]:
    """Counts up from the prompt's last digit, a letter before each; the letter means nothing, the digit all."""

    def script(written: str) -> str:
        prompt, _, rest = written.partition("?")
        pairs = [prompt[-2:], *(rest[at : at + 2] for at in range(0, len(rest), 2))]
        chance = random.Random(written)
        if len(pairs[-1]) == 1:
            slip = slips and chance.random() < 0.1
            return str((int(pairs[-2][1]) + (2 if slip else 1)) % 10)
        return "$" if len(pairs) > COUNT else chance.choice(letters)

    return script


async def counted(folder: Path, verifier: dict[str, Any] | str, draft_length: int) -> tuple[int, int]:
    """How many counts are right, and the rounds of all; the head approves of letters and of no digit."""
    small, large = (scripted("small", counting("abc", True)), scripted("large", counting("a", False)))
    chances = [0.9 if char in "abc" else 0.1 for char in ALPHABET]
    models = with_head(
        pool(small, LastTokenModel("large", large.next_logits, VOCAB)), "judge", "large", folder, chances
    )
    right = rounds = 0
    for number in range(COUNTS):
        params = {"draft_length": draft_length, "verifier": verifier}
        seq, _, _ = await answer(models, "speculative", params, prompt=f"{'h' * (1 + number // 10)}{number % 10}?")
        digits = text([token.id for token in seq.generated])[1::2]
        right += digits == "".join(str((number + place) % 10) for place in range(1, COUNT + 1))
        rounds += seq.meter.speculation.rounds
    return right, rounds


async def test_long_drafts_pay_with_the_judge_alone_and_the_answers_stay_right(tmp_path: Path) -> None:
    """What the method is for: a draft of 16 gets through as long as its digits are right, whatever its words are."""
    match = {length: await counted(tmp_path, "match", length) for length in (4, 16)}
    judge = {length: await counted(tmp_path, "judge", length) for length in (4, 16)}
    assert {right for right, _ in (*match.values(), *judge.values())} == {COUNTS}
    assert match[16][1] > 0.9 * match[4][1]
    assert judge[16][1] < 0.7 * judge[4][1]
    assert judge[16][1] < 0.5 * match[16][1]
    # A head that approves of everything is quicker still, and wrong.
    right, rounds = await counted(tmp_path, {"name": "judge", "threshold": -1.0}, 16)
    assert right < COUNTS / 2
    assert rounds < judge[16][1]


def test_it_says_that_it_is_not_lossless() -> None:
    info = get_method("speculative")
    assert not info.keeps_law(info.parse({"verifier": "judge"}))
