"""Drafters that learn from what the target reads are as warm after a stretch without drafts as after single rounds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import pytest

from decoding.artifacts import Artifacts
from decoding.drafters.base import Drafter
from decoding.lengths.base import LengthParams, LengthPolicy, Round
from decoding.model import Request
from decoding.selectors.first import First
from decoding.sequence import Sequence
from decoding.speculation import Arm, Speculation
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.match import MatchVerifier
from pool.local_pool import LocalPool
from turnout.config import TurnoutConfig, artifacts_path
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

STRETCHES = (1, 2, 4, 8)
PAUSED = sum(STRETCHES)
PROMPT = "def test_read_lines(self):\n    with open(self.name) as file:\n        lines = file.readlines()\n"
HEADS = ("medusa", "redrafter", "rasd_heads")
EXITS = ("kangaroo", "eesd", "clasp")  # `del` chooses its exit by the last round, and a stretch tells it more
GUESSES = ("token_recycling", "aded", "lookahead")


class Pausing(LengthPolicy):
    """Drafts of up to four tokens, and none of some that follow the eighth.

    Attributes:
        start: of the pause.
    """

    start = 1_000

    def __init__(self) -> None:
        super().__init__(LengthParams(most=4))

    def before_round(self, round: Round) -> int:
        length = len(round.seq.generated)
        if length > 8:
            self.start = min(self.start, length)
        return 0 if self.start <= length < self.start + PAUSED else 4

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        """Chooses by place only."""


async def rounds(pool: LocalPool, name: str, seq: Sequence, stretches: Iterable[int] | None) -> list[list[int]]:
    """Tokens of each round: of those in the pause, and of those behind it.

    Args:
        pool: the models.
        name: of the drafter.
        seq: is answered.
        stretches: lengths of the pause's; None: every token of it is verified alone.
    """
    drafter: Drafter = PartChoice.of(name).make("decoding.drafters", "drafter")
    drafter.check(pool.model_pool)
    verifier, length = MatchVerifier(), Pausing()
    speculation = Speculation(Request("r", seq), pool.model_pool, [Arm(drafter, length)], First(), verifier)
    speculation._stretches = iter(stretches or ())
    verifier.lossless = stretches is not None  # type: ignore[misc]
    paused, behind = [], []
    async for segment in speculation.run():
        start = len(seq.generated) - len(segment.tokens)
        if start >= length.start:
            (paused if start < length.start + PAUSED else behind).append(len(segment.tokens))
    return [paused, behind]


@pytest.mark.parametrize("name", [*HEADS, *EXITS, *GUESSES])
async def test_after_a_stretch_drafts_are_those_after_single_rounds(pool: LocalPool, name: str) -> None:
    pool.model_pool.artifacts = Artifacts(artifacts_path(TurnoutConfig.demo().pools["demo"]))
    prompt = pool.tokenizer.encode(PROMPT)
    answers, pauses, behind = [], [], []
    for stretches in (None, repeat(1), STRETCHES):
        seq = Sequence(prompt, SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True), seed=0)
        paused, after = await rounds(pool, name, seq, stretches)
        answers.append([token.id for token in seq.generated])
        pauses.append(paused)
        behind.append(after)
        for engine in pool.engines.values():
            engine.release(seq)
            engine.stores.forget("default")
            engine.pool.clear_cached()  # what is read of a prompt is learned where it is computed
    assert pauses == [[1] * PAUSED, [1] * PAUSED, list(STRETCHES)]
    assert answers[0] == answers[1] == answers[2]
    assert behind[0] == behind[1] == behind[2]
    assert max(behind[0]) > 1
