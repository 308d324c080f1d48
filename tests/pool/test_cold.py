"""COLD: energies that fall, words that come in, texts that lead to another; over the pool's own models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from decoding.methods.cold import SCHEDULE, ColdParams, Program, Targets, noise_factor
from decoding.sequence import Sequence
from decoding.text import codec_of, text_within
from pool.local_pool import LocalPool
from tests.engine.harness import Reply, ask, pair_config, until
from turnout.errors import Code, TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "abc"
SMALL = {"length": 5, "steps": 4, "chains": 2, "separators": [], "temperature": 1.0, "noise": 0.0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(pair_folder: Path) -> AsyncIterator[LocalPool]:
    """One for all: the weights are read once, and nothing of any request is left."""
    loaded = LocalPool.load("pair", pair_config(pair_folder, block_size=8, token_budget=48))
    yield loaded
    stats = loaded.stats()
    assert (stats.sequences, stats.used_blocks, stats.waiting, stats.requests) == (0, 0, 0, 0)
    await loaded.close()


@asynccontextmanager
async def program(pool: LocalPool, prompt: str = PROMPT, **params: Any) -> AsyncIterator[Program]:
    models, chosen = pool.model_pool, ColdParams(**SMALL | params)
    codec = codec_of(models, "method")
    seq = Sequence(codec.encode(prompt), SamplingParams(max_tokens=32), 7)
    made = Program(models, seq, Targets.of(codec, seq, models.large, chosen), chosen)
    try:
        yield made
    finally:
        models.large.release(seq)


async def cold(pool: LocalPool, prompt: str = PROMPT, sampling: dict[str, Any] | None = None, **params: Any) -> Reply:
    return await ask(pool, prompt, "cold", SMALL | params, **{"max_tokens": 12, **(sampling or {})})


@pytest.mark.parametrize("weight", [0.0, 0.4])
async def test_without_noise_the_energy_falls_at_every_small_step(pool: LocalPool, weight: float) -> None:
    async with program(
        pool, constraint_weight=weight, keywords=("qu",), right_context="xyz", top_k=261, steps=6
    ) as run:
        logits, energies = await run.initial(), []
        for step in range(6):
            energy, gradient = await run.energy(logits)
            energies.append(energy)
            logits = run._moved(logits, 0.3 * gradient, step)
        falls = torch.stack(energies).diff(dim=0)
        assert (falls < 0).all(), falls
        assert torch.equal(logits[0], logits[1])  # nothing tells chains apart but noise


async def test_words_come_in_as_their_weight_rises(pool: LocalPool) -> None:
    params = {"keywords": ["q", "zz"], "step_size": 4.0, "noise": 1.0, "temperature": 0.001, "steps": 12}
    found = [await cold(pool, constraint_weight=weight, **params) for weight in (0.0, 0.8)]
    assert [reply.usage.measures["cold_keywords"] for reply in found] == [0.0, 2.0]
    assert "q" in found[1].text
    assert "zz" in found[1].text
    assert found[1].usage.measures["cold_energy"] > 0.0


async def test_without_constraints_the_text_is_fluent(pool: LocalPool) -> None:
    """Nearly as probable as the greedy one, though keywords were allowed everywhere."""
    async with program(pool, constraint_weight=0.0, keywords=("q", "zz"), noise=0.3, steps=15) as run:
        begin = await run.initial()
        end, _ = await run.dynamics(begin)
        texts = [await run.discretised(logits) for logits in (begin[0], end[0])]
        greedy, found = (score.total / len(texts[0]) for score in await run.model.score(run.seq, texts))
        assert found > greedy - 1.0
        [other] = await run.model.score(run.seq, [run.targets.kept[:1] * 5])
        assert other.total / 5 < greedy - 4.0


async def test_a_text_leads_to_the_right_hand_context(pool: LocalPool) -> None:
    """Its log-likelihood after the text rises, as tokens and not only softly."""
    async with program(pool, right_context="xyz", constraint_weight=0.95, step_size=2.0, chains=1, steps=10) as run:
        begin = await run.initial()
        end, _ = await run.dynamics(begin)
        texts = [await run.discretised(logits) for logits in (begin[0], end[0])]
        after = run.targets.after
        scores = await run.model.score(run.seq, [(*text, *after) for text in texts])
        before, now = (sum(score.token_logprobs[-len(after) :]) for score in scores)
        assert now > before + 0.5


async def test_a_text_comes_to_resemble_a_reference(pool: LocalPool) -> None:
    """It has more of the reference's letters than where it began; which ones, rounding may decide."""
    params = {"reference": "wxyzw", "longest_ngram": 2, "constraint_weight": 0.99, "step_size": 6.0, "top_k": 261}
    async with program(pool, steps=80, chains=1, **params) as run:
        begin = await run.initial()
        end, _ = await run.dynamics(begin)
        texts = [await run.discretised(logits) for logits in (begin[0], end[0])]
        before, now = (len(set(text_within(run.targets.codec, text)) & set("wxyz")) for text in texts)
        assert now > before


async def test_seeds_repeat_and_noise_tells_them_apart(pool: LocalPool) -> None:
    params = {"noise": 2.0, "steps": 3, "length": 3, "keywords": ["q"]}
    replies = [await cold(pool, sampling={"seed": seed}, **params) for seed in (3, 3, 4)]
    energies = [reply.usage.measures["cold_energy"] for reply in replies]
    assert replies[0].ids == replies[1].ids
    assert energies[0] == pytest.approx(energies[1], rel=1e-4)
    assert energies[0] != pytest.approx(energies[2], rel=1e-3)


async def test_tokens_are_the_models_best_or_a_keywords(pool: LocalPool) -> None:
    """Whatever the logits say: with one candidate a place it is greedy decoding, or the keyword's token."""
    async with program(pool, keywords=("q",), top_k=1) as run:
        wild = torch.randn((5, 261), generator=torch.Generator().manual_seed(2))
        wild[:, list(run.targets.kept)] = -9.0
        wild[2, run.targets.kept[-1]] = 99.0
        path: tuple[int, ...] = ()
        for place, token in enumerate(await run.discretised(wild)):
            [row] = await run.model.score(run.seq, [(*path, token)])
            assert row.greedy[-1] or token in run.targets.kept
            assert place != 2 or token == run.targets.kept[-1]
            path += (token,)


async def test_the_model_ends_the_sentence_and_the_requests_rules_hold(pool: LocalPool) -> None:
    whole = await cold(pool, separators=[], sampling={"logprobs": 1})
    assert [len(whole.ids) - 1, whole.reasons] == [5, ["stop"]]  # and the token that ends the answer
    assert all(token.logprob is not None for token in whole.tokens[:5])
    more = await cold(pool, separators=["\n"])
    assert more.ids[:5] == whole.ids[:5]
    assert len(more.ids) == 12
    assert len((await cold(pool, sampling={"max_tokens": 3})).ids) == 3
    barred = await cold(pool, sampling={"logit_bias": {whole.ids[0]: -100.0}})
    assert barred.ids[0] != whole.ids[0]


async def test_a_right_to_left_model_takes_part_in_the_fluency(pool: LocalPool) -> None:
    params = {"right_context": "xyz", "constraint_weight": 0.0, "chains": 1}
    asked = (1.0, ""), (1.0, "small"), (0.0, "small"), (0.5, "small")
    energies = []
    for share, role in asked:
        async with program(pool, right_to_left=role, forward_share=share, **params) as run:
            logits = await run.initial()
            if role:
                model = pool.model_pool.by_role(role)
                run.back = model, Sequence(run.targets.after[::-1], SamplingParams(max_tokens=1), 0)
            energies.append(float((await run.energy(logits))[0][0]))
            if run.back is not None:
                model.release(run.back[1])
    assert energies[0] == pytest.approx(energies[1])
    assert energies[2] != pytest.approx(energies[0], rel=1e-2)
    assert energies[3] == pytest.approx((energies[0] + energies[2]) / 2, rel=1e-4)
    assert (await cold(pool, right_to_left="small", steps=2)).ids
    with pytest.raises(TurnoutError, match="'cold' needs a model with the role 'judge'"):
        await cold(pool, right_to_left="judge")


async def test_what_cannot_be_asked_is_refused_by_name(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown, real = pool.tokenizer.encode("\ufffd"), pool.tokenizer.token_bytes
    monkeypatch.setattr(pool.tokenizer, "token_bytes", lambda token: b"?" if token in unknown else real(token))
    for params, field, said in (
        ({"keywords": ["fi", "n\ufffd"]}, "keywords.1", "is not in the vocabulary"),
        ({"keywords": ["abc", "def"]}, "keywords", "take at least 6 tokens; 5 are optimised"),
        ({"keywords": [" "]}, "keywords.0", "is blank"),
        ({"steps": 10_001}, "steps", "less than or equal to 10000"),
        ({"noise": float("inf")}, "noise", "finite"),
        ({"temperature": 1e-300}, "temperature", "greater than or equal to"),
        ({"right_context": "x" * 600}, "right_context", "tokens with the prompt; at most 512"),
        ({"right_to_left": "The Other"}, "right_to_left", "pattern"),
    ):
        with pytest.raises(TurnoutError) as refused:
            await cold(pool, **params)
        assert refused.value.field == f"method.params.{field}"
        assert said in refused.value.message


async def test_unbounded_work_is_refused_for_all_answers_together(pool: LocalPool) -> None:
    for params, n, field, said in (
        ({"steps": 9999, "chains": 16}, 14, "steps", "read 17920000 tokens, 8 of each of 224 chains"),
        ({"length": 64, "chains": 16}, 64, "chains", "17104896 logits of 1024 chains"),
    ):
        with pytest.raises(TurnoutError) as refused:
            await cold(pool, sampling={"n": n, "max_tokens": 64}, **params)
        assert (refused.value.code, refused.value.field) == (Code.OUT_OF_RANGE, f"method.params.{field}")
        assert said in refused.value.message


async def test_where_the_model_may_only_end_there_is_no_text(pool: LocalPool) -> None:
    sampling = {"temperature": 1.0, "top_k": 1, "logit_bias": {256: 100.0}, "logprobs": 1}
    assert (await cold(pool, sampling=sampling)).ids == [256]


async def test_a_cancelled_request_leaves_nothing(pool: LocalPool) -> None:
    """The pool's fixture looks at what is left."""
    asked = asyncio.create_task(cold(pool, steps=10_000))
    meant = pool.engines["large"]
    await until(lambda: bool(meant.soft_readers._users) and meant.soft_readers.reader is not None)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not meant.soft_readers._users


async def test_weights_without_a_gradient_are_refused(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.engines["large"], "weights", "int8")
    with pytest.raises(TurnoutError, match="keeps its weights as int8, which cannot be differentiated") as refused:
        await cold(pool)
    assert (refused.value.code, refused.value.field) == (Code.INVALID_ARGUMENT, "method")
    with pytest.raises(TurnoutError, match="'cold' needs the tokens of its models, and 'far'"):
        get_method("cold").check_text(ColdParams(), {"large": "far"})


async def test_the_noise_falls_in_steps() -> None:
    found = [noise_factor(step, 2000) for step in (0, 49, 50, 499, 500, 1000, 1500, 1999)]
    assert found == [1.0, 1.0, 0.5, 0.5, 0.1, 0.05, 0.01, 0.01]
    assert SCHEDULE[-1][0] == 1.0
