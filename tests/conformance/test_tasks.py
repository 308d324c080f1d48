"""Every task: its result fits its schema, is the same among others, and is gone when it is cancelled."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import jsonschema
import pytest

from decoding.tasks.base import ENCODED, PACKAGE, Progress, Task, find_task, from_base64
from deployments.pool_answers import PoolAnswers
from pool.local_pool import LocalPool
from pool.tasks import task_run
from tests.engine.harness import until
from tests.engine.pools import pair_folder as pair_folder
from tests.engine.pools import pool as pool
from turnout.calls import Failure, GenerateCall
from turnout.embed_calls import TaskAnswer, TaskCall
from turnout.errors import Code, TurnoutError
from turnout.registry import names
from turnout.types import SamplingParams

TASKS = names(PACKAGE)


async def sample(pool: LocalPool, name: str) -> dict[str, Any]:
    """Parameters with which a task has something to do on the pool's random models."""
    return await find_task(name).sample(
        task_run(pool, TaskCall("r", "pair", name), pool.members["large"]), pool.model_pool
    )


async def answered(pool: LocalPool, name: str, params: dict[str, Any], **call: Any) -> TaskAnswer:
    return await pool.task(TaskCall(**{"request_id": "r", "model": "pair", "name": name, "params": params, **call}))


async def busy(pool: LocalPool, count: int) -> None:
    """Requests of other tenants, of several lengths."""

    async def one(number: int) -> None:
        sampling = SamplingParams(max_tokens=12 + number, seed=number)
        prompt = "Other requests run meanwhile. " * (1 + number % 3)
        call = GenerateCall(f"o{number}", "pair", sampling, prompt=prompt, tenant=f"t{number % 2}", method="plain")
        async for _ in pool.generate(call):
            pass

    await asyncio.gather(*map(one, range(count)))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_says_what_it_takes_and_gives(name: str) -> None:
    task: type[Task] = find_task(name)
    schema = task.schema()
    assert task.name == name
    assert schema["x-summary"].endswith(".")
    assert schema["additionalProperties"] is False
    for given in (schema, schema["x-result"]):
        jsonschema.Draft202012Validator.check_schema(given)
    for field, fields in ((task.file_param, task.Params), (task.file_result, task.Result)):
        if field:
            assert ENCODED in str(fields.model_json_schema()["properties"][field])
    if task.papers:
        assert any(f"#{number}" in (task.__doc__ or "") for number in task.papers)


@pytest.mark.parametrize("name", TASKS)
async def test_the_result_fits_its_schema_and_is_the_same_again_and_among_others(pool: LocalPool, name: str) -> None:
    params = await sample(pool, name)
    alone = await answered(pool, name, params)
    validator = jsonschema.Draft202012Validator(find_task(name).schema()["x-result"])
    assert [error.message for error in validator.iter_errors(alone.result)] == []
    assert alone.prompt_tokens > 0
    others = asyncio.create_task(busy(pool, 5))
    again = await asyncio.gather(*(answered(pool, name, params, request_id=f"r{n}") for n in range(2)))
    low = await answered(pool, name, params, priority="batch")
    await others
    for found in (*again, low):
        assert found.prompt_tokens == alone.prompt_tokens
        assert_alike(found.result, alone.result)


def assert_alike(found: Any, expected: Any) -> None:
    """Equal, numbers but for rounding."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-3)
    elif isinstance(expected, dict | list):
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_alike(found[key], expected[key])
    else:
        assert found == expected


@pytest.mark.parametrize("name", TASKS)
async def test_a_member_of_the_pool_can_be_asked(pool: LocalPool, name: str) -> None:
    task, call = find_task(name), TaskCall("r", "small", name)
    params = await task.sample(task_run(pool, call, pool.members["small"]), pool.model_pool)
    found = await answered(pool, name, params, model="small")
    assert not jsonschema.Draft202012Validator(task.schema()["x-result"]).is_valid({})
    assert jsonschema.Draft202012Validator(task.schema()["x-result"]).is_valid(found.result)


@pytest.mark.parametrize("name", TASKS)
async def test_one_that_is_cancelled_leaves_nothing(pool: LocalPool, name: str) -> None:
    """After its first forward; the fixture looks for what is left."""
    params = await sample(pool, name)
    await until(lambda: pool.stats().used_blocks == 0)
    large = pool.engines["large"]
    running = asyncio.create_task(answered(pool, name, params))
    await until(lambda: running.done() or pool.stats().used_blocks > 0)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not large.lanes


@pytest.mark.parametrize("fault", [TurnoutError(Code.OUT_OF_RANGE, "too long"), RuntimeError("a fault")])
async def test_what_a_task_read_before_it_failed_is_noted_in_its_error(
    pool: LocalPool, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, read = await sample(pool, "score"), Progress.read

    def fails(progress: Progress, tokens: int) -> None:
        read(progress, tokens)
        raise fault

    whole = await answered(pool, "score", params)
    monkeypatch.setattr(Progress, "read", fails)
    failed = await PoolAnswers(pool).task(TaskCall("r", "pair", "score", params))
    assert isinstance(failed, Failure)
    assert failed.error.code is (fault.code if isinstance(fault, TurnoutError) else Code.INTERNAL)
    assert failed.error.prompt_tokens == whole.prompt_tokens
    assert pickle.loads(pickle.dumps(failed)).error.prompt_tokens == whole.prompt_tokens  # as between processes


@pytest.mark.parametrize("name", TASKS)
async def test_unknown_parameters_and_texts_beyond_the_context_are_refused_by_name(pool: LocalPool, name: str) -> None:
    with pytest.raises(TurnoutError) as refused:
        await answered(pool, name, {**await sample(pool, name), "no_such_parameter": 1})
    assert (refused.value.code, refused.value.field) == (Code.INVALID_ARGUMENT, "params.no_such_parameter")
    params = await sample(pool, name)
    texts = [key for key, value in params.items() if isinstance(value, str)]
    reads_in_windows = ENCODED in str(find_task(name).schema()["properties"])
    for key in texts if not reads_in_windows else ():
        with pytest.raises(TurnoutError) as refused:
            await answered(pool, name, {**params, key: "word " * 1000})
        assert refused.value.code is Code.OUT_OF_RANGE
        assert (refused.value.field or "").startswith("params."), refused.value.field


async def test_tasks_and_models_that_there_are_not_are_refused(pool: LocalPool) -> None:
    with pytest.raises(TurnoutError) as refused:
        await answered(pool, "no_such_task", {})
    assert (refused.value.code, refused.value.field) == (Code.NOT_FOUND, "name")
    assert all(name in refused.value.message for name in TASKS)
    with pytest.raises(TurnoutError) as refused:
        await answered(pool, "score", {}, model="none")
    assert (refused.value.code, refused.value.field) == (Code.NOT_FOUND, "model")


async def test_compressed_alone_is_decompressed_among_others(pool: LocalPool) -> None:
    """And the other way round: the logits are equal to the bit whatever else the model computes."""
    original = "Adaptive decoding lets a small model write what it can. " * 3
    params = {"text": original, "window": 48, "overlap": 16, "lanes": 3}
    alone = (await answered(pool, "compress", params)).result["data"]
    others = asyncio.create_task(busy(pool, 9))
    among, back = await asyncio.gather(
        answered(pool, "compress", params), answered(pool, "decompress", {"data": alone})
    )
    await others
    assert among.result["data"] == alone
    assert back.result["text"] == original
    assert from_base64(back.result["data"], "data") == original.encode()
    later = await answered(pool, "decompress", {"data": among.result["data"]})
    assert later.result["text"] == original
    with pytest.raises(TurnoutError, match="another model") as refused:
        await answered(pool, "decompress", {"data": alone}, model="small")
    assert refused.value.field == "params.data"
