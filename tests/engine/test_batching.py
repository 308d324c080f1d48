"""Seeded answers do not depend on what they are batched with; matched speculation equals plain decoding."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import pytest

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.match import MatchVerifier
from engine.runner import Feed
from engine.scheduler.queued_operation import QueuedOperation
from pool.local_pool import LocalPool
from tests.engine.harness import (
    answer,
    ask_all,
    assert_claimed,
    call_of,
    pair_config,
    random_prompts,
    reference,
    twins,
)
from tests.engine.margin import assert_same_tokens
from tests.engine.mixed import SAMPLING, assert_same_reply, mixed_calls
from training.random_models import llama_config
from turnout.types import SamplingParams, Token


async def test_a_seeded_answer_is_the_same_alone_and_in_a_mixed_batch(pool: LocalPool, pair_folder: Path) -> None:
    calls = mixed_calls()
    alone = [await answer(pool, call) for call in calls]
    together = await ask_all(pool, calls)
    assert sum(len(reply.ids) for reply in alone) > 150
    for call, expected, got in zip(calls, alone, together, strict=True):
        assert_same_reply(pair_folder, call, expected, got)
        if call.method != "speculative":
            assert_claimed(pair_folder, call, got)


@pytest.mark.parametrize("engine", [{"block_size": 3, "token_budget": 5}, {"block_size": 16, "max_batch": 2}])
async def test_a_seeded_answer_does_not_depend_on_how_the_engine_is_set_up(
    pool: LocalPool, pair_folder: Path, engine: dict[str, int]
) -> None:
    calls = mixed_calls()
    expected = await ask_all(pool, calls)
    other = LocalPool.load("pair", pair_config(pair_folder, **engine))
    for call, mine, theirs in zip(calls, expected, await ask_all(other, calls), strict=True):
        assert_same_reply(pair_folder, call, mine, theirs)
    await other.close()


async def test_matched_speculation_equals_plain_decoding_with_the_same_seed(pool: LocalPool, pair_folder: Path) -> None:
    accepted = 0
    for i, prompt in enumerate(random_prompts(10, 40, seed=6)):
        options = {"seed": i, "max_tokens": 24, **SAMPLING[i % len(SAMPLING)]}
        plain, *drafted = await ask_all(
            pool,
            [call_of(prompt, "plain", **options)]
            + [call_of(prompt, "speculative", {"length": "fixed", "draft_length": k}, **options) for k in (1, 4, 7)],
        )
        for reply in drafted:
            call = call_of(prompt, "speculative", {"verifier": "match"}, **options)
            assert_same_tokens(
                plain.ids,
                reply.ids,
                lambda place, c=call, p=plain: reference(pair_folder / "large").scores(
                    c.prompt, p.ids, c.sampling, c.sampling.seed
                )[place],
                "match",
            )
            assert (reply.text, reply.reasons) == (plain.text, plain.reasons)
            accepted += reply.usage.speculation.accepted_tokens
    assert accepted > 0


async def test_log_probabilities_are_the_same_however_the_tokens_were_made(pool: LocalPool, pair_folder: Path) -> None:
    prompt = random_prompts(1, 30, seed=9)[0]
    options = {"temperature": 0.8, "logprobs": 3, "max_tokens": 12}
    calls = [
        call_of(prompt, "plain", **options),
        call_of(prompt, "speculative", {"verifier": "match"}, **options),
        call_of(prompt, "speculative", {"verifier": "rejection"}, **options),
    ]
    for reply in await ask_all(pool, calls):
        logp = reference(pair_folder / "large").logits([*prompt, *reply.ids])[len(prompt) - 1 : -1].log_softmax(-1)
        for row, token in zip(logp, reply.tokens, strict=True):
            assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
            best = row.topk(3)
            assert [value for _, _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_a_reading_ahead_never_holds_up_a_decode_of_the_same_sequence() -> None:
    model, _ = twins(llama_config(60, hidden_size=32, pad_token_id=0, eos_token_id=1), seed=4, token_budget=8)
    seq = Sequence([2] * 40, SamplingParams(temperature=0.0), seed=0)
    reading = asyncio.create_task(model.prefill_ahead(seq))
    await asyncio.sleep(0)
    assert model.batcher.num_waiting == 1
    rows = await model.extend(seq)
    assert rows[0].token >= 0
    assert not reading.done()
    await reading
    meter = seq.meter.models["m"]
    assert (meter.processed_tokens, meter.forwards) == (40, 5)
    model.release(seq)
    await model.close()


async def test_reading_ahead_uses_spare_room_only_and_finds_shared_prefixes() -> None:
    model, _ = twins(llama_config(60, hidden_size=32, pad_token_id=0, eos_token_id=1), seed=4, block_size=4)
    first = Sequence([2] * 12, SamplingParams(temperature=0.0), seed=0)
    await model.extend(first)
    second = Sequence([2] * 12 + [3, 4], SamplingParams(temperature=0.0), seed=0)
    await model.prefill_ahead(second)
    meter = second.meter.models["m"]
    assert (meter.cached_tokens, meter.prompt_tokens, meter.catchup_tokens) == (12, 1, 0)
    for seq in (first, second):
        model.release(seq)
    await model.close()


async def test_waiting_operations_share_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = twins(llama_config(60, hidden_size=32, pad_token_id=0, eos_token_id=1), seed=4)
    sizes: list[int] = []
    original = model.batcher.runner.run
    monkeypatch.setattr(model.batcher.runner, "run", lambda feeds: (sizes.append(len(feeds)), original(feeds))[1])
    seqs = [Sequence([2, i], SamplingParams(temperature=0.0, max_tokens=5), seed=0) for i in range(20)]
    await asyncio.gather(*(model.decode(seq) for seq in seqs))
    assert sizes == [20] * 5
    for seq in seqs:
        model.release(seq)
    await model.close()


async def test_methods_that_gather_operations_share_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method resumes after its branches have: the next step waits for it, not only for those without branches."""
    model, _ = twins(llama_config(60, hidden_size=32, pad_token_id=0, eos_token_id=1), seed=4)
    sizes: list[int] = []
    original = model.batcher.runner.run
    monkeypatch.setattr(model.batcher.runner, "run", lambda feeds: (sizes.append(len(feeds)), original(feeds))[1])

    async def method(number: int) -> None:
        seqs = [Sequence([2, number, i], SamplingParams(temperature=0.0), seed=0) for i in range(1 + number % 2)]
        for _ in range(5):
            first, *others = map(model.extend, seqs)
            rows = await asyncio.gather(first, *others) if others else [await first]
            for seq, [row] in zip(seqs, rows, strict=True):
                seq.append(Token(row.token, "m"))
        for seq in seqs:
            model.release(seq)

    await asyncio.gather(*(method(number) for number in range(6)))
    assert sizes == [9] * 5
    await model.close()


async def test_no_forward_exceeds_the_budget_and_decodes_advance_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = twins(llama_config(60, hidden_size=32, pad_token_id=0, eos_token_id=1), seed=4, token_budget=8)
    model.batcher.times = None  # steps bounded by tokens only, whatever this machine takes for them
    steps: list[list[int]] = []
    original, queued = model.batcher.runner.run, threading.Event()

    def run(feeds: Items[Feed]) -> Any:
        steps.append([len(feed.tokens) for feed in feeds])
        if len(steps) == 2:
            assert queued.wait(60)
        return original(feeds)

    monkeypatch.setattr(model.batcher.runner, "run", run)
    decodes = [Sequence([2, i], SamplingParams(temperature=0.0, max_tokens=9), seed=0) for i in range(3)]
    running = [asyncio.create_task(model.decode(seq)) for seq in decodes]
    while len(steps) < 2:
        await asyncio.sleep(0)
    long = Sequence([5] * 20, SamplingParams(temperature=0.0), seed=0)
    running.append(asyncio.create_task(model.extend(long)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    queued.set()
    await asyncio.gather(*running)
    assert all(sum(step) <= 8 for step in steps)
    mixed = [step for step in steps if max(step) > 2]
    assert mixed == [[1, 1, 1, 5]] * 4
    for seq in (*decodes, long):
        model.release(seq)
    await model.close()


async def test_a_draft_larger_than_the_budget_runs_alone() -> None:
    model, plain = twins(llama_config(60, hidden_size=32, pad_token_id=0, eos_token_id=1), seed=4, token_budget=3)
    seq = Sequence([2, 3, 4, 5, 6, 7], SamplingParams(temperature=0.0), seed=0)
    other = Sequence([9, 8], SamplingParams(temperature=0.0, max_tokens=6), seed=0)
    verdict, _ = await asyncio.gather(
        model.verify(seq, DraftTree.chain([1, 2, 3, 4, 5, 6], "d"), MatchVerifier()), model.decode(other)
    )
    assert verdict.tokens[0].id == int(plain.logits(seq.tokens)[-1].argmax())
    for each in (seq, other):
        model.release(each)
    await model.close()


async def test_an_empty_draft_keeps_what_was_computed() -> None:
    model, plain = twins(llama_config(60, hidden_size=32, pad_token_id=0, eos_token_id=1), seed=4, block_size=4)
    seq = Sequence([2, 3, 4, 5, 6, 7], SamplingParams(temperature=0.0), seed=0)
    verdict = await model.verify(seq, DraftTree.chain([], "d"), MatchVerifier())
    assert [token.id for token in verdict.tokens] == [int(plain.logits(seq.tokens)[-1].argmax())]
    assert model.batcher.tables[seq].tokens == seq.tokens
    model.release(seq)
    await model.close()


async def test_rows_of_every_position_are_read_once_though_the_cache_was_lost_between() -> None:
    model, plain = twins(
        llama_config(60, hidden_size=32, pad_token_id=0, eos_token_id=1), seed=4, token_budget=4, block_size=4
    )
    seq = Sequence([2, 3], SamplingParams(), seed=0)
    extra = tuple(range(4, 20))
    reading = asyncio.create_task(model.extend(seq, extra, ReadSpec(draw=None, logits=True), every=True))
    work: QueuedOperation | None = None
    while work is None or len(work.rows) < 5:
        await asyncio.sleep(0)
        work = next(iter(model.batcher._queue), work)
    while work.table.in_flight:
        await asyncio.sleep(0)
    assert len(work.rows) < len(extra)
    work.table.drop()
    rows = await reading
    expected = plain.logits([2, 3, *extra])[1:]
    assert len(rows) == len(expected)
    for row, fresh in zip(rows, expected, strict=True):
        assert float((row.logits - fresh).abs().max()) < 1e-4
    model.release(seq)
    await model.close()
