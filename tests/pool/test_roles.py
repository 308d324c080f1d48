"""A pool of three models: the usual methods answer as in a pool of two, and a method may read the third."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import decoding.methods
from pool.local_pool import LocalPool
from tests.engine.harness import answer, ask, call_of, pair_config, random_prompts
from turnout.config import MethodChoice, PoolConfig, TurnoutConfig, check_resources
from turnout.errors import Code, TurnoutError
from turnout.registry import get_method

JUDGED = '''
from decoding.decode_loop import stream
from decoding.sequence import Sequence
from turnout.registry import MethodParams, method

@method(params=MethodParams, lossless=False, needs=frozenset({"judge"}))
async def judged(request, models, params):
    """The large model answers, the judge is asked for its score of the answer."""
    seq = request.sequence
    async for segment in stream(models.large, seq):
        yield segment
    judge = models.by_role("judge")
    asked = Sequence(seq.tokens[: seq.num_prompt_tokens], seq.sampling, 0)
    asked.meter = seq.meter
    [score] = await judge.score(asked, [tuple(seq.answer)])
    judge.release(asked)
    request.extra["judge"] = sum(score.token_logprobs)
'''


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A method `judged`, which reads a third role."""
    (tmp_path / "judged.py").write_text(JUDGED, encoding="utf-8")
    monkeypatch.setattr(decoding.methods, "__path__", [*decoding.methods.__path__, str(tmp_path)])
    get_method.cache_clear()
    yield
    get_method.cache_clear()


def three(folder: Path, **pool: object) -> TurnoutConfig:
    """The pair with a judge, which is the small checkpoint once more."""
    config = pair_config(folder, block_size=8, token_budget=48)
    models = {**config.models, "judge-model": config.models["small"]}
    settings = PoolConfig(small="small", large="large", models={"judge": "judge-model"}, **pool)  # type: ignore[arg-type]
    return config.model_copy(update={"models": models, "pools": {"pair": settings}})


@pytest.fixture
async def judges(pair_folder: Path) -> AsyncIterator[LocalPool]:
    loaded = LocalPool.load("pair", three(pair_folder))
    yield loaded
    assert loaded.stats().sequences == 0
    await loaded.close()


@pytest.mark.parametrize("method", ["plain", "speculative", "entropy_adaptive", "cascade", "pearl", "best_of"])
async def test_the_usual_methods_answer_as_in_a_pool_of_two(pool: LocalPool, judges: LocalPool, method: str) -> None:
    for prompt in random_prompts(2, 20, seed=3):
        options = {"max_tokens": 12, "ignore_eos": True}
        two, third = [await ask(each, prompt, method, **options) for each in (pool, judges)]
        assert (third.ids, third.text) == (two.ids, two.text)
        assert set(third.usage.models) <= {"small", "large"}


async def test_every_role_is_described_counted_and_asked_alone(judges: LocalPool) -> None:
    assert judges.model_pool.roles == {"small": "small", "large": "large", "judge": "judge-model"}
    assert judges.model_pool.by_role("judge") is judges.members["judge-model"]
    described, *members = judges.models()
    assert described.roles == judges.model_pool.roles
    assert [each.name for each in members] == [each.model for each in judges.stats().members]
    alone = await answer(judges, call_of([65, 66], model="judge-model"))
    named = await ask(judges, [65, 66], "plain", {"model": "judge"})
    assert alone.ids == named.ids == (await ask(judges, [65, 66], "plain", {"model": "small"})).ids
    assert alone.usage.params == {"model": "judge"}
    assert {token.source for token in alone.tokens} == {"judge-model"}


@pytest.mark.usefixtures("judged")
async def test_a_method_may_read_the_third_role(pool: LocalPool, judges: LocalPool) -> None:
    reply = await ask(judges, [65, 66, 67], "judged", max_tokens=8, ignore_eos=True)
    assert reply.ids == (await ask(judges, [65, 66, 67], max_tokens=8, ignore_eos=True)).ids
    assert reply.usage.models["judge-model"].prompt_tokens > 0
    with pytest.raises(TurnoutError, match=r"^method: 'judged' needs a model with the role 'judge'") as caught:
        await ask(pool, [65, 66, 67], "judged")
    assert caught.value.code is Code.INVALID_ARGUMENT


@pytest.mark.usefixtures("judged")
def test_a_default_that_needs_another_role_is_refused_before_anything_is_loaded(pair_folder: Path) -> None:
    check_resources(three(pair_folder, default=MethodChoice(name="judged")))
    without = PoolConfig(small="small", large="large", default=MethodChoice(name="judged"))
    with pytest.raises(TurnoutError) as caught:
        check_resources(pair_config(pair_folder).model_copy(update={"pools": {"pair": without}}))
    assert caught.value.field == "pools.pair.default.name"


async def test_a_role_that_the_pool_lacks_is_refused_by_field(judges: LocalPool) -> None:
    with pytest.raises(TurnoutError, match="must be 'judge', 'large' or 'small'") as caught:
        await ask(judges, [65], "plain", {"model": "critic"})
    assert caught.value.field == "method.params.model"
    with pytest.raises(TurnoutError, match="no model has the role 'critic'"):
        judges.model_pool.by_role("critic")


async def test_one_model_alone_needs_one_line(pair_folder: Path) -> None:
    config = pair_config(pair_folder)
    alone = config.model_copy(update={"pools": {"pair": PoolConfig(large="large")}})
    loaded = LocalPool.load("pair", alone)
    assert list(loaded.members) == ["large"]
    assert loaded.model_pool.small is loaded.model_pool.large
    assert (await ask(loaded, [65, 66], "speculative")).ids == (await ask(loaded, [65, 66])).ids
    await loaded.close()
