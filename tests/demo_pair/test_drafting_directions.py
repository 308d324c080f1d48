"""What papers say of their drafters in words, seen on the shipped models: which of two ways has more accepted."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from decoding.drafters.base import Drafter
from decoding.drafters.clasp import ClaspDrafter, ClaspParams
from decoding.drafters.lookahead import LookaheadDrafter, LookaheadParams
from decoding.lengths.fixed import FixedLength, FixedParams
from decoding.model import Model, Request
from decoding.selectors.first import PART as First
from decoding.sequence import Sequence
from decoding.speculation import Arm, Speculation
from decoding.verifiers.match import MatchVerifier
from experiments.speculation.tasks import task_group
from pool.local_pool import LocalPool
from turnout.types import SamplingParams

MOST_TOKENS = 48

pytestmark = pytest.mark.exactness  # averages over many rounds of the demo pair


async def tokens_per_round(pool: LocalPool, drafter: Drafter, prompt: tuple[int, ...], depth: int, nodes: int) -> float:
    """Tokens of an answer for each verification, that which reads the prompt included."""
    seq = Sequence(prompt, SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS, ignore_eos=True), 0)
    drafter.check(pool.model_pool)
    arms = [Arm(drafter, FixedLength(FixedParams(most=depth)), nodes)]
    running = Speculation(Request("r", seq), pool.model_pool, arms, First(), MatchVerifier()).run()
    try:
        async with aclosing(running) as segments:
            async for _ in segments:
                pass
    finally:
        for model in pool.model_pool.models.values():
            model.release(seq)
    return seq.meter.speculation.tokens_per_round


class UniformSkips(ClaspDrafter):
    """Leaves out as many layers as `clasp`, always the same ones: every second one, as from the start of `swift`."""

    async def _choose(self, model: Model, seq: Sequence) -> None:
        most = int(model.num_layers * self.params.skipped)
        layers = range(1, 2 * most, 2)
        self.skipped = frozenset(part for layer in layers for part in (2 * layer, 2 * layer + 1))
        self._verified = {}


@pytest.mark.parametrize("skipped", [0.125, 0.25])
async def test_layers_chosen_in_context_beat_as_many_at_even_distances(pool: LocalPool, skipped: float) -> None:
    """Seed 54 (CLaSp). Of eight layers three are as good either way, and with four every second one is 3% ahead."""
    params = ClaspParams(skipped=skipped, threshold=0.0, interval=16)
    sums = {ClaspDrafter: 0.0, UniformSkips: 0.0}
    for group in ("arithmetic", "edit", "template"):
        for prompt in task_group(group, pool.tokenizer, 8, MOST_TOKENS).prompts:
            for kind in sums:
                sums[kind] += await tokens_per_round(pool, kind(params), prompt, 4, 4)
    assert sums[ClaspDrafter] > 1.03 * sums[UniformSkips]


async def test_the_prompts_own_ngrams_have_more_accepted_on_code(pool: LocalPool) -> None:
    """Seed 14 (Lookahead decoding)."""
    sums = {True: 0.0, False: 0.0}
    for prompt in task_group("code", pool.tokenizer, 16, MOST_TOKENS).prompts:
        for known in sums:
            drafter = LookaheadDrafter(LookaheadParams(prompt_ngrams=known))
            sums[known] += await tokens_per_round(pool, drafter, prompt, 16, 160)
    assert sums[True] > 1.02 * sums[False]
