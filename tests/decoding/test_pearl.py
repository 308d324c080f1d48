"""PEARL on models made of tables: the text, the ends, the meters, faults, and what runs at the same time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel, markov, pair
from decoding.model import Request
from decoding.sequence import Sequence
from tests.decoding.near_models import near
from turnout.errors import Code, TurnoutError
from turnout.registry import get_method
from turnout.types import FinishReason, SamplingParams, TokenKind

VERIFIERS = ["match", "rejection"]
PEARL = get_method("pearl")


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(
    "penalties", [{}, {"repetition_penalty": 1.5, "frequency_penalty": 0.7}], ids=["", "penalties"]
)
async def test_greedy_output_is_plain_greedy(run: Any, make_model: Any, verifier: str, penalties: Any) -> None:
    small, large = near(make_model)
    accepted = 0
    for index in range(25):
        common = {"prompt": (index % 12, index // 12), "temperature": 0, "max_tokens": 12, **penalties}
        plain = await run("plain", small, large, **common)
        done = await run("pearl", small, large, {"verifier": verifier, "draft_length": 1 + index % 6}, **common)
        assert done.ids == plain.ids
        accepted += done.seq.meter.speculation.accepted_tokens
    assert accepted > 25


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6, "top_k": 4}, {"top_p": 0.8, "presence_penalty": 1.0}, {"min_p": 0.1}]
)
async def test_match_equals_plain_decoding_with_the_same_seed(run: Any, make_model: Any, sampling: Any) -> None:
    small, large = near(make_model)
    for seed in range(9):
        plain = await run("plain", small, large, seed=seed, **sampling)
        params = {"draft_length": 1 + seed % 7} if seed % 8 else {"draft_length": "auto"}
        done = await run("pearl", small, large, params, seed=seed, **sampling)
        assert done.ids == plain.ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("length", [1, 2, 5])
async def test_drafting_with_the_target_itself_accepts_everything(
    run: Any, make_model: Any, verifier: str, temperature: float, length: int
) -> None:
    """One token in the first round, a block in every later one, and the answer's last token is the target's."""
    params = {"verifier": verifier, "draft_length": length}
    small, large = make_model("small", 5), make_model("large", 5)
    done = await run("pearl", small, large, params, temperature=temperature, max_tokens=4 * length + 2)
    speculation = done.seq.meter.speculation
    assert speculation.accepted_tokens == 4 * length + 1
    assert speculation.acceptance == [1.0] * length
    assert speculation.rounds == large.forwards
    assert [len(segment.tokens) for segment in done.segments[:5]] == [1] + [length] * 4
    assert done.owners == "S" * (4 * length + 1) + "L"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5}])
async def test_no_token_depends_on_the_lengths_of_blocks(run: Any, make_model: Any, sampling: Any) -> None:
    """So an answer may be resumed anywhere, and measured times decide nothing: rejection sampling included."""
    small, large = near(make_model)
    kinds = set()
    for seed in range(8):
        answers = [
            await run("pearl", small, large, {"verifier": "rejection", "draft_length": length}, seed=seed, **sampling)
            for length in (1, 3, 7)
        ]
        assert len({tuple(each.ids) for each in answers}) == 1
        kinds |= {token.kind for token in answers[0].seq.generated}
        whole, cut = answers[0].seq, 1 + seed % 22
        part = Sequence(whole.tokens[:2], whole.sampling, seed)
        for token in whole.generated[:cut]:
            part.append(token)
        resumed = PEARL.run(
            Request("r", part), pair(small, large), PEARL.parse({"verifier": "rejection", "draft_length": 3})
        )
        async for _ in resumed:
            pass
        assert part.tokens == whole.tokens
    assert kinds == {TokenKind.ACCEPTED, TokenKind.RECOVERED, TokenKind.BONUS}


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("length", [1, 3, 6])
async def test_an_end_inside_a_block_ends_the_answer(run: Any, make_model: Any, verifier: str, length: int) -> None:
    small, large = near(make_model)
    reasons = set()
    for index in range(24):
        common: dict[str, Any] = {"prompt": (index % 12, index // 12), "temperature": 0, "max_tokens": 12}
        whole = await run("plain", small, large, **common)
        for options in (
            {"eos": (whole.ids[5],)},
            {"stop_token_ids": (whole.ids[9],)},
            {"max_tokens": 1 + index % 9},
        ):
            plain = await run("plain", small, large, **{**common, **options})
            params = {"verifier": verifier, "draft_length": length}
            done = await run("pearl", small, large, params, **{**common, **options})
            assert (done.ids, done.seq.finish_reason) == (plain.ids, plain.seq.finish_reason)
            assert done.seq.meter.speculation.emitted_tokens == len(done.ids)
            assert done.seq.meter.speculation.accepted_tokens <= len(done.ids)
            reasons.add(done.seq.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


class StopText:
    """Ends the answer when the last two tokens are these."""

    watches = True

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.seen: tuple[int, ...] = ()

    def feed(self, token_id: int) -> bool:
        self.seen = (*self.seen, token_id)[-2:]
        return self.seen == self.tokens

    def clone(self) -> StopText:
        return StopText(*self.tokens)


@pytest.mark.parametrize("verifier", VERIFIERS)
async def test_a_stop_string_is_seen_in_emitted_text_only(run: Any, make_model: Any, verifier: str) -> None:
    small, large = near(make_model)
    stopped = 0
    for seed in range(12):
        whole = await run("pearl", small, large, {"verifier": verifier, "draft_length": 4}, seed=seed)
        stop = StopText(*whole.ids[7:9])
        seq = Sequence((1, 2), SamplingParams(max_tokens=24), seed, (), stop)
        async for _ in PEARL.run(Request("r", seq), pair(small, large), PEARL.parse({"verifier": verifier})):
            pass
        generated = [token.id for token in seq.generated]
        assert generated == whole.ids[: len(generated)]
        assert tuple(generated[-2:]) == stop.tokens
        assert len(generated) <= 9
        stopped += seq.finish_reason is FinishReason.STOP
    assert stopped == 12


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
async def test_nothing_is_drafted_that_has_no_room(run: Any, make_model: Any, verifier: str, max_tokens: int) -> None:
    small, large = make_model("small", 5), make_model("large", 5)
    done = await run("pearl", small, large, {"verifier": verifier, "draft_length": 9}, max_tokens=max_tokens)
    assert len(done.ids) == max_tokens
    assert done.seq.meter.speculation.draft_tokens == small.forwards == max_tokens - 1


async def test_nothing_is_drafted_behind_an_end(run: Any) -> None:
    steps = torch.zeros(6, 6)
    steps[torch.arange(6), (torch.arange(6) + 1) % 6] = 1.0
    small, large = TableModel("small", markov(steps), 6), TableModel("large", markov(steps), 6)
    for verifier in VERIFIERS:
        done = await run(
            "pearl", small, large, {"verifier": verifier, "draft_length": 5}, prompt=(0,), temperature=0, eos=(3,)
        )
        assert done.ids == [1, 2, 3]
        assert done.seq.finish_reason is FinishReason.STOP
        assert done.seq.meter.speculation.draft_tokens == done.seq.meter.speculation.accepted_tokens == 3
        assert [token.kind for token in done.seq.generated] == [TokenKind.ACCEPTED] * 3


@pytest.mark.parametrize("verifier", VERIFIERS)
async def test_wasted_drafts_are_charged(run: Any, verifier: str) -> None:
    """A draft that is always wrong costs a block for every token."""
    right, wrong = torch.zeros(4, 4), torch.zeros(4, 4)
    right[:, 1] = wrong[:, 2] = 1.0
    small, large = TableModel("small", markov(wrong), 4), TableModel("large", markov(right), 4)
    done = await run("pearl", small, large, {"verifier": verifier, "draft_length": 3}, prompt=(0,), max_tokens=10)
    assert done.ids == [1] * 10
    speculation, meter = done.seq.meter.speculation, done.seq.meter.models["small"]
    assert (speculation.rounds, speculation.accepted_tokens) == (10, 0)
    assert speculation.draft_tokens == small.forwards == 7 * 3 + 2 + 1
    assert meter.draft_tokens == 7 * 2 + 1
    assert [token.kind for token in done.seq.generated] == [TokenKind.RECOVERED] * 9 + [TokenKind.BONUS]


@pytest.mark.parametrize("verifier", VERIFIERS)
async def test_log_probabilities_are_the_targets(run: Any, make_model: Any, verifier: str) -> None:
    small, large = near(make_model)
    done = await run("pearl", small, large, {"verifier": verifier, "draft_length": 3}, logprobs=2)
    context = [1, 2]
    for token in done.seq.generated:
        logp = large.next_logits(context).log_softmax(-1)
        assert token.logprob == pytest.approx(logp[token.id].item(), abs=1e-5)
        assert [t for t, _ in token.top] == logp.topk(2).indices.tolist()
        context.append(token.id)
    assert len({token.kind for token in done.seq.generated}) > 1


async def test_a_candidate_is_judged_again_where_what_was_read_is_lost(run: Any, make_model: Any) -> None:
    """An actor that dies takes along what its last forward read."""
    small, large = near(make_model)
    params = {"verifier": "rejection", "draft_length": 3}
    for seed in range(12):
        whole = await run("pearl", small, large, params, seed=seed)
        taught, lost = large.observe, []

        def teach(*args: Any, taught: Any = taught, lost: list[int] = lost) -> None:
            lost.append(len(lost) % 2)
            if lost[-1] == 0:
                taught(*args)

        large.observe = teach  # type: ignore[method-assign]
        again = await run("pearl", small, large, params, seed=seed)
        large.observe = taught  # type: ignore[method-assign]
        assert again.seq.generated == whole.seq.generated
        assert sum(lost) > 0


async def test_what_is_not_verified_never_enters_the_sequence(make_model: Any) -> None:
    """At every turn of either model, the sequence is a beginning of the answer."""
    small, large = near(make_model)
    seen: list[list[int]] = []
    for model in (small, large):
        original = model._feed

        def feed(seq: Sequence, *args: Any, original: Any = original, **options: Any) -> None:
            seen.append(list(seq.tokens))
            original(seq, *args, **options)

        model._feed = feed  # type: ignore[method-assign]
    seq = Sequence((1, 2), SamplingParams(max_tokens=40), 3)
    async for _ in PEARL.run(Request("r", seq), pair(small, large), PEARL.parse({"draft_length": 5})):
        pass
    assert len(seen) > 40
    assert all(each == seq.tokens[: len(each)] for each in seen)


async def test_one_model_in_both_roles_is_refused(make_model: Any) -> None:
    model = make_model("both", 1)
    seq = Sequence((1, 2), SamplingParams(), 0)
    with pytest.raises(TurnoutError) as caught:
        async for _ in PEARL.run(Request("r", seq), pair(model, model), PEARL.parse({})):
            pass
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "method")


@pytest.mark.parametrize("broken", ["small", "large"])
async def test_where_one_model_fails_the_other_ends_too(make_model: Any, broken: str) -> None:
    small, large = near(make_model)
    failing, waiting = (small, large) if broken == "small" else (large, small)
    ended = asyncio.Event()
    entered = asyncio.Event()

    async def fail(*_: Any, **__: Any) -> Any:
        await entered.wait()
        raise RuntimeError("planted")

    async def wait(*_: Any, **__: Any) -> Any:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    for name in ("extend", "verify"):
        setattr(failing, name, fail)
        setattr(waiting, name, wait)
    seq = Sequence((1, 2), SamplingParams(), 0)
    with pytest.raises(RuntimeError, match="planted"):
        async for _ in PEARL.run(Request("r", seq), pair(small, large), PEARL.parse({})):
            pass
    assert ended.is_set()
    assert not seq.generated


async def test_a_cancelled_request_ends_both(make_model: Any) -> None:
    small, large = near(make_model)
    entered, ended = asyncio.Semaphore(0), []

    async def wait(*_: Any, **__: Any) -> Any:
        entered.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    for model in (small, large):
        for name in ("extend", "verify"):
            setattr(model, name, wait)
    seq = Sequence((1, 2), SamplingParams(), 0)

    async def go() -> None:
        async with aclosing(PEARL.run(Request("r", seq), pair(small, large), PEARL.parse({}))) as running:  # type: ignore[type-var]
            async for _ in running:
                pass

    task = asyncio.create_task(go())
    await entered.acquire()
    await entered.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(ended) == 2


def test_bounds_of_parameters() -> None:
    assert PEARL.parse({"draft_length": "auto"}) == PEARL.parse({})
    for params, field in (
        ({"draft_length": 0}, "method.params.draft_length"),
        ({"draft_length": "often"}, "method.params.draft_length"),
        ({"verifier": "typical"}, "method.params.verifier"),
    ):
        with pytest.raises(TurnoutError) as caught:
            PEARL.parse(params)
        assert caught.value.field == field


async def test_a_token_names_who_wrote_it(run: Any, make_model: Any) -> None:
    done = await run("pearl", *near(make_model), {"draft_length": 4}, max_tokens=80)
    by_kind = {(token.kind, token.source) for token in done.seq.generated}
    assert by_kind == {
        (TokenKind.ACCEPTED, "small"),
        (TokenKind.RECOVERED, "large"),
        (TokenKind.BONUS, "large"),
    }
