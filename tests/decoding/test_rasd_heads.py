"""RASD with draft heads: what is retrieved is pruned by the first head, and joins the heads' tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decoding.drafters._retrieval import Retrieval, fuse
from decoding.drafters.base import DraftBudget
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.rasd_heads import RasdHeadsDrafter, RasdHeadsParams
from decoding.lengths.fixed import FixedLength
from decoding.model import NoiseKind, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.match import MatchVerifier
from tests.decoding.head_models import StateModel, answer, pool_of, save_head, shifting_heads
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

AFTER = [3, 4, 0, 5, 2, 6, 1]  # one cycle through all seven tokens: 0 3 5 6 1 4 2
RIGHT, LATE = 1, 2  # heads that know the model, and heads that are one place off
LENGTH = FixedLength()


def save(folder: Path, model: StateModel, first: int) -> None:
    accuracies = [[0.9, *[0.02] * 6]] * 2
    save_head(folder, "medusa", shifting_heads(AFTER, 2, first), model.digest, accuracies=accuracies)


async def accepted(model: StateModel, seq: Sequence, draft: DraftTree) -> int:
    return (await model.verify(seq, draft, MatchVerifier())).num_accepted_tokens


@pytest.mark.parametrize("first", [RIGHT, LATE])
async def test_the_fused_tree_is_never_worse_than_either_part(tmp_path: Path, first: int) -> None:
    model = StateModel("large", AFTER)
    save(tmp_path, model, first)
    fused, alone, retrieval = RasdHeadsDrafter(RasdHeadsParams(plausible=7)), MedusaDrafter(), Retrieval()
    for each in (fused, alone):
        each.check(pool_of(model, tmp_path))
    seq = Sequence([0], SamplingParams(temperature=0.0, max_tokens=60), 0)
    gains = []
    while not seq.finished:
        draft = await model.propose(seq, fused, DraftBudget(16, 10_000), LENGTH)
        heads = await model.propose(seq, alone, DraftBudget(16, 24), LENGTH)
        retrieved = fuse(DraftTree.empty("m"), retrieval.find(model, seq, 16), dict.fromkeys(range(7), 1.0), 10_000)
        parts = [await accepted(model, seq, heads), await accepted(model, seq, retrieved)]
        verdict = await model.verify(seq, draft, MatchVerifier(), fused.want | ReadSpec(draw=NoiseKind.SAMPLE))
        if len(heads):  # not in the first round
            assert verdict.num_accepted_tokens >= max(parts)
            gains.append(verdict.num_accepted_tokens - parts[0])
        seq.extend(verdict.tokens, {"large": 1})
        for each in (fused, alone):
            model.observe(seq, each, draft, verdict)
    # Once the cycle has come round, what was retrieved is deeper than two heads reach.
    assert max(gains) >= 10


async def test_paths_the_first_head_finds_implausible_are_dropped(tmp_path: Path) -> None:
    """Right heads know how the cycle goes on; for those that are late its next token is not the likeliest."""
    for first, joins in ((RIGHT, True), (LATE, False)):
        model = StateModel("large", AFTER)
        save(tmp_path, model, first)
        drafter = RasdHeadsDrafter(RasdHeadsParams(plausible=1, head_nodes=2))
        drafter.check(pool_of(model, tmp_path))
        seq = Sequence([0, 3, 5, 6, 1, 4, 2, 0, 3], SamplingParams(max_tokens=20), 0)
        nothing = await model.propose(seq, drafter, DraftBudget(16, 60), LENGTH)
        assert len(nothing) == 0  # no state yet: the heads cannot tell
        verdict = await model.verify(seq, nothing, MatchVerifier(), drafter.want | ReadSpec(draw=NoiseKind.SAMPLE))
        seq.extend(verdict.tokens, {"large": 1})
        model.observe(seq, drafter, nothing, verdict)
        draft = await model.propose(seq, drafter, DraftBudget(16, 60), LENGTH)
        assert (len(draft) > 2) is joins
        if joins:  # after 0 3 5 stood 6 1 4 2 0 3 5, of which the heads have the first two
            assert draft.tokens == (6, 1, 4, 2, 0, 3, 5)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5}], ids=str)
@pytest.mark.parametrize("first", [RIGHT, LATE])
async def test_output_is_plain_decoding_in_one_forward_a_round(
    tmp_path: Path, first: int, sampling: dict[str, Any]
) -> None:
    model = StateModel("large", AFTER)
    save(tmp_path, model, first)
    models = pool_of(model, tmp_path)
    for seed in range(8):
        plain = await answer(models, "plain", {"model": "large"}, [seed % 7], seed, max_tokens=40, **sampling)
        before = model.forwards
        drafted = await answer(
            models, "speculative", {"drafter": "rasd_heads"}, [seed % 7], seed, max_tokens=40, **sampling
        )
        assert drafted.tokens == plain.tokens
        assert drafted.meter.speculation.accepted_tokens > 10
        assert model.forwards - before == drafted.meter.speculation.rounds


async def test_finished_answers_are_retrieved_by_the_tenants_next_request(tmp_path: Path) -> None:
    model = StateModel("large", AFTER)
    save(tmp_path, model, RIGHT)
    models = pool_of(model, tmp_path)
    rounds = []
    for _ in range(2):
        seq = await answer(models, "speculative", {"drafter": "rasd_heads"}, [0, 3], temperature=0, max_tokens=6)
        rounds.append(seq.meter.speculation.rounds)
    assert rounds[1] < rounds[0]


def test_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    model = StateModel("large", AFTER)
    save_head(tmp_path, "medusa", shifting_heads(AFTER, 2), "another digest", accuracies=[[1.0]] * 2)
    with pytest.raises(TurnoutError, match="another digest"):
        RasdHeadsDrafter().check(pool_of(model, tmp_path))
