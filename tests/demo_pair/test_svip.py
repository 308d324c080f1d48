"""Seed 62 on the shipped pair: a draft's entropy foretells its refusal, and stopping by it wastes fewer drafts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from collections.abc import Sequence as Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from scipy import stats

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.lengths.base import Round, Step
from decoding.lengths.svip import SvipLength
from decoding.sequence import Sequence
from decoding.verifiers.rejection import RejectionVerifier
from pool.local_pool import LocalPool
from tests.demo_pair.conftest import _opened, demo_config
from turnout.calls import ChatMessage
from turnout.types import SamplingParams

# One loop for all: the models' locks belong to it.
pytestmark = pytest.mark.asyncio(loop_scope="module")

STOPS_ABOVE = 0.6  # nats, by the defaults of `svip`
DEPTH = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[LocalPool]:
    async for opened in _opened(demo_config()):
        yield opened


class Watching(SvipLength):
    """Goes on whatever it sees, and takes down the entropies it would have decided by."""

    def __init__(self) -> None:
        super().__init__()
        self.nats: list[float] = []

    def continues(self, path: Path[Step]) -> bool:
        assert path[-1].row.entropy_bits is not None
        self.nats.append(path[-1].row.entropy_bits * math.log(2.0))
        return True


async def judged(pair: LocalPool, prompt: str, seed: int) -> list[tuple[float, bool]]:
    """Entropy, and whether it was refused, of every drafted token of an answer that the target came to."""
    small, large = pair.model_pool.small, pair.model_pool.large
    tokens = pair.tokenizer.encode_chat((ChatMessage("user", prompt),))
    seq = Sequence(tokens, SamplingParams(temperature=1.0, max_tokens=48), seed, eos_ids=(1,))
    drafter, verifier = ModelChainDrafter(candidates=Candidates.DRAWN), RejectionVerifier()
    found = []
    while not seq.finished:
        policy = Watching()
        policy.before_round(Round(seq, small, large, False, "model_chain"))
        draft = await small.propose(seq, drafter, DraftBudget(DEPTH, DEPTH), policy)
        verdict = await large.verify(seq, draft, verifier)
        accepted = len(verdict.path)
        found += [(nats, place == accepted) for place, nats in enumerate(policy.nats[: accepted + 1])]
        seq.extend(verdict.tokens, pair.model_pool.sizes)
    for engine in pair.engines.values():
        engine.release(seq)
    return found


async def test_the_more_entropy_a_token_was_drafted_at_the_more_often_it_is_refused(
    pair: LocalPool, prompts: list[str]
) -> None:
    answers = await asyncio.gather(*(judged(pair, prompt, seed) for seed, prompt in enumerate(prompts[:32])))
    nats, refused = np.array([each for answer in answers for each in answer]).T
    assert refused.sum() > 20
    assert stats.spearmanr(nats, refused).statistic > 0.25
    # The bound of the defaults parts those that are refused more often than not from those that hardly ever are.
    unsure = nats > STOPS_ABOVE
    assert refused[unsure].mean() > 0.5
    assert refused[~unsure].mean() < 0.05


async def test_fewer_drafts_are_refused_than_at_a_fixed_length_that_has_as_many_accepted(
    pair: LocalPool, ask_all: Any, prompts: list[str]
) -> None:
    async def per_round(most: int, threshold: float) -> tuple[float, float]:
        """Accepted tokens, and those drafted in vain."""
        length = {"name": "svip", "most": most, "threshold": threshold}
        params = {"verifier": "rejection", "length": length}
        replies = await ask_all(pair, prompts[:12], "speculative", params, temperature=1.0, max_tokens=64)
        spent = [reply.usage.speculation for reply in replies]
        rounds, drafted, accepted = (
            sum(getattr(each, name) for each in spent) for name in ("rounds", "draft_tokens", "accepted_tokens")
        )
        return accepted / rounds, (drafted - accepted) / rounds

    # Without a bound it is a fixed length that ends with the text, so that entropy makes all the difference.
    fixed = [await per_round(most, 1000.0) for most in (4, 8, 16)]
    accepted, in_vain = await per_round(16, 0.3)
    known = [each for each, _ in fixed]
    assert known == sorted(known)
    assert known[0] <= accepted <= known[-1]
    assert in_vain < 0.5 * np.interp(accepted, known, [each for _, each in fixed])
