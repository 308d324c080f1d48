"""The cascade: whose answer it is, when it escalates, what is shown when, and what it costs."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from decoding.fakes import TableModel, markov, pair
from decoding.methods.cascade import confidence
from decoding.model import Request
from decoding.recorder import watched
from decoding.sequence import Sequence
from tests.constrained import CHARS, END, char_compiler
from turnout.registry import get_method
from turnout.structure import Structure
from turnout.types import FinishReason, SamplingParams, Token


@pytest.mark.parametrize("kind", ["logprob", "least_logprob", "entropy"])
async def test_every_answer_is_one_models_own(run, make_model, kind: str):
    small, large = make_model("small", 1, num_parameters=1), make_model("large", 2, num_parameters=10)
    owners = set()
    for seed in range(12):
        alone = {
            role: await run("plain", small, large, {"model": role}, seed=seed, logprobs=0)
            for role in ("small", "large")
        }
        seq = Sequence((1, 2), SamplingParams(max_tokens=24), seed)
        await small.decode(seq, watched())
        sure = confidence(seq.generated, kind)
        threshold = {"logprob": -1.3, "least_logprob": -4.0, "entropy": -1.8}[kind]
        found = await run(
            "cascade", small, large, {"confidence": kind, "threshold": threshold, "keep_cut": True}, seed=seed
        )
        role = "small" if sure >= threshold else "large"
        owners.add(role)
        assert found.ids == alone[role].ids
        assert found.owners == role[0].upper() * 24
    assert owners == {"small", "large"}


@pytest.mark.parametrize(("threshold", "owner"), [(-1000.0, "S"), (1.0, "L")])
async def test_at_its_limits_it_is_one_model_alone(run, make_model, threshold: float, owner: str):
    small, large = make_model("small", 1), make_model("large", 2)
    found = await run("cascade", small, large, {"threshold": threshold, "keep_cut": True})
    assert set(found.owners) == {owner}


def test_confidence_by_hand():
    tokens = [Token(1, "m", logprob=-0.1, entropy_bits=0.5), Token(2, "m", logprob=-0.5, entropy_bits=1.5)]
    assert confidence(tokens, "logprob") == pytest.approx(-0.3)
    assert confidence(tokens, "least_logprob") == -0.5
    assert confidence(tokens, "entropy") == -1.0
    with pytest.raises(ValueError, match="no confidence"):
        confidence([], "logprob")


def test_confidence_under_a_structure_is_among_the_tokens_it_allows_and_without_forced_ones():
    """The second token was forced: -9 nats before the structure are no doubt of the model's."""
    tokens = [
        Token(1, "m", logprob=-3.0, entropy_bits=0.5), Token(2, "m", logprob=-9.0, entropy_bits=0.0),
        Token(3, "m", logprob=-1.0, entropy_bits=1.5),
    ]  # fmt: skip
    allowed = [-2.0, math.nan, -0.6]
    assert confidence(tokens, "logprob", allowed) == pytest.approx((-1.0 - 0.4) / 2)
    assert confidence(tokens, "least_logprob", allowed) == -1.0
    assert confidence(tokens, "entropy", allowed) == -1.0
    assert confidence(tokens, "logprob", [math.nan] * 3) == 0.0


@pytest.mark.parametrize("kind", ["logprob", "least_logprob", "entropy"])
async def test_tokens_that_a_structure_forces_make_no_answer_the_large_models(kind: str):
    """Both models are as unsure of every token as can be; the structure leaves them no choice."""
    small, large = (TableModel(name, lambda _: torch.zeros(len(CHARS) + 2), len(CHARS) + 2) for name in ("s", "l"))
    seq = Sequence([2], SamplingParams(max_tokens=9, temperature=0.0), 0, (END,))
    seq.constraint = char_compiler().compile(Structure(kind="regex", value="abcd")).clone()
    info = get_method("cascade")
    params = info.parse({"confidence": kind, "threshold": -0.01})
    async for _ in info.run(Request("r", seq), pair(small, large), params):
        pass
    assert [token.id for token in seq.generated] == [2, 3, 4, 5, END]
    assert {token.source for token in seq.generated} == {"s"}


async def test_an_answer_that_was_cut_off_is_not_kept_unless_asked(run, make_model):
    small, large = make_model("small", 1), make_model("large", 2)
    cut = {"threshold": -1000.0}
    assert set((await run("cascade", small, large, cut)).owners) == {"L"}
    ended = await run("cascade", small, large, cut, eos=tuple(range(6)))
    assert ended.seq.finish_reason is FinishReason.STOP
    assert set(ended.owners) == {"S"}


async def test_nothing_is_shown_before_it_is_decided_and_nothing_is_taken_back(make_model):
    """The first segment comes after the small model's last forward; every segment's tokens are the answer's."""
    small, large = make_model("small", 1), make_model("large", 2)
    info = get_method("cascade")
    for threshold in (-1000.0, 1.0):
        seq = Sequence((1, 2), SamplingParams(max_tokens=24), 0)
        params = info.parse({"threshold": threshold, "keep_cut": True})
        shown, forwards = [], []
        async for segment in info.run(Request("r", seq), pair(small, large), params):
            shown += segment.tokens
            forwards.append(small.forwards)
            assert seq.generated[: len(shown)] == shown
        assert len(set(forwards)) == 1
        assert shown == seq.generated
        if threshold == 1.0:
            assert len(forwards) > 2  # the large model's answer streams


async def test_both_models_are_paid_for(run, make_model):
    small, large = make_model("small", 1, num_parameters=1), make_model("large", 2, num_parameters=10)
    meter = (await run("cascade", small, large, {"threshold": 1.0})).seq.meter
    assert meter.models["small"].discarded_tokens == 24
    assert meter.models["small"].generated_tokens == 0
    assert meter.models["large"].generated_tokens == 24
    assert meter.models["small"].flops == 2 * (2 + 23)
    assert meter.models["large"].flops == 2 * 10 * (2 + 23)
    assert meter.switches == 1
    kept = (await run("cascade", small, large, {"threshold": -1000.0, "keep_cut": True})).seq.meter
    assert list(kept.models) == ["small"]
    assert (kept.models["small"].generated_tokens, kept.models["small"].discarded_tokens) == (24, 0)


async def test_cancelling_frees_the_held_answer(make_model):
    small, large = make_model("small", 1), make_model("large", 2)
    seq = Sequence((1, 2), SamplingParams(max_tokens=10_000), 0)
    info = get_method("cascade")

    async def go() -> None:
        async for _ in info.run(Request("r", seq), pair(small, large), info.parse({})):
            pass

    task = asyncio.create_task(go())
    while not small.cached:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not small.cached


async def test_escalating_the_unsure_beats_escalating_at_random():
    """A small model that guesses where it does not know: its confidence finds those questions."""
    vocab = 12
    sharp = torch.full((vocab, vocab), 1e-4)
    for token in range(vocab):
        sharp[token, (token + 1) % vocab] = 1.0
    dull = sharp.clone()
    dull[: vocab // 2] = 1.0  # after half of all tokens it has no idea
    small = TableModel("small", markov(dull / dull.sum(-1, keepdim=True)), vocab)
    large = TableModel("large", markov(sharp / sharp.sum(-1, keepdim=True)), vocab)
    info = get_method("cascade")
    right = escalated = 0
    for token in range(vocab):
        seq = Sequence([token], SamplingParams(max_tokens=1), 3)
        params = info.parse({"threshold": -math.log(2), "keep_cut": True})
        async for _ in info.run(Request("r", seq), pair(small, large), params):
            pass
        right += seq.tokens[-1] == (token + 1) % vocab
        escalated += seq.generated[0].source == "large"
    assert (right, escalated) == (vocab, vocab // 2)
