"""Every drafter and method under banned tokens: the text of plain decoding, which keeps to the bans."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from decoding.model import ModelPool, Request
from decoding.sequence import Sequence
from tests.conformance.parts import ALL_DRAFTERS, LOSSLESS, VERIFIERS, VOCAB, fitting
from tests.conformance.test_identity import GREEDY, SAMPLED, choice, prompts
from tests.conformance.test_identity import pool as pool
from tests.conformance.test_structures import JUDGED, SWITCHING, Letters
from tests.constrained import CHARS
from tests.decoding.step_models import with_head
from turnout.registry import get_method, names
from turnout.types import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS, LONGEST, LEAST, END = 8, 12, 8, 1
ALLOWED = (END, *(token for token in range(2, VOCAB) if token % 3))
DRAFTED = sorted((drafter, "match") for drafter in ALL_DRAFTERS)
VERIFIED = sorted({(d, v) for d, length, v in fitting(LOSSLESS) if (d, length) == ("model_chain", "fixed")})
LOSSY = [("copyspec", verifier) for verifier in sorted(set(names(VERIFIERS)) - set(LOSSLESS))]
Asked = tuple[int, str, dict[str, Any]]


async def answer(pool: ModelPool, asked: Asked, sampling: dict[str, Any]) -> Sequence:
    index, method, params = asked
    info = get_method(method)
    seq = Sequence(prompts(index + 1)[index], SamplingParams(max_tokens=LONGEST, **sampling), index, (END,))
    async for _ in info.run(Request(f"r{index}", seq), pool, info.parse(params)):
        pass
    for model in pool.models.values():
        model.release(seq)
    return seq


async def answers(pool: ModelPool, asked: list[Asked], sampling: dict[str, Any]) -> list[Sequence]:
    for model in pool.models.values():
        model.stores.forget("default")
    return list(await asyncio.gather(*(answer(pool, each, sampling) for each in asked)))


def answer_of(seq: Sequence) -> list[int]:
    return seq.tokens[seq.num_prompt_tokens :]


def pairs_in(ids: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(ids))


def assert_kept(seq: Sequence, banned: tuple[tuple[int, ...], ...]) -> None:
    ids = answer_of(seq)
    assert set(ids) <= set(ALLOWED)
    assert END not in ids[:LEAST]
    assert len(ids) >= LEAST
    assert not {word for word in banned if len(word) == 1} & {(token,) for token in ids}
    assert not set(banned) & set(pairs_in(ids))


@pytest.fixture(scope="module")
def bans() -> dict[bool, dict[str, Any]]:
    """Filled on first use."""
    return {}


async def banning(pool: ModelPool, bans: dict[bool, dict[str, Any]], greedy: bool) -> dict[str, Any]:
    """Bans that bite: an end that is likely everywhere, and words that plain decoding writes without them."""
    if greedy not in bans:
        base = {**(GREEDY if greedy else SAMPLED), "allowed_token_ids": ALLOWED, "logit_bias": {END: 3.0}}
        early = await answers(pool, [(i, "plain", {}) for i in range(PROMPTS)], base)
        assert sum(len(answer_of(seq)) <= LEAST for seq in early) > PROMPTS // 4
        base |= {"min_tokens": LEAST}
        free = await answers(pool, [(i, "plain", {}) for i in range(PROMPTS)], base)
        words = Counter(pair for seq in free for pair in pairs_in(answer_of(seq)) if END not in pair)
        alone = Counter(token for seq in free for token in answer_of(seq) if token != END)
        banned = (*(pair for pair, _ in words.most_common(9)), (alone.most_common(1)[0][0],))
        bans[greedy] = base | {"bad_word_ids": banned}
    return bans[greedy]


@pytest.mark.parametrize("greedy", [True, False])
async def test_text_of_all_drafters_in_one_batch(pool: ModelPool, bans: Any, greedy: bool) -> None:
    sampling = await banning(pool, bans, greedy)
    parts = sorted({*DRAFTED, *VERIFIED}) if greedy else DRAFTED
    asked = [(i % PROMPTS, "speculative", choice(d, "fixed", v)) for i, (d, v) in enumerate(parts)]
    asked += [(i, "pearl", {}) for i in range(2)]
    wanted = await answers(pool, [(i, "plain", {}) for i in range(PROMPTS)], sampling)
    made = await answers(pool, asked, sampling)
    assert [seq.tokens for seq in made] == [wanted[index].tokens for index, _, _ in asked]
    assert sum(seq.meter.speculation.accepted_tokens for seq in made) > 0
    for seq in wanted:
        assert_kept(seq, sampling["bad_word_ids"])


@pytest.mark.parametrize("greedy", [True, False])
async def test_all_else_in_one_batch_keeps_to_the_bans(
    pool: ModelPool, bans: Any, greedy: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Methods that switch between models, and verifiers with a law of their own."""
    sampling = await banning(pool, bans, greedy)
    equipped = with_head(pool, "judge", "large", tmp_path_factory.mktemp("judge"), JUDGED)
    equipped = replace(equipped, tokenizer=Letters(["", "", *CHARS]))
    drafted = (("speculative", choice(drafter, "fixed", verifier)) for drafter, verifier in [*LOSSY, *VERIFIED])
    cases = [*SWITCHING.items(), *drafted]
    made = await answers(equipped, [(i % PROMPTS, *case) for i, case in enumerate(cases)], sampling)
    for seq in made:
        assert_kept(seq, sampling["bad_word_ids"])
