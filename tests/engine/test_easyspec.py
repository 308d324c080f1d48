"""Drafts by grouped layers on the real engine: what they agree with, what repairs the cache, and the law."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from copy import deepcopy
from typing import Any

import pytest
import torch
from scipy import stats

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.easyspec import EasySpecDrafter, EasySpecParams, grouped
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.drafters.vocab_trim import TokenCounts, VocabTrimDrafter, VocabTrimParams
from decoding.fakes import pair
from decoding.lengths.fixed import FixedLength
from decoding.model import ModelPool, ReadSpec, Request
from decoding.sequence import Sequence
from engine.device import Device
from engine.loading import prepare
from engine.model import EngineModel
from tests.engine.harness import Reference, engine_model, random_prompts
from tests.engine.test_early_exit_law import law_of
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig, ModelConfig
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import SamplingParams

VOCAB, LAYERS, SPREAD = 60, 8, 0.15
LOGITS = ReadSpec(draw=None, logits=True)
SPECULATIVE = get_method("speculative")


def weights(layers: int = LAYERS, vocab: int = VOCAB, seed: int = 4, spread: float = SPREAD) -> Any:
    config = llama_config(
        vocab, hidden_size=32, num_hidden_layers=layers, pad_token_id=0, eos_token_id=1, max_position_embeddings=512
    )
    return random_model(deepcopy(config), seed, spread)


def loaded(name: str, model: Any, device: Device) -> EngineModel:
    engine = EngineConfig(block_size=4, max_batch=64)
    return EngineModel(name, prepare(model, "auto"), ModelConfig(path="-", kv_memory_bytes=8 << 20), engine, device)


@pytest.fixture
async def twins(request: Any) -> AsyncIterator[ModelPool]:
    """A draft model and a target with the same weights: what the exact draft says is always accepted.

    The larger the spread of the weights, the more a layer's input matters; parameter of the fixture.
    """
    spread = getattr(request, "param", SPREAD)
    device = Device("cpu")
    made = [loaded(name, weights(spread=spread), device) for name in ("small", "large")]
    yield pair(made[0], made[1])
    for model in made:
        assert model.pool.num_held == 0
        await model.close()


async def write(
    models: ModelPool, drafter: dict[str, Any], index: int = 0, length: int = 4, tokens: int = 24, **sampling: Any
) -> Request:
    """One answer to a prompt of its own."""
    params = {"drafter": {"name": "easyspec", **drafter}, "length": {"name": "fixed", "most": length}}
    verifier = sampling.pop("verifier", "match")
    prompt = [2, *random_prompts(1, 12, seed=index, vocab_size=VOCAB)[0]]
    seq = Sequence(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling), seed=index)
    request = Request(f"r{index}", seq)
    async for _ in SPECULATIVE.run(request, models, SPECULATIVE.parse({**params, "verifier": verifier})):
        pass
    for model in models.models.values():
        model.release(seq)
    return request


@pytest.mark.parametrize("kind", [Candidates.FIXED, Candidates.DRAWN])
async def test_groups_of_one_draft_as_the_plain_draft(twins: ModelPool, kind: Candidates) -> None:
    model = twins.small
    room, length = DraftBudget(5, 5), FixedLength()
    for seed, prompt in enumerate(random_prompts(10, 12, seed=1, vocab_size=VOCAB)):
        seq = Sequence(prompt, SamplingParams(max_tokens=40), seed)
        chain = await model.propose(seq, ModelChainDrafter(candidates=kind), room, length)
        one = await model.propose(seq, EasySpecDrafter(EasySpecParams(group=1), kind), room, length)
        assert (one.tokens, one.parents, one.source) == (chain.tokens, chain.parents, chain.source)
        assert len(one.proposals) == len(chain.proposals)
        for mine, theirs in zip(one.proposals, chain.proposals, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
        model.release(seq)


@pytest.mark.parametrize("verifier", ["match", "rejection"])
async def test_the_cache_of_the_draft_is_exact_when_it_has_read_what_was_accepted(
    twins: ModelPool, verifier: str
) -> None:
    plain, rounds = Reference(weights()), 0
    seq = Sequence([2, 3, 4], SamplingParams(max_tokens=40, ignore_eos=True), 3)
    params = SPECULATIVE.parse({"drafter": {"name": "easyspec", "group": 4}, "length": "fixed", "verifier": verifier})
    async with aclosing(SPECULATIVE.run(Request("r", seq), twins, params)) as running:  # type: ignore[type-var]
        async for _ in running:
            twin = twins.small.fork(seq)
            [row] = await twins.small.extend(twin, want=LOGITS)
            twins.small.release(twin)
            assert row.logits is not None
            torch.testing.assert_close(row.logits, plain.logits(seq.tokens)[-1], atol=1e-4, rtol=0)
            rounds += 1
    for model in twins.models.values():
        model.release(seq)
    assert 8 < rounds < 40


async def test_agreement_is_noted_and_is_whole_without_groups(twins: ModelPool) -> None:
    request = await write(twins, {"group": 1, "compare": True}, temperature=0.0)
    speculation = request.sequence.meter.speculation
    # Every round but the last is compared, at the places behind its first token, all accepted.
    compared = 3 * (speculation.rounds - 1)
    assert speculation.accepted_tokens == speculation.draft_tokens
    assert request.notes == [
        f"easyspec: the grouped layers' best token was the exact draft's at {compared} of {compared} places"
    ]
    assert (await write(twins, {"group": 4}, temperature=0.0)).notes == []


async def test_inside_a_trimmed_vocabulary_it_is_compared_with_the_exact_draft_there(
    twins: ModelPool,
) -> None:
    """A draft that leaves tokens out agrees with itself all the same, and its note is not lost."""
    inner = {"name": "easyspec", "group": 1, "compare": True}
    request = await write(twins, {"name": "vocab_trim", "keep": 30, "drafter": inner}, temperature=0.0, tokens=48)
    [note] = request.notes
    agreed, compared = map(int, re.findall(r"\d+", note))
    assert agreed == compared > 10


async def agreement(models: ModelPool, group: int, length: int = 4) -> float:
    """Share of the places where grouped layers have the exact model's best token."""
    drafter = {"group": group, "exact_first": 0, "compare": True}
    written = await asyncio.gather(*(write(models, drafter, index, length, 48) for index in range(6)))
    notes = [request.notes[0].split() for request in written]
    return sum(int(note[-4]) for note in notes) / sum(int(note[-2]) for note in notes)


async def test_agreement_falls_as_groups_grow(twins: ModelPool) -> None:
    shares = [await agreement(twins, group) for group in (1, 2, 4, 8)]
    assert shares[0] == 1.0
    assert shares[0] > shares[1] > shares[2] > shares[3]


@pytest.mark.parametrize("twins", [0.1], indirect=True)
async def test_without_calibration_errors_pile_up(twins: ModelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance by a target with the draft's own weights is the draft's agreement with itself."""

    async def accepted(tokens: int) -> float:
        drafter = {"group": 4, "exact_first": 0}
        written = await asyncio.gather(
            *(write(twins, drafter, index, tokens=tokens, temperature=0.0) for index in range(6))
        )
        made = [request.sequence.meter.speculation for request in written]
        return sum(each.accepted_tokens for each in made) / sum(each.draft_tokens for each in made)

    repaired = await accepted(24), await accepted(120)
    monkeypatch.setattr(EasySpecDrafter, "calibrates", False)
    left = await accepted(24), await accepted(120)
    assert left[0] < repaired[0]
    assert left[1] < 0.75 * left[0]
    assert left[1] / repaired[1] < 0.75 * left[0] / repaired[0]


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "presence_penalty": 0.5}], ids=str)
async def test_the_text_is_that_of_plain_decoding(twins: ModelPool, group: int, sampling: dict[str, Any]) -> None:
    plain = get_method("plain")

    async def compare(index: int) -> None:
        drafted = (await write(twins, {"group": group}, index, **sampling)).sequence
        seq = Sequence(drafted.tokens[: drafted.num_prompt_tokens], drafted.sampling, seed=index)
        async for _ in plain.run(Request("p", seq), twins, plain.parse({})):
            pass
        twins.large.release(seq)
        assert drafted.tokens == seq.tokens

    await asyncio.gather(*map(compare, range(12)))


async def test_a_trimmed_vocabulary_holds_for_grouped_layers_too(twins: ModelPool) -> None:
    model, params = twins.small, VocabTrimParams(drafter=PartChoice(name="easyspec"), keep=8)
    for kind in (Candidates.FIXED, Candidates.DRAWN):
        drafter = VocabTrimDrafter(params, kind)
        seq = Sequence([2, 3, 4, 5], SamplingParams(max_tokens=40), seed=1)
        tree = await model.propose(seq, drafter, DraftBudget(6, 6), FixedLength())
        counts = model.stores.open(f"vocab_trim/{VOCAB}/8/default", seq.tenant, lambda: TokenCounts(VOCAB, 8))
        assert len(tree) == 6
        kept = counts.kept(seq.end_ids)
        assert kept is not None
        assert set(tree.tokens) <= set(kept.ids.tolist())
        model.release(seq)


def test_groups_lie_between_the_exact_layers() -> None:
    def of(layers: int, **params: int) -> tuple[tuple[int, int], ...]:
        return grouped(layers, EasySpecParams(**params))

    assert of(9, group=4, exact_first=1, exact_last=0) == ((1, 5), (5, 9))
    assert of(9, group=4, exact_first=1, exact_last=1) == ((1, 5), (5, 8))
    assert of(10, group=4, exact_first=1, exact_last=0) == ((1, 5), (5, 9))
    assert of(8, group=8, exact_first=0, exact_last=0) == ((0, 8),)
    assert of(8, group=1) == of(2, group=4) == of(3, group=4, exact_first=2, exact_last=2) == of(0) == ()


@pytest.mark.exactness
@pytest.mark.parametrize("group", [1, 2, 4])
async def test_rejection_keeps_the_law(group: int) -> None:
    """Of the second and the third token of 12,000 answers, the draft being another model than the target."""
    runs, at_once, prompt = 12_000, 60, [2, 3]
    sampling = SamplingParams(max_tokens=4, temperature=0.9, top_p=0.95, presence_penalty=0.3)
    small, large = engine_model(weights(4, 6, 1), block_size=4), engine_model(weights(3, 6, 2), block_size=4)
    small.name, large.name = "small", "large"
    models = pair(small, large)
    params = SPECULATIVE.parse({"drafter": {"name": "easyspec", "group": group}, "verifier": "rejection"})
    counts = torch.zeros(6, 6, dtype=torch.float64)
    drafted = accepted = 0

    async def answer(seed: int) -> None:
        nonlocal drafted, accepted
        seq = Sequence(prompt, sampling, seed)
        async for _ in SPECULATIVE.run(Request(f"r{seed}", seq), models, params):
            pass
        for model in (small, large):
            model.release(seq)
        counts[seq.tokens[3], seq.tokens[4]] += 1
        drafted += seq.meter.speculation.draft_tokens
        accepted += seq.meter.speculation.accepted_tokens

    for start in range(0, runs, at_once):
        await asyncio.gather(*(answer(seed) for seed in range(start, start + at_once)))
    law = law_of(Reference(weights(3, 6, 2)))
    expected = law / law.sum() * runs
    possible = expected > 1e-6
    assert not counts[~possible].any()
    assert 0 < accepted < drafted
    pooled = expected[possible] / expected[possible].sum() * runs
    assert float(stats.chisquare(counts[possible].numpy(), pooled.numpy()).pvalue) > 1e-4
    for model in (small, large):
        await model.close()
