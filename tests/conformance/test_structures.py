"""Every drafter, verifier and switching rule under a structure: the text of plain constrained decoding."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from decoding import mask_prefetch as ahead
from decoding.fakes import ListText
from decoding.model import ModelPool, Request
from decoding.sequence import Sequence
from engine.model import EngineModel
from tests.conformance.parts import ALL_DRAFTERS, LOSSLESS, VERIFIERS, VOCAB, WIDTH, fitting
from tests.conformance.test_identity import GREEDY, SAMPLED, choice, prompts
from tests.conformance.test_identity import pool as pool
from tests.constrained import CHARS, END, allowed_ids, char_compiler
from tests.decoding.step_models import with_head
from turnout.registry import all_methods, get_method, names
from turnout.structure import Structure
from turnout.types import FinishReason, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = 24
LONGEST = 24
STRUCTURE = Structure(kind="regex", value="([a-h][0-9]{1,2};){2,4}[k-z]{2,}(,|;)")
PAIRS = sorted({(drafter, verifier) for drafter, length, verifier in fitting(LOSSLESS) if length == "fixed"})
LOSSY = sorted(set(names(VERIFIERS)) - set(LOSSLESS))
# How many prompts the default suite asks each of them, all in one batch.
FEW = 2
# Asked for on their own: what all others are compared with, all parts of it, and the one that refuses structures.
OTHERS = {"plain", "speculative", "monitored"}
SWITCHING = {each.name: dict(each.params.example) for each in all_methods() if each.name not in OTHERS}
JUDGED = [0.9, 0.2] * (WIDTH // 2)  # what the head of `judge` makes of a hidden state: some of each

Asked = tuple[str, dict[str, Any]]


async def answer(
    pool: ModelPool, index: int, method: str, params: dict[str, Any], sampling: dict[str, Any]
) -> Sequence:
    info = get_method(method)
    seq = Sequence(
        prompts(index + 1)[index], SamplingParams(max_tokens=LONGEST, **sampling), seed=index, eos_ids=(END,)
    )
    seq.constraint = char_compiler().compile(STRUCTURE)
    async for _ in info.run(Request(f"r{index}", seq), pool, info.parse(params)):
        pass
    for model in pool.models.values():
        model.release(seq)
    return seq


async def answers(pool: ModelPool, method: str, params: dict[str, Any], sampling: dict[str, Any]) -> list[Sequence]:
    return await answers_each(pool, [(i, method, params) for i in range(PROMPTS)], sampling)


async def answers_each(
    pool: ModelPool, asked: list[tuple[int, str, dict[str, Any]]], sampling: dict[str, Any]
) -> list[Sequence]:
    """Of prompts by their index, each with a method of its own, all at once."""
    for model in pool.models.values():
        model.stores.forget("default")
    made = await asyncio.gather(*(answer(pool, *each, sampling) for each in asked))
    for model in pool.models.values():
        assert isinstance(model, EngineModel)
        assert model.pool.num_held == 0
    for seq in made:
        assert_fits(seq)
    return list(made)


def assert_fits(seq: Sequence) -> None:
    """By a constraint of its own: a whole text, or the beginning of one where the length cut it."""
    ids, fresh = seq.tokens[seq.num_prompt_tokens :], char_compiler().compile(STRUCTURE)
    if seq.finish_reason is FinishReason.STOP:
        assert ids[-1] == END
        assert fresh.accepts(ids[:-1])
    else:
        assert len(ids) == LONGEST
        assert allowed_ids(fresh, ids) is not None


@pytest.fixture(scope="module")
def plain() -> dict[bool, list[list[int]]]:
    """Filled on first use."""
    return {}


async def expected(pool: ModelPool, plain: dict[bool, list[list[int]]], greedy: bool) -> list[list[int]]:
    if greedy not in plain:
        made = await answers(pool, "plain", {}, GREEDY if greedy else SAMPLED)
        assert sum(seq.finish_reason is FinishReason.STOP for seq in made) >= PROMPTS // 4
        plain[greedy] = [seq.tokens for seq in made]
    return plain[greedy]


@pytest.fixture(autouse=True)
def _always_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are worked out beside every forward, small as they are here."""
    monkeypatch.setattr(ahead, "LEAST", 0)


@pytest.fixture(scope="module")
def equipped(pool: ModelPool, tmp_path_factory: pytest.TempPathFactory) -> ModelPool:
    """The pool with a judge's head, and texts that steps and sentences are found in."""
    folder = tmp_path_factory.mktemp("judge")
    return replace(with_head(pool, "judge", "large", folder, JUDGED), tokenizer=Letters(["", "", *CHARS]))


class Letters(ListText):
    """One token a character; one that it lacks, as of marks for infilling, is the first that it has."""

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        return [self.texts.index(char if char in self.texts else CHARS[0]) for char in text]


def spread(cases: list[Asked], few: int = FEW) -> list[tuple[int, str, dict[str, Any]]]:
    """Every case with a few prompts, others for each."""
    return [((few * place + i) % PROMPTS, *case) for place, case in enumerate(cases) for i in range(few)]


def drafted(pairs: list[tuple[str, str]]) -> list[Asked]:
    return [("speculative", choice(drafter, "fixed", verifier)) for drafter, verifier in pairs]


@pytest.mark.parametrize("greedy", [True, False])
async def test_text_of_all_drafters_in_one_batch(pool: ModelPool, plain: Any, greedy: bool) -> None:
    pairs = PAIRS if greedy else sorted({(drafter, "match") for drafter in ALL_DRAFTERS})
    asked = spread(drafted(pairs), few=1)
    made, wanted = await answers_each(pool, asked, GREEDY if greedy else SAMPLED), await expected(pool, plain, greedy)
    assert [seq.tokens for seq in made] == [wanted[index] for index, _, _ in asked]
    assert sum(seq.meter.speculation.accepted_tokens for seq in made) > 0


@pytest.mark.parametrize("greedy", [True, False])
async def test_all_else_in_one_batch_keeps_to_the_structure(equipped: ModelPool, greedy: bool) -> None:
    cases = [*SWITCHING.items(), *drafted([("copyspec", verifier) for verifier in LOSSY])]
    made = await answers_each(equipped, spread(cases), GREEDY if greedy else SAMPLED)
    assert sum(seq.meter.speculation.accepted_tokens for seq in made) > 0


@pytest.mark.exactness
@pytest.mark.parametrize(("drafter", "verifier"), PAIRS, ids=str)
async def test_greedy_text(pool: ModelPool, plain: Any, drafter: str, verifier: str) -> None:
    made = await answers(pool, "speculative", choice(drafter, "fixed", verifier), GREEDY)
    assert [seq.tokens for seq in made] == await expected(pool, plain, greedy=True)
    assert sum(seq.meter.speculation.draft_tokens for seq in made) > 0


@pytest.mark.exactness
@pytest.mark.parametrize("drafter", list(ALL_DRAFTERS))
async def test_seeded_text(pool: ModelPool, plain: Any, drafter: str) -> None:
    made = await answers(pool, "speculative", choice(drafter, "fixed", "match"), SAMPLED)
    assert [seq.tokens for seq in made] == await expected(pool, plain, greedy=False)


@pytest.mark.exactness
@pytest.mark.parametrize("verifier", LOSSY)
@pytest.mark.parametrize("greedy", [True, False])
async def test_verifiers_with_a_law_of_their_own_keep_to_the_structure(
    equipped: ModelPool, verifier: str, greedy: bool
) -> None:
    params = choice("copyspec", "fixed", verifier)
    made = await answers(equipped, "speculative", params, GREEDY if greedy else SAMPLED)
    assert sum(seq.meter.speculation.rounds for seq in made) > 0


@pytest.mark.exactness
@pytest.mark.parametrize("method", list(SWITCHING))
@pytest.mark.parametrize("greedy", [True, False])
async def test_methods_keep_to_the_structure(equipped: ModelPool, method: str, greedy: bool) -> None:
    made = await answers(equipped, method, SWITCHING[method], GREEDY if greedy else SAMPLED)
    assert all(seq.finished for seq in made)


@pytest.mark.exactness
async def test_pearl_is_plain(pool: ModelPool, plain: Any) -> None:
    for greedy in (True, False):
        made = await answers(pool, "pearl", {}, GREEDY if greedy else SAMPLED)
        assert [seq.tokens for seq in made] == await expected(pool, plain, greedy)


async def test_nothing_is_left_out() -> None:
    """Methods, drafters and verifiers come from the registry."""
    assert {each.name for each in all_methods()} >= OTHERS
    assert {drafter for drafter, _ in PAIRS} == set(ALL_DRAFTERS)
    assert {verifier for _, verifier in PAIRS} == set(LOSSLESS)
    assert len(CHARS) + 2 == VOCAB
