"""Seed 153 on the real engine: neither a draft nor a trial of the search leaves a mark in the text's cache."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.swift import SwiftDrafter, SwiftParams
from decoding.lengths.fixed import FixedLength
from decoding.sequence import Sequence
from decoding.verifiers.rejection import RejectionVerifier
from engine.model import EngineModel
from tests.engine.harness import engine_model
from training.random_models import llama_config, random_model
from turnout.types import SamplingParams

TINY = llama_config(60, hidden_size=32, num_key_value_heads=2, num_hidden_layers=6, pad_token_id=0, eos_token_id=1)


def fresh() -> EngineModel:
    return engine_model(random_model(deepcopy(TINY), seed=4, spread=0.2), block_size=4)


def kept(model: EngineModel, seq: Sequence) -> list[torch.Tensor]:
    """Keys and values of all tokens but the last, layer by layer; a copy."""
    slots = model.batcher.tables[seq].slots(0, len(seq) - 1)
    return [layer[slots].clone() for layer in model.store.layers]


@pytest.mark.parametrize("kind", [Candidates.FIXED, Candidates.DRAWN])
async def test_the_cache_of_the_text_is_untouched_by_drafts_and_trials(kind: Candidates) -> None:
    model = fresh()
    drafter, verifier = SwiftDrafter(SwiftParams(threshold=0.0, context=6), kind), RejectionVerifier()
    seq = Sequence([2, 3, 4, 5], SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True), seed=7)
    await model.extend(seq)
    search, refused = drafter._search(model, seq), 0
    while not seq.finished:
        before = kept(model, seq)
        draft = await model.propose(seq, drafter, DraftBudget(6, 24), FixedLength())
        for mine, theirs in zip(before, kept(model, seq), strict=True):
            assert torch.equal(mine, theirs), "bit for bit"
        verdict = await model.verify(seq, draft, verifier)
        refused += max(draft.depths(), default=-1) + 1 > len(verdict.path)
        seq.extend(verdict.tokens, {"m": 0})
    assert refused > 5
    assert len(search._scores) > 5, "sets were tried on the way"
    # And what was accepted is what one forward over the text leaves there.
    again, whole = Sequence(seq.tokens, SamplingParams(max_tokens=1), 0), fresh()
    await whole.extend(again)
    count = len(model.batcher.tables[seq])
    assert count >= len(seq) - 1
    for layer, other in zip(model.store.layers, whole.store.layers, strict=True):
        mine = layer[model.batcher.tables[seq].slots(0, count)]
        theirs = other[whole.batcher.tables[again].slots(0, count)]
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    for each, its in ((model, seq), (whole, again)):
        each.release(its)
        assert each.pool.num_held == 0
        await each.close()
